"""Files of torch.distributed.checkpoint, made from sealed slots, without a process group.

Knows what torch's own loader expects; decides nothing about when, and reads no pickle.
"""

import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from perdure.errors import CorruptCheckpointError
from perdure.store.manifest import FileRecord, Part, TensorRecord, ValueRecord, pieces_of
from perdure.store.medium import Medium
from perdure.store.sink import Pace
from perdure.trainer.checkpoint.tail import dtype_named
from perdure.vocab.checkpoint import TensorPart
from perdure.vocab.ids import Rank

Path = tuple[str | int, ...]

_GROUPS = re.compile(r"(.+)\.param_groups\.\d{1,6}\.params")

_IN_OPTIMIZER = re.compile(r"\.(?:(state)\.(.+)\.([^.]+)|(param_groups)\.(\d{1,6})\.(.+))")

# --- who writes what -------------------------------------------------------------------------------------------------


def group_of(rank: int, by_rank: Sequence[str], ranks: Sequence[int]) -> tuple[Rank, ...]:
    """The ranks of `ranks` that hold the same logical shards as `rank`, itself among them."""
    return tuple(Rank(other) for other in sorted({*ranks, rank}) if by_rank[other] == by_rank[rank])


def share_of(rank: int, parts: Sequence[TensorPart], group: Sequence[int]) -> tuple[TensorPart, ...]:
    """What `rank` writes of what all of `group` have: about as many bytes as each other one. The same answer on all.

    Empty pieces are written only where the whole tensor is empty.
    """
    written = [0] * len(group)
    mine = []
    for part in sorted(parts, key=lambda part: (-part.nbytes, part.name, part.offsets)):
        if part.nbytes == 0 and 0 not in part.whole:
            continue
        to = written.index(min(written))
        written[to] += max(part.nbytes, 1)
        if group[to] == rank:
            mine.append(part)
    return tuple(sorted(mine, key=lambda part: part.start))


# --- writing ---------------------------------------------------------------------------------------------------------


