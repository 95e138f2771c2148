"""What a script gave to `run.checkpoint`, as tensors and values by flat name; and how they are put back.

Knows modules, optimizers and everything with `state_dict` and `load_state_dict`; does not know slots or where a
checkpoint comes from. Tensors of modules and optimizers are the living ones: filling them restores them.
"""

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from perdure.errors import ConfigError
from perdure.trainer.checkpoint import randomness
from perdure.trainer.checkpoint.layout import drop_tied, is_distributed
from perdure.trainer.checkpoint.naming import leaves, mapped, plain_name, prefixes
from perdure.trainer.checkpoint.optimizers import OptimizerItem, Whole
from perdure.trainer.checkpoint.tail import TIED, dtype_named, tied_in

OBJECTS = "objects"
"""In the shared values: names of all that was given but modules, whose tensors tell, and data loaders."""
_REFERENCE = "perdure.tensor"
_OWN_KEYWORDS = ("data", "loader", "dataloader", "sampler", "dataset")
_DATA_AXES = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "ddp", "data")


class Item(Protocol):
    """One object that a script gave."""

    prefix: str

    def gather(self, tensors: dict[str, Any], values: dict[str, Any]) -> None: ...

    def prepare(self, wholes: Mapping[str, Whole]) -> None: ...

    def put(self, shared: Mapping[str, Any]) -> None: ...


