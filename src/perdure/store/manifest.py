"""What the files of a stored checkpoint are called, and what they say of themselves: parts, manifest, checksums.

Pure; it opens nothing and runs nothing. Whatever it is given may be damaged or hostile: names that climb out of the
folder, sizes that no file has, text that is no JSON are refused with CorruptCheckpointError.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import xxhash

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber, JobId, Rank
from perdure.vocab.units import Bytes

VERSION = 1
CHUNK: Bytes = 4 << 20
"""One hash per so many bytes of a file; the last chunk may be shorter."""
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
"""Empty, and written last: where a folder cannot be renamed, a checkpoint without it does not exist."""
BAD = "BAD"
"""Somebody has restored it and found it to be bad: an `Aside`, as JSON. Not in the manifest."""
METADATA = ".metadata"
"""torch's own index. It is a pickle: Perdure writes it and never reads it."""
FINISHED = "parts/finish.json"
UNFINISHED = ".tmp"
TRASH = ".trash-"

_HEX = 32  # letters of an XXH3-128
_NAME = re.compile(r"step-(\d{10,18})\.(\d{1,18})-(\d{1,18})(?:-([1-9]\d{0,17}))?", re.ASCII)
_FILE = re.compile(r"__\d{1,9}_0\.distcp|tail-\d{5,9}\.msgpack|\.metadata|parts/(?:\d{5,9}|finish)\.json", re.ASCII)
_SEALED = re.compile(rb',"digest":"([0-9a-f]{32})"\}\Z')

_Shape = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file, as it was when it was written."""

    name: str
    nbytes: Bytes
    chunks: str
    """XXH3-128 of each CHUNK, hexadecimal, one after the other."""

    @property
    def count(self) -> int:
        return -(-self.nbytes // CHUNK)

    def digest(self, chunk: int) -> str:
        return self.chunks[chunk * _HEX : (chunk + 1) * _HEX]


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tensor, and where torch's writer put it."""

    name: str
    dtype: str
    whole: _Shape
    offsets: _Shape
    shape: _Shape
    file: str
    start: Bytes
    nbytes: Bytes
    """In the file, with torch's wrapping."""


class ValueRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is no tensor, and where torch's writer put it."""

    name: str
    file: str
    start: Bytes
    nbytes: Bytes


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`parts/<rank>.json`: what the drain of one rank has written. It is written after all that it names."""

    version: int = VERSION
    rank: Rank
    world_size: int
    checkpoint: CheckpointId
    layout: str
    shards: str
    root: str
    """Of the slot that it was written from."""
    group: tuple[Rank, ...]
    """Ranks with the same logical shards that share their writing."""
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    values: tuple[ValueRecord, ...]
    tied: Mapping[str, str] = {}
    """Second name → first name of tensors that are one and the same; only the first is in `tensors`."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """`parts/finish.json`: torch's index has been made from these parts."""

    version: int = VERSION
    checkpoint: CheckpointId
    parts: str
    """Hash of what all of them say."""
    metadata: FileRecord


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: all files of a committed checkpoint, with their checksums."""

    version: int = VERSION
    job: JobId
    checkpoint: CheckpointId
    world_size: int
    by_rank: tuple[str, ...]
    """Hash of the logical shards of each rank."""
    ranks: tuple[Rank, ...]
    """Whose slots it was written from: all, where no rank's own state was lost."""
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> Bytes:
        return sum(record.nbytes for record in self.files)

    def record(self, name: str) -> FileRecord:
        """Raises CorruptCheckpointError where the checkpoint has no such file."""
        for record in self.files:
            if record.name == name:
                return record
        raise CorruptCheckpointError(f"there is no {name} in {self.checkpoint}")


# --- names -----------------------------------------------------------------------------------------------------------


def name_of(checkpoint: CheckpointId) -> str:
    """Of the folder of a committed checkpoint."""
    turn = f"-{checkpoint.turn}" if checkpoint.turn else ""
    return f"step-{checkpoint.step:010d}.{checkpoint.attempt}-{checkpoint.generation}{turn}"


def parse_name(name: str) -> CheckpointId | None:
    """Of which checkpoint a folder with this name is; None for any other name."""
    match = _NAME.fullmatch(name.removesuffix(UNFINISHED))
    if match is None:
        return None
    generation, turn = GenerationNumber(int(match[3])), int(match[4] or 0)
    return CheckpointId(attempt=int(match[2]), generation=generation, turn=turn, step=int(match[1]))


def data_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def tail_name(rank: int) -> str:
    return f"tail-{rank:05d}.msgpack"


def part_name(rank: int) -> str:
    return f"parts/{rank:05d}.json"