class _Files(FileSystemBase):
    """What torch's writer takes for a file system: one folder of a store."""

    def __init__(self, medium: Medium, pace: Pace) -> None:
        self._medium = medium
        self._pace = pace
        self.written: list[FileRecord] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        sink = self._medium.create(str(path), self._pace)
        try:
            yield sink
        except BaseException:
            sink.discard()
            if sink.problem is not None:
                raise sink.problem from None  # torch reports what it led to
            raise
        self.written.append(sink.finish())

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        self._medium.make(str(path))

    def exists(self, path: Any) -> bool:
        return False  # each file is written anew

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError

    def rm_file(self, path: Any) -> None:
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Planner(DefaultSavePlanner):
    """Gives torch's writer the data of each item."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor], values: Mapping[str, object]) -> None:
        super().__init__()
        self._tensors = tensors
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._tensors[write_item.index]
        data = io.BytesIO()
        torch.save(self._values[write_item.index.fqn], data)
        return data


def write_data(
    medium: Medium,
    folder: str,
    rank: int,
    tensors: Sequence[tuple[TensorPart, memoryview]],
    values: Mapping[str, object],
    pace: Pace,
) -> tuple[tuple[FileRecord, ...], tuple[TensorRecord, ...], tuple[ValueRecord, ...]]:
    """`__<rank>_0.distcp`, by torch's own writer. Durable when this returns; no file where there is nothing to write.

    Raises OSError or HostError where the store refuses.
    """
    if not tensors and not values:
        return (), (), ()
    known = {MetadataIndex(part.name, part.offsets): part for part, _ in tensors}
    views = {MetadataIndex(part.name, part.offsets): _tensor(part, view) for part, view in tensors}
    items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in values]
    items += [_write_item(index, part) for index, part in known.items()]
    # Nothing is copied ahead: with that torch would touch a GPU.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files = _Files(medium, pace)
    writer.path = folder
    plan = SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_"))
    results = writer.write_data(plan, _Planner(views, values)).value()
    pieces = []
    singles = []
    for result in results:
        at = result.storage_data
        place = {"name": result.index.fqn, "file": at.relative_path, "start": at.offset, "nbytes": at.length}
        part = known.get(result.index)
        if part is None:
            singles.append(ValueRecord(**place))
        else:
            pieces.append(
                TensorRecord(**place, dtype=part.dtype, whole=part.whole, offsets=part.offsets, shape=part.shape)
            )
    return tuple(files.written), tuple(pieces), tuple(singles)


def _write_item(index: MetadataIndex, part: TensorPart) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.shape))
    data = TensorWriteData(chunk=chunk, properties=_properties(part.dtype), size=torch.Size(part.whole))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _tensor(part: TensorPart, view: memoryview) -> torch.Tensor:
    """Of the very bytes, where they are."""
    dtype = _dtype(part.dtype)
    if math.prod(part.shape) * dtype.itemsize != view.nbytes:
        raise CorruptCheckpointError(f"{view.nbytes} bytes are no {part.dtype} of shape {part.shape}: {part.name!r}")
    if not view.nbytes:
        return torch.empty(part.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(part.shape)


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError as exc:
        raise CorruptCheckpointError(f"there is no dtype {name[:40]!r}") from exc


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=_dtype(dtype), layout=torch.strided, requires_grad=False, pin_memory=False)


# --- torch's index ---------------------------------------------------------------------------------------------------


def metadata_of(parts: Sequence[Part], folder: str) -> Metadata:
    """What torch keeps in `.metadata`, from the parts. Raises CorruptCheckpointError for a dtype that torch lacks."""
    known: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, pieces in pieces_of(parts).items():
        chunks = []
        for piece in pieces:
            if math.prod(piece.shape) * _dtype(piece.dtype).itemsize > piece.nbytes:
                raise CorruptCheckpointError(f"{piece.nbytes} bytes cannot hold {piece.shape} of {name!r}")
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.shape)))
            index = MetadataIndex(name, piece.offsets, len(chunks) - 1)
            places[index] = _StorageInfo(piece.file, piece.start, piece.nbytes)
        known[name] = TensorStorageMetadata(_properties(pieces[0].dtype), torch.Size(pieces[0].whole), chunks)
    for name, first in tied_of(parts).items():  # the same bytes under each of their names
        if name not in known and first in known:
            known[name] = known[first]
            for number, chunk in enumerate(known[first].chunks):
                places[MetadataIndex(name, chunk.offsets, number)] = places[MetadataIndex(first, chunk.offsets, number)]
    for part in parts:
        for value in part.values:
            if value.name not in known:
                known[value.name] = BytesStorageMetadata()
                places[MetadataIndex(value.name)] = _StorageInfo(value.file, value.start, value.nbytes)
    return Metadata(
        state_dict_metadata=known,
        planner_data=paths_of(known),
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=folder),
        version=CURRENT_DCP_VERSION,
    )


def tied_of(parts: Iterable[Part]) -> dict[str, str]:
    """Second name → first name of tensors that all parts together keep once."""
    return {name: first for part in parts for name, first in part.tied.items()}


def paths_of(names: Iterable[str]) -> dict[str, Path]:
    """Where each value belongs in {"model": …, "optimizer": …}: the inverse of torch's flatten_state_dict.

    A module's own names have dots. What has parameter groups is an optimizer, whose state is by parameter and by name.
    """
    known = set(names)
    optimizers = {match[1] for name in known if (match := _GROUPS.fullmatch(name))}
    return {name: _path_of(name, optimizers) for name in known}


def _path_of(name: str, optimizers: set[str]) -> Path:
    for prefix in optimizers:
        match = _IN_OPTIMIZER.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
        if match is not None:
            state, parameter, leaf, groups, number, option = match.groups()
            rest: Path = (state, parameter, leaf) if state else (groups, int(number), option)
            return (*prefix.split("."), *rest)
    first, dot, rest_of_name = name.partition(".")
    return (first, rest_of_name) if dot else (first,)


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of `.metadata`."""
    return pickle.dumps(metadata)
