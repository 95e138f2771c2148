"""A committed checkpoint in storage as a source of shards: DCP's files, each piece verified before torch sees it.

Where a piece lies is read from the parts' JSON: `.metadata` is a pickle, and is never opened here.
"""

import ctypes
import io
import math
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from perdure.errors import CorruptCheckpointError
from perdure.store.manifest import (
    CHUNK,
    FileRecord,
    Manifest,
    Part,
    TensorRecord,
    check_parts,
    part_name,
    pieces_of,
    tail_name,
    unseal,
)
from perdure.store.medium import Medium, said_plainly
from perdure.store.reading import open_checked, open_committed, read_checked
from perdure.trainer.checkpoint.catalogue import check_layout, dtype_of
from perdure.trainer.checkpoint.sources import Span
from perdure.vocab.checkpoint import Layout, Stored, TensorPart
from perdure.vocab.ids import Rank
from perdure.wire.slots import TAIL_LIMIT

ANY_RANK = -1
"""Storage keeps each shard once, whoever wrote it: all of them are under this "rank"."""

T = TypeVar("T")


class StoredSlots:
    """See `sources.SlotSource`. Opens nothing until it is asked."""

    kind = "storage"

    def __init__(self, store: str, stored: Stored) -> None:
        self._where = f"{store.rstrip('/')}/{stored.path}"
        self._store = store
        self._stored = stored
        self._opened: tuple[Medium, Manifest] | None = None
        self._records: dict[tuple[str, tuple[int, ...]], TensorRecord] = {}
        self._files: dict[str, FileRecord] = {}
        self._last: tuple[tuple[str, tuple[int, ...]], Any] | None = None

    def ranks(self) -> tuple[int, ...]:
        return (ANY_RANK,)

    def layout(self, rank: int) -> Layout:
        """Of all shards together; `start` of a part says nothing."""
        parts = self._parts()
        self._records = {(piece.name, piece.offsets): piece for pieces in pieces_of(parts).values() for piece in pieces}
        placed: list[TensorPart] = []
        end = 0
        for record in self._records.values():
            nbytes = math.prod(record.shape) * dtype_of(record.dtype).itemsize
            if nbytes > record.nbytes:  # before anybody makes room for it
                raise CorruptCheckpointError(
                    f"{self._where}: {record.nbytes} bytes cannot hold {record.shape} of {record.name!r}"
                )
            placed.append(
                TensorPart(
                    name=record.name,
                    dtype=record.dtype,
                    shape=record.shape,
                    offsets=record.offsets,
                    whole=record.whole,
                    start=end,
                    nbytes=nbytes,
                )
            )
            end += -(-nbytes // 64) * 64
        layout = Layout(rank=Rank(0), world_size=1, parts=tuple(placed), data_bytes=end)
        check_layout(layout, self._where)
        return layout

    def tail(self, rank: int) -> bytes:
        return read_checked(self._medium, self._stored.path, self._record(tail_name(rank)), TAIL_LIMIT)

    def want(self, rank: int, spans: Sequence[Span]) -> None:
        """Each piece is read when its turn comes."""

    def read(self, rank: int, part: TensorPart, first_byte: int, count: int) -> memoryview:
        if self._last is None or self._last[0] != part.key:  # pieces of one shard are asked for one after the other
            self._last = None
            self._last = (part.key, self._tensor(part))
        if first_byte < 0 or count < 0 or first_byte + count > part.nbytes:
            raise CorruptCheckpointError(f"{self._where}: bytes {first_byte} … of {part.name} are outside of it")
        return _bytes_of(self._last[1])[first_byte : first_byte + count]

    def confirm(self) -> None:
        """What is committed does not change."""

    def close(self) -> None:
        self._last = None

    # --- files -------------------------------------------------------------------------------------------------------

    def _tensor(self, part: TensorPart) -> Any:
        record = self._records[part.key]
        where = f"{self._where}/{record.file}, {part.name!r} at {part.offsets}"
        if record.nbytes < part.nbytes:
            raise CorruptCheckpointError(f"{where}: {record.nbytes} bytes cannot hold {part.shape} of {part.dtype}")
        written = io.BytesIO(self._bytes(self._record(record.file), record.start, record.nbytes))
        tensor = _decoded(written, where)
        if (tuple(tensor.shape), tensor.dtype) != (part.shape, dtype_of(part.dtype)) or tensor.device.type != "cpu":
            raise CorruptCheckpointError(f"{where}: there is a {tensor.dtype} {tuple(tensor.shape)} in its place")
        return tensor.contiguous()

    def _bytes(self, record: FileRecord, start: int, count: int) -> bytearray:
        """Of a file, verified. Grows with what is really there."""
        found = bytearray()
        with said_plainly("read", self._store), open_checked(self._medium, self._stored.path, record) as file:
            file.seek(start)
            while len(found) < count and (piece := file.read(min(CHUNK, count - len(found)))):
                found += piece
        if len(found) != count:
            raise CorruptCheckpointError(f"{self._where}/{record.name} is cut short")
        return found

    @property
    def _medium(self) -> Medium:
        return self._committed()[0]

    def _committed(self) -> tuple[Medium, Manifest]:
        if self._opened is None:
            medium, manifest = open_committed(self._store, self._stored.path)
            if manifest.checkpoint != self._stored.checkpoint:
                raise CorruptCheckpointError(f"{self._where} holds {manifest.checkpoint}")
            self._opened = medium, manifest
            self._files = {record.name: record for record in manifest.files}
        return self._opened

    def _record(self, name: str) -> FileRecord:
        self._committed()
        if name not in self._files:
            raise CorruptCheckpointError(f"there is no {name} in {self._where}")
        return self._files[name]

    def _parts(self) -> list[Part]:
        medium, manifest = self._committed()
        names = [part_name(rank) for rank in manifest.ranks]
        parts = [
            unseal(read_checked(medium, self._stored.path, self._record(name)), Part, f"{self._where}/{name}")
            for name in names
        ]
        check_parts(parts, manifest.checkpoint, manifest.by_rank)
        return parts


def _decoded(written: io.BytesIO, where: str) -> Any:
    """The tensor that torch has saved. Nothing but a tensor is made; nothing larger than what is given."""
    return _guarded(lambda: _load(written), where)


def _load(written: io.BytesIO) -> Any:
    with zipfile.ZipFile(written) as packed:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in packed.infolist()):
            raise ValueError("it is compressed, which torch's writer never does")
    written.seek(0)
    tensor = torch.load(written, map_location="cpu", weights_only=True)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        raise ValueError(f"it is a {type(tensor).__qualname__}")
    return tensor


def _guarded(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except Exception as exc:  # bytes of a stranger: zip, unpickler and torch have their own errors each
        raise CorruptCheckpointError(f"{where}: it cannot be read as a tensor: {str(exc)[:200]}") from exc


def _bytes_of(tensor: Any) -> memoryview:
    """Of a contiguous tensor on the CPU, shared with it. NumPy, which could do this, may be missing."""
    if not tensor.numel():
        return memoryview(bytearray())
    raw = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    raw.tensor = tensor  # kept as long as any view is
    return memoryview(raw).cast("B")
