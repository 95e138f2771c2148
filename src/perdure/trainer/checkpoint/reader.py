"""Reading a checkpoint into any world: layouts become DCP's metadata, its plan becomes ranges of slots or files.

DCP's own planner finds what overlaps, so that any world size, uneven shards and DTensors work. Nothing is read before
it is known that every byte that is wanted exists; no collective is used.
"""

import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from perdure.errors import ConfigError, CorruptCheckpointError, NoCheckpointError
from perdure.trainer.checkpoint.catalogue import Catalogue, dtype_of, listed
from perdure.trainer.checkpoint.naming import step_in
from perdure.trainer.checkpoint.sources import BAD_SOURCE, Lender
from perdure.trainer.checkpoint.tiers import Tiers
from perdure.vocab.checkpoint import TensorPart
from perdure.vocab.units import Bytes
from perdure.wire.memory import RestorePlan

Make = Callable[[Mapping[str, tuple[tuple[int, ...], str]]], Mapping[str, torch.Tensor]]
"""(whole shape, dtype) by name → targets."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore has given, beside the tensors, which it has filled in place."""

    shared: Mapping[str, Any]
    """Values that are no tensors and equal on all ranks, by flat name."""
    own: Mapping[str, Any] | None
    """This rank's own; None: the world is another one, or it is lost."""
    owns: Mapping[int, Mapping[str, Any]]
    """Own values by the rank that wrote them: this rank's, and where the world has changed all that can be read."""
    nbytes: Bytes
    """Of the tensors here that were filled."""
    sources: Mapping[str, Bytes]
    """The same by source: "own memory", "peer memory", "storage"."""
    missing: tuple[str, ...] = ()
    """Names that the checkpoint does not have; they were left as they are. Empty where `strict`."""
    extra: tuple[str, ...] = ()
    """Names that only the checkpoint has."""


class Giver(Protocol):
    """A `Checkpoint` or a `TierWriter`: what has a line to the memory server."""

    def tiers(self, step: int | None = None) -> tuple[int, Tiers | None]:
        """(the next step to do, what can be read; None: nothing)"""


class TierReader(StorageReader):
    """For `torch.distributed.checkpoint.load(state, storage_reader=TierReader(writer))`, from any tier, any world.

    `checkpoint_id=` names a step by its last number; without it the newest complete one is loaded. Random numbers and
    what is a rank's own (positions in the data) are not DCP's to load: `Checkpoint.restore` puts them back.
    """

    def __init__(self, source: Giver | Tiers) -> None:
        """`source`: the `TierWriter` that saves, or a `Checkpoint`."""
        self._giver = None if isinstance(source, Tiers) else source
        self._found = source if isinstance(source, Tiers) else None
        self.sources: dict[str, Bytes] = {}
        """Bytes read, by source."""

    @property
    def nbytes(self) -> Bytes:
        return sum(self.sources.values())

    def start(self, step: int | None = None) -> int:
        """Ask, with all ranks, what is to be loaded; gives the next step to do. 0: there is nothing to load.

        Raises as `Checkpoint.restore`.
        """
        if self._giver is None:
            raise ConfigError("this reader was made for one checkpoint; make it of the TierWriter or the Checkpoint")
        self.close()
        start, self._found = self._giver.tiers(step)
        return start

    def close(self) -> None:
        """Let go of what was found."""
        if self._giver is not None and self._found is not None:
            self._found.close()
            self._found = None

    # DCP calls these in this order.

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None and self._giver is not None:
            step = step_in(checkpoint_id)
            if self._found is None or self._found.checkpoint.step != step:
                self.start(step)

    @property
    def _tiers(self) -> Tiers:
        if self._found is None:
            self.start()
        if self._found is None:
            raise NoCheckpointError("there is no checkpoint to load; ask TierReader.start() first: it gives 0 then")
        return self._found

    def read_metadata(self) -> Metadata:
        """Of the whole checkpoint; all ranks ask. Raises CorruptCheckpointError where no source knows a layout."""
        self._tiers.know_all()
        self._tiers.learn_tied()
        tensors = _metadata(self._tiers.catalogue)
        values = {name: BytesStorageMetadata() for name in self._tiers.shared() if name not in tensors}
        return Metadata(state_dict_metadata={**values, **tensors})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        """Raises CorruptCheckpointError, naming all that was tried, where no source of a shard is good."""
        self.sources = {}
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR and 0 not in item.lengths]
        tensors.sort(key=self._place)
        for source, rank, spans in self._tiers.wanted(map(self._span, tensors)):
            try:
                source.want(rank, spans)
            except BAD_SOURCE:
                continue  # `read` asks again, and then goes to the next source
        with torch.no_grad():
            for item in tensors:
                self._fill(item, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self._tiers.shared()[item.dest_index.fqn]))
        self._tiers.confirm()
        self.close()  # each load asks anew
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def _part(self, item: ReadItem) -> TensorPart:
        return self._tiers.catalogue.boxes[item.storage_index.fqn][tuple(item.storage_index.offset or ())]

    def _place(self, item: ReadItem) -> tuple[int, int]:
        """Neighbours in a slot are read one after the other."""
        _, rank, part = self._tiers.holders(self._part(item))[0]
        return rank, part.start

    def _span(self, item: ReadItem) -> tuple[TensorPart, int, int]:
        part = self._part(item)
        first, count = _elements(part.shape, item.storage_offsets, item.lengths)
        size = dtype_of(part.dtype).itemsize
        return part, first * size, count * size

    def _fill(self, item: ReadItem, planner: LoadPlanner) -> None:
        part, first, count = self._span(item)
        kind, view = self._tiers.read(part, first, count)
        flat = torch.frombuffer(view, dtype=torch.uint8).view(dtype_of(part.dtype))
        piece = flat.as_strided(tuple(item.lengths), _strides(part.shape))
        target = planner.resolve_tensor(item).detach()
        if target.size() != piece.size():
            raise ConfigError(f"{part.name!r}: {tuple(piece.size())} does not go into {tuple(target.size())}")
        target.copy_(piece)
        planner.commit_tensor(item, target)
        self.sources[kind] = self.sources.get(kind, 0) + target.numel() * target.element_size()


