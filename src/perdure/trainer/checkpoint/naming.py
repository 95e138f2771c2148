"""Flat names of what is in a state, exactly as torch.distributed.checkpoint's flatten_state_dict gives them.

Knows nested dictionaries and wrapped modules; copies nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from perdure.errors import ConfigError

Path = tuple[str, ...]
_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Classes whose one child has no name of its own, as torch.distributed.checkpoint.state_dict sees it."""


def step_in(checkpoint_id: object) -> int:
    """The last number in DCP's `checkpoint_id`. Raises ConfigError where there is none."""
    found = re.search(r"(\d+)\D*\Z", str(checkpoint_id))
    if checkpoint_id is None or found is None:
        raise ConfigError(f"checkpoint_id={checkpoint_id!r} names no step: give it, as in checkpoint_id=f'{{step}}'")
    return int(found[1])


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(flat name, tensor or value) of everything in `value`.

    Mappings are walked always, lists only where a tensor or a mapping is in them (torch's `traverse_state_dict`).
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, list) and not _is_leaf(value):
        for number, item in enumerate(value):
            yield from leaves(f"{name}.{number}", item)
    else:
        yield name, value


def _is_leaf(values: list[Any]) -> bool:
    return not any(
        isinstance(value, Mapping | torch.Tensor) or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def mapped(name: str, value: Any, change: Callable[[str, torch.Tensor], Any]) -> Any:
    """A copy of `value` with every tensor replaced; `change` is given its flat name."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if isinstance(value, Mapping):
        items = {key: mapped(f"{name}.{key}", item, change) for key, item in value.items()}
        return items if type(value) is dict else _same_kind(value, items)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(mapped(f"{name}.{number}", item, change) for number, item in enumerate(value))
    return value


def _same_kind(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]  # OrderedDict, Counter and their like
    except TypeError:
        return items


def prefixes(module: torch.nn.Module) -> dict[str, str]:
    """What stands before a leaf's name in `module.state_dict()` → what it is called without wrappers (DDP, compile)."""
    found: dict[str, str] = {}

    def walk(part: torch.nn.Module, raw: str, plain: str) -> None:
        found[raw] = plain
        unnamed = next((_WRAPPED[kind.__name__] for kind in type(part).__mro__ if kind.__name__ in _WRAPPED), None)
        for name, child in part.named_children():
            walk(child, f"{raw}{name}.", plain if name == unnamed else f"{plain}{name}.")

    walk(module, "", "")
    return found


def plain_name(raw: str, known: Mapping[str, str]) -> str:
    """The canonical name of a parameter or buffer that `state_dict` or `named_parameters` calls `raw`."""
    at = len(raw)
    while at >= 0:  # a hook of the module may have taken prefixes off already, or have made names of its own
        at = raw.rfind(".", 0, at)
        prefix = raw[: at + 1]
        if prefix in known:
            return known[prefix] + raw[at + 1 :]
    return raw