def is_plain_name(name: str) -> bool:
    """Whether it names something directly below a folder, and nothing elsewhere."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


# --- text that carries its own checksum ------------------------------------------------------------------------------

_Sealed = TypeVar("_Sealed", Part, Finished, Manifest)


def seal(value: Part | Finished | Manifest) -> bytes:
    """JSON whose last field, `digest`, is the XXH3-128 of all before it."""
    body = msgspec.json.encode(value)[:-1]
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def unseal(text: bytes, kind: type[_Sealed], where: str) -> _Sealed:
    """The value in `text`, checked. Raises CorruptCheckpointError, naming `where`."""
    match = _SEALED.search(text[-64:])
    body = text[: len(text) - len(match[0])] if match is not None else b""
    if match is None or xxhash.xxh3_128_hexdigest(body).encode() != match[1]:
        raise CorruptCheckpointError(f"{where} is not what was written: its checksum does not match")
    try:
        value = msgspec.json.decode(body + b"}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{where} cannot be read: {exc}") from exc
    if value.version != VERSION:
        raise CorruptCheckpointError(f"{where} is of format {value.version}; this Perdure reads {VERSION}")
    _check(value, where)
    return value


def _check(value: Part | Finished | Manifest, where: str) -> None:
    match value:
        case Finished():
            check_records((value.metadata,), where)
        case Part():
            check_records(value.files, where)
            _check_tensors(value, where)
        case Manifest():
            check_records(value.files, where)
            if value.world_size != len(value.by_rank) or not set(value.ranks) <= set(range(value.world_size)):
                raise CorruptCheckpointError(f"{where} contradicts itself on its ranks")


def check_records(records: Sequence[FileRecord], where: str) -> None:
    """Raises CorruptCheckpointError for names that are not ours, or twice, and for sizes without their hashes."""
    names = [record.name for record in records]
    if len(set(names)) != len(names):
        raise CorruptCheckpointError(f"{where} names a file twice")
    for record in records:
        if _FILE.fullmatch(record.name) is None:
            raise CorruptCheckpointError(f"{where} names {record.name[:80]!r}, which no checkpoint has")
        if len(record.chunks) != record.count * _HEX:
            raise CorruptCheckpointError(f"{where}: {record.nbytes} bytes of {record.name} do not go with its hashes")


def _check_tensors(part: Part, where: str) -> None:
    sizes = {record.name: record.nbytes for record in part.files}
    pieces: tuple[TensorRecord | ValueRecord, ...] = (*part.tensors, *part.values)
    used: Counter[str] = Counter()
    for piece in pieces:
        used[piece.file] += piece.nbytes
        if piece.start + piece.nbytes > sizes.get(piece.file, -1):
            raise CorruptCheckpointError(f"{where}: {piece.name!r} lies outside of {piece.file[:80]!r}")
        if used[piece.file] > sizes[piece.file]:  # else a few bytes could stand for any number of tensors
            raise CorruptCheckpointError(f"{where}: pieces in {piece.file} overlap")
    for tensor in part.tensors:
        bounds = zip(tensor.offsets, tensor.shape, tensor.whole, strict=False)
        if not len(tensor.offsets) == len(tensor.shape) == len(tensor.whole) or any(o + s > w for o, s, w in bounds):
            raise CorruptCheckpointError(f"{where}: a piece of {tensor.name!r} does not lie in it")


# --- is everything there? --------------------------------------------------------------------------------------------


def pieces_of(parts: Iterable[Part]) -> dict[str, list[TensorRecord]]:
    """The pieces of each tensor, by name; one that several ranks wrote is taken from the lowest."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    found: dict[str, list[TensorRecord]] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        for piece in part.tensors:
            pieces = found.setdefault(piece.name, [])
            is_empty = 0 in piece.shape and 0 not in piece.whole
            if not is_empty and (piece.name, piece.offsets) not in seen:
                seen.add((piece.name, piece.offsets))
                pieces.append(piece)
    return found


def check_parts(parts: Sequence[Part], checkpoint: CheckpointId, by_rank: Sequence[str]) -> None:
    """Raises CorruptCheckpointError where the parts are not one whole checkpoint: what is missing, of whom."""
    have = {part.rank: part for part in parts}
    names = [record.name for part in parts for record in part.files]
    if len(set(names)) != len(names):
        raise CorruptCheckpointError(f"{checkpoint}: two parts name the same file")
    for part in parts:
        is_ours = part.checkpoint == checkpoint and part.world_size == len(by_rank)
        if not is_ours or part.rank >= len(by_rank) or part.shards != by_rank[part.rank]:
            raise CorruptCheckpointError(f"the part of rank {part.rank} belongs to another checkpoint or world")
        if absent := [rank for rank in part.group if rank not in have or have[rank].group != part.group]:
            raise CorruptCheckpointError(
                f"rank {part.rank} shared its writing with rank {absent[0]}, whose part is not there or disagrees"
            )
    lost = sorted(set(range(len(by_rank))) - set(have))
    uncovered = [rank for rank in lost if by_rank[rank] not in {part.shards for part in parts}]
    if uncovered:
        raise CorruptCheckpointError(f"{checkpoint}: there is no part of rank {', '.join(map(str, uncovered))}")
    for name, pieces in pieces_of(parts).items():
        _check_whole(name, pieces)


def _check_whole(name: str, pieces: Sequence[TensorRecord]) -> None:
    kinds = {(piece.whole, piece.dtype) for piece in pieces}
    if len(kinds) != 1:
        raise CorruptCheckpointError(f"the ranks do not agree on the shape or dtype of {name!r}")
    have, want = sum(math.prod(piece.shape) for piece in pieces), math.prod(pieces[0].whole)
    if have != want:
        raise CorruptCheckpointError(f"{have} of the {want} elements of {name!r} are there")