def load(
    plan: RestorePlan,
    client: Lender | None,
    targets: Mapping[str, torch.Tensor] | Make,
    *,
    rank: int,
    world_size: int,
    store: str = "",
    values: Collection[str] | None = None,
    strict: bool = True,
) -> Loaded:
    """Fill `targets` (flat name → tensor or DTensor) in place from the checkpoint that `plan` names.

    `targets` may be a function that makes them from what the checkpoint has, for state that does not exist yet; it is
    called once.
    `store`: the address that the user gave; `values`: flat names of the non-tensor state, None: not compared.
    Raises ConfigError where the checkpoint does not fit (`strict`: a name too few or too many, another dtype; always:
    another shape): nothing has been changed. Raises CorruptCheckpointError where no source of a shard is good: targets
    may be changed, and all ranks must step back together.
    """
    if plan.chosen.checkpoint is None:
        raise ConfigError("there is no checkpoint to load: the plan says that the run begins at step 0")
    tiers = Tiers(plan, client, store, rank=rank, world_size=world_size)
    try:
        wanted = _know_enough(tiers, targets)
        missing, extra = _compare(tiers, wanted, values, strict=strict)
        state = {name: tensor for name, tensor in wanted.items() if _fits(tiers.catalogue, name, tensor)}
        reader = TierReader(tiers)
        _read(tiers, reader, state)
        shared = dict(tiers.shared())
        own, owns = tiers.own_values()
    finally:
        tiers.close()
    expected = sum(local_bytes(tensor) for tensor in state.values())
    if reader.nbytes != expected:
        raise CorruptCheckpointError(f"{reader.nbytes} bytes were restored where {expected} were expected")
    return Loaded(
        shared=shared, own=own, owns=owns, nbytes=expected, sources=reader.sources, missing=missing, extra=extra
    )


