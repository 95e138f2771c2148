"""Files of a stored checkpoint, checked against their hashes while they are read. Nothing is given out unchecked."""

import io
import os
from collections import OrderedDict
from typing import BinaryIO, cast

import msgspec
import xxhash

from perdure.errors import ConfigError, CorruptCheckpointError, HostError
from perdure.store.address import open_medium
from perdure.store.manifest import (
    BAD,
    CHUNK,
    COMMIT,
    FINISHED,
    MANIFEST,
    FileRecord,
    Finished,
    Manifest,
    Part,
    is_plain_name,
    part_name,
    tail_name,
    unseal,
)
from perdure.store.medium import Medium, reason_of, said_plainly
from perdure.store.sink import Pace
from perdure.vocab.checkpoint import Aside, CheckpointId
from perdure.vocab.units import Bytes

TEXT_LIMIT: Bytes = 256 << 20
"""Largest manifest or part: one of 10 TiB has 80 MB of hashes."""
_CACHED = 4
"""Chunks that a reader keeps: torch looks at the end of each tensor's archive before its data."""


class CheckedFile(io.RawIOBase):
    """A file of a checkpoint, for reading. A chunk that is not what was written raises CorruptCheckpointError."""

    def __init__(self, file: BinaryIO, record: FileRecord, where: str) -> None:
        """`where`: how the file is called in an error."""
        self._file = file
        self._record = record
        self._where = where
        self._at = 0
        self._chunks: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._record.nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: object) -> int:
        """Fills the whole of `buffer`, as far as the file goes."""
        with memoryview(cast(bytearray, buffer)) as given, given.cast("B") as view:
            done = 0
            while done < view.nbytes and self._at < self._record.nbytes:
                chunk = self._chunk(self._at // CHUNK)
                inside = self._at % CHUNK
                count = min(view.nbytes - done, len(chunk) - inside)
                view[done : done + count] = chunk[inside : inside + count]
                done += count
                self._at += count
            return done

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._chunks.clear()
        super().close()

    def _chunk(self, number: int) -> bytes:
        data = self._chunks.get(number)
        if data is not None:
            self._chunks.move_to_end(number)
            return data
        try:
            data = read_chunk(self._file, self._record, number)
        except Exception as exc:  # a bad sector, a server that is away, whatever the library behind fsspec raises
            raise HostError(f"{self._where} cannot be read: {reason_of(exc)}") from exc
        if xxhash.xxh3_128_hexdigest(data) != self._record.digest(number):
            raise CorruptCheckpointError(f"{self._where}: {where_is(self._record, number)} is not what was written")
        self._chunks[number] = data
        if len(self._chunks) > _CACHED:
            self._chunks.popitem(last=False)
        return data


def read_chunk(file: BinaryIO, record: FileRecord, number: int) -> bytes:
    """As it is in the file, unchecked; shorter where the file is."""
    want = min(CHUNK, record.nbytes - number * CHUNK)
    file.seek(number * CHUNK)
    parts = []
    while want > 0 and (part := file.read(want)):
        parts.append(part)
        want -= len(part)
    return b"".join(parts)


def where_is(record: FileRecord, number: int) -> str:
    """`chunk 3 (bytes 12582912 to 16777215)`."""
    return f"chunk {number} (bytes {number * CHUNK} to {min((number + 1) * CHUNK, record.nbytes) - 1})"


def open_checked(medium: Medium, name: str, record: FileRecord) -> CheckedFile:
    """File `record` of the folder `name`. Raises CorruptCheckpointError where it is missing."""
    where = f"{record.name} of {name} in {medium.address}"
    try:
        return CheckedFile(medium.open(f"{name}/{record.name}"), record, where)
    except FileNotFoundError as exc:
        raise CorruptCheckpointError(f"{where} is missing") from exc


def read_checked(medium: Medium, name: str, record: FileRecord, limit: Bytes = TEXT_LIMIT) -> bytes:
    """All of it. Raises CorruptCheckpointError where it is not what was written, or more than `limit`."""
    if record.nbytes > limit:
        raise CorruptCheckpointError(f"{record.name} of {name} is said to have {record.nbytes} bytes")
    with open_checked(medium, name, record) as file:
        return file.readall()


def read_text(medium: Medium, name: str, file: str) -> bytes:
    """A file that carries its own checksum. Raises CorruptCheckpointError where it is missing or too large."""
    try:
        with medium.open(f"{name}/{file}") as opened, said_plainly("read", medium.address):
            text = opened.read(TEXT_LIMIT + 1)
    except FileNotFoundError as exc:
        raise CorruptCheckpointError(f"{file} of {name} in {medium.address} is missing") from exc
    if len(text) > TEXT_LIMIT:
        raise CorruptCheckpointError(f"{file} of {name} in {medium.address} has more than {TEXT_LIMIT} bytes")
    return text


def mark_in(medium: Medium, name: str, checkpoint: CheckpointId) -> Aside:
    """What the mark in a checkpoint's folder says; one that cannot be read still marks it."""
    try:
        return msgspec.json.decode(read_text(medium, name, BAD), type=Aside)
    except (CorruptCheckpointError, msgspec.DecodeError):
        return Aside(checkpoint=checkpoint, line=(-1, -1, -1), reason=f"its mark {BAD} cannot be read")


def manifest_in(medium: Medium, name: str) -> Manifest:
    """Checked against its own checksum. Raises CorruptCheckpointError."""
    return unseal(read_text(medium, name, MANIFEST), Manifest, f"{MANIFEST} of {name} in {medium.address}")


def part_in(medium: Medium, name: str, rank: int) -> Part:
    """Checked against its own checksum. Raises CorruptCheckpointError."""
    file = part_name(rank)
    return unseal(read_text(medium, name, file), Part, f"{file} of {name} in {medium.address}")


def finished_in(medium: Medium, name: str) -> Finished:
    """Checked against its own checksum. Raises CorruptCheckpointError."""
    return unseal(read_text(medium, name, FINISHED), Finished, f"{FINISHED} of {name} in {medium.address}")


# --- by address, for those who restore -------------------------------------------------------------------------------


def open_committed(url: str, name: str) -> tuple[Medium, Manifest]:
    """A committed checkpoint. `name` is `Stored.path`. Raises CorruptCheckpointError, ConfigError, HostError."""
    medium = open_medium(url)
    if not is_plain_name(name):
        raise CorruptCheckpointError(f"{name[:80]!r} is no name of a checkpoint in {url}")
    if not medium.can_rename and COMMIT not in medium.files(name):
        raise CorruptCheckpointError(f"{name} in {url} was never finished: it has no {COMMIT}")
    return medium, manifest_in(medium, name)


def read_parts(url: str, name: str) -> tuple[Part, ...]:
    """Of a committed checkpoint: where each tensor is, without torch and without its pickle."""
    medium, manifest = open_committed(url, name)
    return tuple(part_in(medium, name, rank) for rank in manifest.ranks)


def read_tail(url: str, name: str, rank: int) -> bytes:
    """What is no tensor of `rank`, checked. Raises CorruptCheckpointError where there is none of that rank."""
    medium, manifest = open_committed(url, name)
    return read_checked(medium, name, manifest.record(tail_name(rank)))


def copy_out(url: str, name: str, folder: str) -> Bytes:
    """A checked copy of a committed checkpoint, as a new folder of this machine; gives its bytes.

    It appears under its name when it is whole. Raises ConfigError where `folder` exists, CorruptCheckpointError,
    HostError.
    """
    medium, manifest = open_committed(url, name)
    target = os.path.abspath(folder)
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; give a new folder")
    to = open_medium(os.path.dirname(target))
    scratch = f".{os.path.basename(target)}.{os.getpid()}.new"
    to.make(f"{scratch}/parts")
    try:
        for record in manifest.files:
            with open_checked(medium, name, record) as source:
                _copy(source, to, f"{scratch}/{record.name}")
        for own in (MANIFEST, COMMIT):
            _copy(io.BytesIO(read_text(medium, name, own) if own == MANIFEST else b""), to, f"{scratch}/{own}")
        to.settle(f"{scratch}/parts")
        to.settle(scratch)
        to.move(scratch, os.path.basename(target))
    except BaseException:
        to.remove(scratch)
        raise
    return manifest.nbytes


def _copy(source: io.RawIOBase | io.BytesIO, to: Medium, path: str) -> None:
    with said_plainly("write to", to.address):
        sink = to.create(path, Pace(None))
        try:
            while data := source.read(CHUNK):
                sink.write(data)
            sink.finish()
        except BaseException:
            sink.discard()
            raise
