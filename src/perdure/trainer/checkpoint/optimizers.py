"""An optimizer's state by flat names, also before it has any: what it will have, and how it is made.

Reads `optimizer.state` and `optimizer.param_groups` as torch's Optimizer keeps them; runs no step of the user's.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.naming import leaves
from perdure.trainer.checkpoint.tail import dtype_named

Whole = tuple[tuple[int, ...], str]
"""Shape and dtype of a whole tensor."""


class OptimizerItem:
    """One optimizer."""

    def __init__(self, prefix: str, optimizer: torch.optim.Optimizer, names: Callable[[list[Any]], list[str]]) -> None:
        """`names` gives the canonical names of parameters, in their order."""
        self.prefix = prefix
        self.optimizer = optimizer
        self._names = names

    def gather(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        for name, value in self._leaves():
            (tensors if isinstance(value, torch.Tensor) else values)[name] = value

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        state = self.optimizer.state
        groups = self.optimizer.param_groups
        named = [self._names(group["params"]) for group in groups]
        for group, names in zip(groups, named, strict=True):
            for param, name in zip(group["params"], names, strict=True):
                if param in state:
                    yield from leaves(f"{self.prefix}.state.{name}", state[param])
        for number, (group, names) in enumerate(zip(groups, named, strict=True)):
            for key, value in group.items():
                where = f"{self.prefix}.param_groups.{number}.{key}"
                yield from ((where, names),) if key == "params" else leaves(where, value)

    def expected(self) -> dict[str, Any]:
        """Tensors without memory, as the state will have them; empty where it is there, or cannot be foreseen."""
        if self.optimizer.state:
            return {}
        found: dict[str, Any] = {}
        try:
            return self._foreseen(self.optimizer.param_groups, "meta")
        except Exception:  # some look at values (Adafactor); those are given zeros, one parameter after the other
            found.clear()
        try:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    found.update(self._foreseen([{**group, "params": [param]}], "cpu"))
        except (
            Exception
        ):  # one of the user's own may need real gradients, a closure …: then it is seen at its first step
            return {}
        return found

    def _foreseen(self, groups: list[dict[str, Any]], device: str) -> dict[str, Any]:
        shadow, real_of = _shadow(self.optimizer, groups, device)
        step = type(shadow).step
        while hasattr(step, "hooked") and hasattr(step, "__wrapped__"):
            step = step.__wrapped__  # torch's wrapper runs global hooks: it would be counted as a step of training
        step(shadow)
        found: dict[str, Any] = {}
        for group in groups:
            for param, name in zip(group["params"], self._names(group["params"]), strict=True):
                state = shadow.state.get(real_of[id(param)], {})
                for leaf, value in leaves(f"{self.prefix}.state.{name}", state):
                    if isinstance(value, torch.Tensor):
                        found[leaf] = _as_meta(param, value)
        return found

    def prepare(self, wholes: Mapping[str, Whole]) -> None:
        """Make the state that the checkpoint has and this optimizer has not; its values are filled in afterwards."""
        for name, path, param, group in self._absent(wholes):
            state = self.optimizer.state[param]
            for key in path[:-1]:
                state = state.setdefault(key, {})
            state[path[-1]] = _made(path[-1], param, group, wholes[name])

    def put(self, shared: Mapping[str, Any]) -> None:
        """Values that are no tensors."""
        for number, group in enumerate(self.optimizer.param_groups):
            start = f"{self.prefix}.param_groups.{number}."
            saved = {name[len(start) :]: value for name, value in shared.items() if name.startswith(start)}
            names = self._names(group["params"])
            if saved and saved.pop("params", names) != names:
                raise ConfigError(f"group {number} of {self.prefix} has other parameters than in the checkpoint")
            group.update(_nested(saved))
        for name, path, param, _ in self._absent(shared):
            state = self.optimizer.state[param]
            for key in path[:-1]:
                state = state.setdefault(key, {})
            state[path[-1]] = shared[name]

    def _absent(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, list[str], Any, dict[str, Any]]]:
        """(flat name, path in the parameter's state, parameter, its group) of state that is no tensor here."""
        params = {
            name: (param, group)
            for group in self.optimizer.param_groups
            for param, name in zip(group["params"], self._names(group["params"]), strict=True)
        }
        start = f"{self.prefix}.state."
        here = {name for name, value in self._leaves() if isinstance(value, torch.Tensor)}
        for name in saved:
            if not name.startswith(start) or name in here:
                continue
            parts = name[len(start) :].split(".")
            for cut in range(len(parts) - 1, 0, -1):
                owner = params.get(".".join(parts[:cut]))
                if owner is not None:
                    yield name, parts[cut:], *owner
                    break


def _nested(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group; one that is itself a dictionary has been flattened."""
    result: dict[str, Any] = {}
    for name, value in saved.items():
        *path, last = name.split(".")
        inside = result
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = value
    return result


def _shadow(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], device: str) -> tuple[Any, dict[int, Any]]:
    """A copy of an optimizer over zeros (or nothing, on `meta`) with gradients; and whose shadow each one is."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[hooks] = OrderedDict()
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    made: dict[int, Any] = {}
    for group in groups:
        for param in group["params"]:
            local = getattr(param, "_local_tensor", param)
            zeros = torch.nn.Parameter(torch.zeros_like(local, device=device), requires_grad=param.requires_grad)
            zeros.grad = torch.zeros_like(local, device=device) if param.requires_grad else None
            made[id(param)] = zeros
        shadow.param_groups.append({**group, "params": [made[id(param)] for param in group["params"]]})
    return shadow, made


def _as_meta(param: Any, value: torch.Tensor) -> Any:
    """As `value`, distributed as `param` is if it has its shape."""
    local = getattr(param, "_local_tensor", None)
    if local is None or value.shape != local.shape or not value.dim():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.empty_like(param, dtype=value.dtype, device="meta")


def _made(key: str, param: Any, group: Mapping[str, Any], whole: Whole) -> torch.Tensor:
    shape, dtype = whole[0], dtype_named(whole[1])
    if shape == tuple(param.shape) and key != "step":
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    # A counter is on the host, but where a captured or fused step must read it (torch.optim.Optimizer).
    on_device = bool(shape) or bool(group.get("capturable")) or bool(group.get("fused"))
    return torch.zeros(shape, dtype=dtype, device=param.device if on_device else "cpu")