def local_bytes(tensor: Any) -> Bytes:
    """Of what this rank holds of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _read(tiers: Tiers, reader: TierReader, state: dict[str, torch.Tensor]) -> None:
    planner = _planner(tiers.catalogue, state)
    plan = planner.create_local_plan()
    holes = _holes(plan, state)
    if holes:
        tried = f"; {tiers.tried}" if tiers.tried else ""
        raise CorruptCheckpointError(f"{tiers.checkpoint} has no data for parts of {listed(holes)}{tried}")
    reader.read_data(planner.finish_plan(plan), planner)


def _planner(catalogue: Catalogue, state: dict[str, torch.Tensor]) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, Metadata(state_dict_metadata=_metadata(catalogue, state)), True)
    return planner


def _know_enough(tiers: Tiers, targets: Mapping[str, torch.Tensor] | Make) -> Mapping[str, torch.Tensor]:
    """Learn layouts, the cheapest first, until every target is covered or all are known; gives the targets.

    A rank of the same world needs its own slot only. Raises CorruptCheckpointError where a layout that may have what
    is missing cannot be read.
    """
    catalogue = tiers.catalogue
    wanted: Mapping[str, torch.Tensor] | None = None
    for _ in tiers.learn():
        catalogue.check_boxes()
        if wanted is None and catalogue.names:
            wanted = targets if isinstance(targets, Mapping) else targets(catalogue.wholes)
        if wanted is not None and all(_fits(catalogue, *target) for target in wanted.items()):
            state = dict(wanted)
            if not _holes(_planner(catalogue, state).create_local_plan(), state):
                break
    if any(name not in catalogue.wholes for name in wanted or ()):
        tiers.learn_tied()
    absent = [name for name in wanted or () if name not in catalogue.wholes]
    if wanted is None or (absent and tiers.tried):
        what = listed(absent) if absent else "its layouts"
        raise CorruptCheckpointError(f"{tiers.checkpoint}: cannot read {what}: {tiers.tried or 'nobody has it'}")
    return wanted


def _fits(catalogue: Catalogue, name: str, tensor: torch.Tensor) -> bool:
    whole = catalogue.wholes.get(name)
    return whole is not None and whole[0] == tuple(tensor.shape)


def _compare(
    tiers: Tiers, targets: Mapping[str, torch.Tensor], values: Collection[str] | None, *, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(missing, extra) names. Raises ConfigError that lists what does not fit."""
    wholes = tiers.catalogue.wholes
    shared = tiers.shared()
    wanted = set(targets) | set(shared if values is None else values)
    there = set(wholes) | set(shared)
    tied = tiers.catalogue.tied
    known = wanted | {tied[name] for name in wanted if name in tied}  # one name of a tied tensor stands for all
    missing = tuple(sorted(wanted - there))
    extra = tuple(sorted(name for name in there - known if tied.get(name) not in known))
    both = sorted(set(wholes) & set(targets))
    shapes = [
        f"{n} {tuple(targets[n].shape)} ≠ {wholes[n][0]}" for n in both if not _fits(tiers.catalogue, n, targets[n])
    ]
    dtypes = [f"{n} {targets[n].dtype} ≠ {wholes[n][1]}" for n in both if targets[n].dtype != dtype_of(wholes[n][1])]
    findings: list[tuple[str, Collection[str]]] = [("of another shape (here ≠ there)", shapes)]
    if strict:
        findings += [
            ("not in the checkpoint", missing),
            ("only in the checkpoint", () if tiers.catalogue.is_split_by_name else extra),
            ("of another dtype (here ≠ there)", dtypes),
        ]
    said = [f"{what}: {listed(names)}" for what, names in findings if names]
    if said:
        raise ConfigError(f"the checkpoint of {tiers.checkpoint} does not fit this state; {'; '.join(said)}")
    return missing, extra


def _metadata(catalogue: Catalogue, only: Iterable[str] | None = None) -> dict[str, TensorStorageMetadata]:
    names = catalogue.wholes if only is None else only
    return {name: _tensor_metadata(*catalogue.wholes[name], catalogue.boxes[name].values()) for name in names}


def _tensor_metadata(whole: tuple[int, ...], dtype: str, parts: Iterable[TensorPart]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(dtype)),
        size=torch.Size(whole),
        chunks=[ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in parts],
    )


def _holes(plan: LoadPlan, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Targets of which a part is in no shard. The shards do not overlap: so counting elements is enough."""
    found: dict[str, int] = {}
    for item in plan.items:
        found[item.dest_index.fqn] = found.get(item.dest_index.fqn, 0) + math.prod(item.lengths)
    return [name for name, tensor in state.items() if found.get(name, 0) * tensor.element_size() != local_bytes(tensor)]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, row-major."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _elements(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """(first, count) of the shortest run of a row-major tensor's elements that holds this box. No length is 0."""
    strides = _strides(shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def _pickled(value: Any) -> io.BytesIO:
    """As DCP's planner wants its values; it came from a tail, where there are no pickles."""
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    return written
