"""From named tensors to the flat layout of a slot, and to the memory that is copied.

Knows torch's tensors and DTensors; does not know models or slots. A layout is made anew only when a name, a shape or
a dtype has changed; finding out costs about a microsecond per tensor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from perdure.errors import ConfigError
from perdure.vocab.checkpoint import Layout, TensorPart
from perdure.vocab.ids import Rank
from perdure.vocab.units import Bytes
from perdure.wire import digest

ALIGN: Bytes = 64

Place = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""This rank's part of a tensor, the offsets of its first element in the whole, the shape of the whole."""


class Bound:
    """A layout together with the tensors whose bytes it lays out."""

    __slots__ = ("flat", "hash", "key", "layout", "places", "rest", "shards", "text")

    def __init__(self, layout: Layout, places: Sequence[torch.Tensor], key: tuple[Any, ...]) -> None:
        self.layout = layout
        self.places = tuple(places)
        """The local tensor of each part, in the order of `layout.parts`."""
        self.key = key
        self.text = msgspec.json.encode(layout)
        self.hash = digest.layout_hash(layout)
        self.shards = digest.shards_hash(layout)
        self._sort()

    def again(self, places: Sequence[torch.Tensor], key: tuple[Any, ...]) -> "Bound":
        """The same layout for tensors that lie elsewhere."""
        copy = object.__new__(Bound)
        copy.layout, copy.text, copy.hash, copy.shards = self.layout, self.text, self.hash, self.shards
        copy.places, copy.key = tuple(places), key
        copy._sort()
        return copy

    def _sort(self) -> None:
        flat, odd = [], []
        for part, tensor in zip(self.layout.parts, self.places, strict=True):
            if not part.nbytes:
                continue
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
                flat.append((part.start, tensor.data_ptr(), part.nbytes))
            else:
                odd.append((part, tensor))
        self.flat = tuple(flat)
        """(start in the data, address, bytes) of what is copied as it lies in memory."""
        self.rest = tuple(odd)
        """(part, tensor) of what torch must copy: on a device, or not contiguous."""


def bind(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, previous: Bound | None = None) -> Bound:
    """The layout of these tensors and where their bytes are; `previous` itself where nothing has changed.

    Raises ConfigError that names a tensor of a kind that cannot be kept.
    """
    names = tuple(sorted(tensors))  # the same whatever came first: an optimizer's state or its options
    key = (names, tuple(_signature(tensors[name]) for name in names))
    if previous is not None and previous.key == key:
        return previous
    placed = [place(name, tensors[name]) for name in names]
    parts, end = [], 0
    for name, (local, offsets, whole) in zip(names, placed, strict=True):
        nbytes = local.numel() * local.element_size()
        parts.append(
            TensorPart(
                name=name,
                dtype=str(local.dtype).removeprefix("torch."),
                shape=tuple(local.shape),
                offsets=offsets,
                whole=whole,
                start=end,
                nbytes=nbytes,
            )
        )
        end += -(-nbytes // ALIGN) * ALIGN
    layout = Layout(rank=Rank(rank), world_size=world_size, parts=tuple(parts), data_bytes=end)
    locals_ = [local for local, _, _ in placed]
    if previous is not None and previous.layout == layout:
        return previous.again(locals_, key)
    return Bound(layout, locals_, key)


def place(name: str, tensor: Any) -> Place:
    """Where this rank's part of a tensor lies in the whole. Raises ConfigError for a kind that cannot be kept."""
    if is_distributed(tensor):
        return _place_distributed(name, tensor)
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and not _is_plain(tensor):
        raise ConfigError(
            f"the tensor {name} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can keep yet; give "
            "plain tensors or DTensors (fully_shard, not FullyShardedDataParallel)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(f"the tensor {name} is sparse or quantised, which no checkpoint can keep yet")
    return tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape)


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. torch.distributed.tensor is costly to import, and not wanted before it is used."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _place_distributed(name: str, tensor: Any) -> Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(f"the DTensor {name} is a partial sum, which no checkpoint can keep; redistribute it first")
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor.detach()
    if math.prod(shape) != local.numel():
        raise ConfigError(f"the DTensor {name} has a part of {tuple(local.shape)} where {tuple(shape)} belongs")
    if not local.numel():
        return local.reshape(shape), tuple(offsets), tuple(tensor.shape)
    return local, tuple(offsets), tuple(tensor.shape)


def _is_plain(tensor: Any) -> bool:
    """A subclass of Tensor that is one in memory too: a Buffer, or a user's class with methods of its own."""
    wraps = hasattr(tensor, "__tensor_flatten__") or getattr(type(tensor), "__torch_dispatch__", None) is not getattr(
        torch.Tensor, "__torch_dispatch__", None
    )
    return isinstance(tensor, torch.Tensor) and not wraps


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Its memory does not hold its values: they are to be conjugated or negated when read."""
    return bool(tensor.is_conj() or tensor.is_neg())


def _signature(tensor: Any) -> tuple[Any, ...]:
    """Everything that the layout and the copy depend on. Two microseconds at most: it is asked before every copy."""
    if hasattr(tensor, "placements"):
        local = tensor._local_tensor
        return local.data_ptr(), local.shape, local.stride(), local.dtype, tensor.shape, tensor.placements
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # without memory of its own: sparse, and what wraps other tensors
        return 0, tensor.shape, (), tensor.dtype


def drop_tied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors without those that are another one under a second name, second name → first name)."""
    first: dict[tuple[Any, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        signature = _signature(tensor)
        if not signature[0]:  # no memory: empty, or on a device without
            kept[name] = tensor
            continue
        owner = first.setdefault(signature, name)
        if owner == name:
            kept[name] = tensor
        else:
            tied[name] = owner
    return kept, tied


def reasons_of_slowness(bound: Bound) -> Iterable[str]:
    """Why torch has to copy parts of this state element by element."""
    names = [part.name for part, tensor in bound.rest if tensor.device.type == "cpu"]
    if names:
        yield f"{len(names)} tensors are not contiguous, the first is {names[0]}"
