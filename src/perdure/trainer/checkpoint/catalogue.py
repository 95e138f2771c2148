"""Which logical shards a checkpoint has and who holds each: layouts of many ranks, checked and merged.

Knows names, boxes and byte counts; reads no data and allocates nothing from a number that it has not checked.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import Layout, TensorPart

DIMENSIONS_LIMIT = 64  # at::kDimVectorStaticSize is 5; NumPy and torch take up to 64
_LARGEST = 1 << 62
"""Elements of the largest tensor: more does not fit torch's 64-bit sizes."""

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, offsets and shape of a logical shard: equal for replicas."""


def check_layout(layout: Layout, where: str) -> None:
    """Raises CorruptCheckpointError, naming `where` and the part, for one that no slot can have."""
    if not 0 <= layout.rank < layout.world_size:
        raise CorruptCheckpointError(f"{where}: there is no rank {layout.rank} of {layout.world_size}")
    for part in layout.parts:
        problem = _problem_of(part, layout.data_bytes)
        if problem:
            raise CorruptCheckpointError(f"{where}: part {part.name[:200]!r}: {problem}")
    kinds = {(part.name, part.whole, part.dtype) for part in layout.parts}
    if len(kinds) != len({part.name for part in layout.parts}):
        raise CorruptCheckpointError(f"{where}: it contradicts itself on the shape or the dtype of a tensor")
    if len({part.key for part in layout.parts if part.nbytes}) != sum(1 for part in layout.parts if part.nbytes):
        raise CorruptCheckpointError(f"{where}: the same shard is in it twice")
    in_order = sorted((part for part in layout.parts if part.nbytes), key=lambda part: part.start)
    for one, other in pairwise(in_order):
        if one.start + one.nbytes > other.start:
            raise CorruptCheckpointError(f"{where}: parts {one.name[:200]!r} and {other.name[:200]!r} overlap")


def dtype_of(name: str) -> Any:
    """torch's dtype of that name. Raises CorruptCheckpointError."""
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise CorruptCheckpointError(f"there is no dtype {name[:100]!r} in torch {torch.__version__}")
    return found


def _problem_of(part: TensorPart, data_bytes: int) -> str:
    """What is wrong with it by itself; empty: nothing."""
    if not len(part.shape) == len(part.offsets) == len(part.whole) <= DIMENSIONS_LIMIT:
        return "its shape, its offsets and the whole's shape have different lengths"
    if any(
        min(size, offset) < 0 or offset + size > whole
        for size, offset, whole in zip(part.shape, part.offsets, part.whole, strict=True)
    ):
        return f"the box {part.offsets} + {part.shape} is not inside {part.whole}"
    if math.prod(max(size, 1) for size in part.whole) > _LARGEST:
        return f"the whole {part.whole} is larger than any tensor"
    wanted = math.prod(part.shape) * dtype_of(part.dtype).itemsize
    if part.nbytes != wanted:
        return f"it has {part.nbytes} bytes, its shape needs {wanted}"
    if part.start < 0 or part.start % 64 or part.start + part.nbytes > data_bytes:
        return f"bytes {part.start} to {part.start + part.nbytes} are not in the data, or not aligned"
    return ""


class Catalogue:
    """Logical shards by name, each with its holders in the order in which they were added."""

    def __init__(self) -> None:
        self.wholes: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype of the whole tensor, by name."""
        self.boxes: dict[str, dict[tuple[int, ...], TensorPart]] = {}
        """By name and offsets: one part of each shard that is not empty."""
        self.holders: dict[Key, list[tuple[Any, int, TensorPart]]] = {}
        """By shard: (source, rank, its part there), the first one is tried first."""
        self.names: list[frozenset[str]] = []
        """Of every layout that was added."""
        self.tied: dict[str, str] = {}
        """Second name → first name of tensors that are kept once, as far as `tie` was told."""

    def add(self, source: Any, rank: int, layout: Layout) -> None:
        """Raises CorruptCheckpointError where it contradicts what is there; nothing of it is taken then."""
        for part in layout.parts:
            self._check(part)
        for part in layout.parts:
            self.wholes.setdefault(part.name, (part.whole, part.dtype))
            boxes = self.boxes.setdefault(part.name, {})
            if part.nbytes:
                boxes.setdefault(part.offsets, part)
                self.holders.setdefault((*part.key, part.shape), []).append((source, rank, part))
        self.names.append(frozenset(part.name for part in layout.parts))

    def tie(self, tied: Mapping[str, str]) -> None:
        """Find what is kept once under its other names too."""
        for name, first in tied.items():
            if name not in self.wholes and first in self.wholes:
                self.tied[name] = first
                self.wholes[name] = self.wholes[first]
                self.boxes[name] = self.boxes[first]

    def check_boxes(self) -> None:
        """Raises CorruptCheckpointError where two shards of one tensor overlap: one of them is not what it says."""
        for name, boxes in self.boxes.items():
            pair = overlapping(list(boxes.values()))
            if pair:
                raise CorruptCheckpointError(
                    f"two shards of {name!r} overlap: {pair[0].offsets} + {pair[0].shape} and "
                    f"{pair[1].offsets} + {pair[1].shape}"
                )

    @property
    def is_split_by_name(self) -> bool:
        """Whether the ranks have different names (pipeline stages): then no rank's model has all of them."""
        return len(set(self.names)) > 1

    def _check(self, part: TensorPart) -> None:
        whole = self.wholes.get(part.name)
        if whole is not None and whole != (part.whole, part.dtype):
            raise CorruptCheckpointError(
                f"ranks disagree on {part.name!r}: {whole[1]} {whole[0]} and {part.dtype} {part.whole}"
            )
        box = self.boxes.get(part.name, {}).get(part.offsets)
        if part.nbytes and box is not None and box.shape != part.shape:
            raise CorruptCheckpointError(
                f"ranks disagree on the shard of {part.name!r} at {part.offsets}: {box.shape} and {part.shape}"
            )


def overlapping(parts: Sequence[TensorPart]) -> tuple[TensorPart, TensorPart] | None:
    """Two of these boxes of one tensor that overlap, if any do. About linear for boxes that are slabs or a grid."""
    if len(parts) < 2 or not parts[0].shape:
        return (parts[0], parts[1]) if len(parts) > 1 else None
    sweep = max(range(len(parts[0].shape)), key=lambda dim: len({part.offsets[dim] for part in parts}))
    open_boxes: list[TensorPart] = []
    for part in sorted(parts, key=lambda part: part.offsets[sweep]):
        open_boxes = [box for box in open_boxes if box.offsets[sweep] + box.shape[sweep] > part.offsets[sweep]]
        for box in open_boxes:
            if _meet(box, part):
                return box, part
        open_boxes.append(part)
    return None


def _meet(one: TensorPart, other: TensorPart) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


def listed(names: Iterable[str], most: int = 5) -> str:
    """`a, b and 7 more`."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
