"""Parts of a slot file, to a connection and from one: sent as they are, and verified before they are kept.

It does not know who asks, nor why.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from perdure.errors import CorruptCheckpointError, HostError, WireError
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.vocab.ids import Rank
from perdure.vocab.units import Bytes
from perdure.wire import digest, slotfile
from perdure.wire.bulk import Line, Pace
from perdure.wire.slots import CHUNK, HASH, SlotHeader, chunk_range
from perdure.wire.tcp import why


@contextmanager
def opened(path: str | os.PathLike[str], *, writable: bool = False) -> Iterator[int]:
    """A descriptor of a slot file. Raises HostError."""
    try:
        fd = slotfile.open_slot(os.fspath(path), writable=writable)
    except OSError as exc:
        raise HostError(f"{os.fspath(path)} cannot be opened: {why(exc)}") from exc
    try:
        yield fd
    finally:
        os.close(fd)


def sealed_header(fd: int, checkpoint: CheckpointId | None, rank: Rank) -> SlotHeader:
    """The header of a file that should hold just this. Raises CorruptCheckpointError."""
    header = slotfile.read_header(fd)
    if header.state is not SlotState.SEALED or (header.checkpoint, header.rank) != (checkpoint, rank):
        raise CorruptCheckpointError(f"the slot is {header.state}, of rank {header.rank}, {header.checkpoint}")
    return header


def send_digests(line: Line, fd: int, header: SlotHeader) -> None:
    line.send_file(fd, header.hashes_start, header.hashes_start + header.chunks * HASH)


def send_chunks(line: Line, fd: int, header: SlotHeader, numbers: Iterable[int], pace: Pace | None = None) -> None:
    """The kernel sends them from the file; a chunk that changes meanwhile arrives damaged, and is found out there."""
    for number in numbers:
        start, end = chunk_range(header, number)
        if pace is not None:
            line.pause(pace.reserve(end - start, time.monotonic()))
        line.send_file(fd, start, end)


def receive_digests(line: Line, header: SlotHeader, source: str) -> bytes:
    """The hashes of all chunks; they are right if the header's root is. The header must be sound (`flaw`)."""
    room = bytearray(header.chunks * HASH)
    line.receive(memoryview(room))
    digests = bytes(room)
    if header.checkpoint is None or digest.root_of(digests, header.layout, header.checkpoint) != header.root:
        raise WireError(f"the hashes of {source} are not what was written")
    return digests


def receive_chunks(line: Line, fd: int, header: SlotHeader, digests: bytes, numbers: Iterable[int]) -> tuple[int, ...]:
    """Only what has the right hash gets into the file. Gives the numbers of the others."""
    bad = []
    with memoryview(bytearray(min(CHUNK, header.hashed_bytes))) as buffer:
        for number in numbers:
            start, end = chunk_range(header, number)
            with buffer[: end - start] as part:
                line.receive(part)
                if is_good(part, digests, number):
                    write(fd, part, start)
                else:
                    bad.append(number)
    return tuple(bad)


def missing_chunks(fd: int, header: SlotHeader, digests: bytes, numbers: Iterable[int]) -> tuple[int, ...]:
    """Those of `numbers`, ascending, that are not in the file, or not as they should be."""
    missing = []
    for number in sorted(numbers):
        start, end = chunk_range(header, number)
        part = os.pread(fd, end - start, start)  # a map would fill the holes of a tmpfs that it reads
        if not is_good(memoryview(part), digests, number):
            missing.append(number)
    return tuple(missing)


def is_good(part: memoryview, digests: bytes, number: int) -> bool:
    return digest.chunk_digest(part, 0) == digests[number * HASH : (number + 1) * HASH]


def write(fd: int, data: bytes | memoryview, start: Bytes) -> None:
    """All of it. Raises HostError: no space is left, or the file system is at fault."""
    try:
        if os.pwrite(fd, data, start) == len(data):
            return
    except OSError as exc:
        raise HostError(f"a slot cannot be written: {why(exc)}") from exc
    raise HostError("a slot cannot be written: the disk took a part of it only")