class Gathered:
    """Everything at one moment. The tensors are the script's own, not copies."""

    __slots__ = ("own", "shared", "tensors")

    def __init__(self, tensors: dict[str, Any], shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.tensors, self.shared, self.own = tensors, shared, own


class ModuleItem:
    """A module, by the names that it has without DDP, compile or activation checkpointing around it."""

    def __init__(self, prefix: str, module: torch.nn.Module) -> None:
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
            raise ConfigError(
                f"{prefix} is a FullyShardedDataParallel, which is not supported; use fully_shard (FSDP2)"
            )
        self.prefix = prefix
        self.module = module
        self._prefixes: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def gather(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        for raw, value in self.module.state_dict().items():
            name = self._named(raw)
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                values[name] = value

    def prepare(self, wholes: Mapping[str, Whole]) -> None:
        """A module has all its tensors from the start."""

    def put(self, shared: Mapping[str, Any]) -> None:
        extra = {raw: shared[self._named(raw)] for raw in self.module.state_dict() if self._named(raw) in shared}
        if extra:  # what modules keep by get_extra_state
            self.module.load_state_dict(extra, strict=False)

    def params(self) -> dict[int, str]:
        """Canonical name, without the prefix, by the parameter's id."""
        return {id(param): self._named(raw)[len(self.prefix) + 1 :] for raw, param in self.module.named_parameters()}

    def _named(self, raw: str) -> str:
        name = self._names.get(raw)
        if name is None:
            if not self._prefixes:
                self._prefixes = prefixes(self.module)
            name = self._names[raw] = f"{self.prefix}.{plain_name(raw, self._prefixes)}"
        return name


class StatefulItem:
    """Anything else with a state: schedulers, scalers, averages. Equal on all ranks, but for data loaders."""

    def __init__(self, prefix: str, thing: Any, *, is_own: bool) -> None:
        self.prefix = prefix
        self.thing = thing
        self.is_own = is_own
        """Its state is this rank's alone: it is kept whole in the tail."""
        self._filled: dict[str, torch.Tensor] = {}

    def gather(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        state = self.thing.state_dict()
        if self.is_own:
            values[self.prefix] = state
            return
        for name, value in leaves(self.prefix, state):
            (tensors if isinstance(value, torch.Tensor) else values)[name] = value
        # The flat names are DCP's; they do not tell a number from its text. This is what is put back.
        values[self.prefix] = mapped(self.prefix, state, lambda name, _: {_REFERENCE: name})

    def prepare(self, wholes: Mapping[str, Whole]) -> None:
        start = f"{self.prefix}."
        current: dict[str, Any] = {}
        self.gather(current, {})
        self._filled = {
            name: torch.zeros_like(current[name])
            if is_distributed(current.get(name))
            else torch.zeros(whole[0], dtype=dtype_named(whole[1]))
            for name, whole in wholes.items()
            if name.startswith(start)
        }

    def targets(self) -> dict[str, torch.Tensor]:
        """Tensors to be filled, as `prepare` has made them."""
        return self._filled

    def put(self, shared: Mapping[str, Any]) -> None:
        if self.prefix in shared:
            self.thing.load_state_dict(self._with_tensors(shared[self.prefix], tied_in(shared)))
        self._filled = {}

    def _with_tensors(self, value: Any, tied: Mapping[str, str]) -> Any:
        if isinstance(value, dict):
            if set(value) == {_REFERENCE}:
                name = value[_REFERENCE]
                return self._filled[name if name in self._filled else tied[name]]
            items = {key: self._with_tensors(item, tied) for key, item in value.items()}
            return items if type(value) is dict else type(value)(items)
        if isinstance(value, list | tuple):
            return type(value)(self._with_tensors(item, tied) for item in value)
        return value


class State:
    """All objects of one `run.checkpoint`."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raises ConfigError for an object that has no state."""
        self._modules: list[ModuleItem] = []
        self._optimizers: list[OptimizerItem] = []
        self._others: list[StatefulItem] = []
        self._params: dict[int, str] = {}
        found = [(name, thing) for keyword, value in objects.items() for name, thing in _expanded(keyword, value)]
        taken = [name for name, _ in found if name in (TIED, OBJECTS)]
        if taken:
            raise ConfigError(f"run.checkpoint({taken[0]}=…): checkpoints use this name themselves; choose another one")
        for name, thing in found:
            if isinstance(thing, torch.nn.Module):
                self._modules.append(ModuleItem(name, thing))
        for name, thing in found:
            if isinstance(thing, torch.optim.Optimizer) and _is_ordinary(thing):
                self._optimizers.append(OptimizerItem(name, thing, self._names_of))
            elif not isinstance(thing, torch.nn.Module):
                self._others.append(StatefulItem(name, thing, is_own=_is_own(name, thing)))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [item.optimizer for item in self._optimizers]

    def gather(self) -> Gathered:
        """Everything as it is now; costs some microseconds per tensor."""
        tensors: dict[str, Any] = {}
        values: dict[str, Any] = {}
        with torch.no_grad():
            for item in self._living():
                item.gather(tensors, values)
            for other in self._others:
                if not other.is_own:
                    other.gather(tensors, values)
        tensors, tied = drop_tied(tensors)
        if tied:
            values[TIED] = tied
        values[OBJECTS] = self._names_of_objects()
        return Gathered(tensors, values, self._own(tensors))

    def owned_memory(self) -> frozenset[int]:
        """Addresses of tensors that change in an optimizer's step only: parameters, and what optimizers keep."""
        return frozenset(
            getattr(tensor, "_local_tensor", tensor).data_ptr()
            for item in self._optimizers
            for group in item.optimizer.param_groups
            for param in group["params"]
            for tensor in (param, *item.optimizer.state.get(param, {}).values())
            if isinstance(tensor, torch.Tensor)
        )

    def expected(self) -> dict[str, Any]:
        """Tensors that the first step will add, without memory."""
        return {name: tensor for item in self._optimizers for name, tensor in item.expected().items()}

    def targets(self, wholes: Mapping[str, Whole], tied: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """What a checkpoint with these tensors is to be filled into. Makes what optimizers do not have yet.

        `tied`: second name → first name of those that it keeps once.
        """
        every = {**wholes, **{name: wholes[first] for name, first in tied.items() if first in wholes}}
        for item in self._living():
            item.prepare(every)
        for other in self._others:
            other.prepare(wholes)
        tensors: dict[str, Any] = {}
        for item in self._living():
            item.gather(tensors, {})
        tensors, _ = drop_tied(tensors)
        for other in self._others:
            tensors.update(other.targets())
        return tensors

    def put(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, *, strict: bool = True) -> None:
        """Values that are no tensors, when the tensors are there. Without `own` data positions and random numbers stay.

        Raises ConfigError where the checkpoint has an object that was not given, or the other way round.
        """
        if strict:
            self._check(shared)
        with torch.no_grad():
            for item in self._living():
                item.put(shared)
            for other in self._others:
                if not other.is_own:
                    other.put(shared)
                elif own is not None:
                    other.put(own["state"])
        if own is not None:
            randomness.put(own["rng"])

    def _living(self) -> list[Item]:
        """What is restored in place."""
        return [*self._modules, *self._optimizers]

    def loaders(self) -> dict[str, Any]:
        """Objects whose state is this rank's alone, by name."""
        return {item.prefix: item.thing for item in self._others if item.is_own}

    def _names_of_objects(self) -> list[str]:
        shared = [item.prefix for item in self._others if not item.is_own]
        return sorted([*shared, *(item.prefix for item in self._optimizers)])

    def _check(self, shared: Mapping[str, Any]) -> None:
        given, saved = set(self._names_of_objects()), set(shared.get(OBJECTS, ()))
        missing, extra = sorted(given - saved), sorted(saved - given)
        if missing or extra:
            parts = [f"not in the checkpoint: {', '.join(missing)}"] if missing else []
            parts += [f"only in the checkpoint: {', '.join(extra)}"] if extra else []
            raise ConfigError(f"run.checkpoint was given other objects than were saved; {'; '.join(parts)}")

    def _own(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for other in self._others:
            if other.is_own:
                other.gather({}, state)
        return {"rng": randomness.take(), "seed": torch.initial_seed(), "state": state, "dp": data_place(tensors)}

    def _names_of(self, params: list[Any]) -> list[str]:
        if any(id(param) not in self._params for param in params):
            self._params = self._all_params()
        # An optimizer without its module: by its own numbers, as its state_dict has them.
        numbers = enumerate(params)
        return [self._params.get(id(param), str(number)) for number, param in numbers]

    def _all_params(self) -> dict[int, str]:
        several = len(self._modules) > 1
        found: dict[int, str] = {}
        for item in self._modules:
            for key, name in item.params().items():
                found.setdefault(key, f"{item.prefix}.{name}" if several else name)
        return found


def data_place(tensors: Mapping[str, Any]) -> tuple[int, int]:
    """(index, number) of this rank among those that see different data, as far as meshes tell; else by rank."""
    for tensor in tensors.values():
        mesh = getattr(tensor, "device_mesh", None)
        names = getattr(mesh, "mesh_dim_names", None)
        if mesh is None or not names or not set(names) & set(_DATA_AXES):
            continue
        index, count = 0, 1
        for name, at, size in zip(names, mesh.get_coordinate(), mesh.shape, strict=True):
            if name in _DATA_AXES:
                index, count = index * size + at, count * size
        return index, count
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _expanded(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _expanded(f"{name}.{key}", item)]
    if isinstance(value, list | tuple):
        return [found for number, item in enumerate(value) for found in _expanded(f"{name}.{number}", item)]
    raise ConfigError(
        f"run.checkpoint({name}=…): {type(value).__name__} has no state_dict and load_state_dict; wrap it in an object "
        "that has them"
    )


def _is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is what it seems; some (ZeRO) keep more, and say so by a state_dict of their own."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _is_own(name: str, thing: Any) -> bool:
    """Data loaders and samplers, by name or because one can iterate over them."""
    return name.split(".", 1)[0] in _OWN_KEYWORDS or hasattr(thing, "__iter__")
