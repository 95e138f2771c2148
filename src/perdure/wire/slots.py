"""A slot file: bytes that a trainer, a memory server and their successors share. Pure; it opens nothing.

    0       header A   4 KiB   written alternately, each with its own checksum: a torn header leaves the other
    4096    header B   4 KiB
    8192    data       tensors, 64-byte aligned, as `vocab.checkpoint.Layout` says
    …       tail       what is no tensor, as one msgpack value (`tail_bytes` of it are used)
    …       layout     the Layout, as JSON
    …       hashes     16 bytes (XXH3-128) per CHUNK bytes of [data, tail, layout)

Every region starts on a page. One side writes at a time, by the slot's state: FREE and WRITING are the trainer's,
WRITTEN and SEALED the memory server's.
"""

import struct
import zlib

import msgspec

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.vocab.ids import Incarnation, JobId, Rank
from perdure.vocab.units import Bytes

VERSION = 1
PAGE: Bytes = 4096
HEADER: Bytes = 4096
"""Of one of the two headers."""
DATA_START: Bytes = 2 * HEADER
CHUNK: Bytes = 4 << 20
HASH: Bytes = 16
TAIL_LIMIT: Bytes = 64 << 20
"""Largest tail; it is counted, and a script that needs more has put tensors where they do not belong."""

_MAGIC = b"PERDSLOT"
_FIXED = struct.Struct("<8sII")  # magic, length of the body, CRC-32 of the body


class SlotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """State of a slot and where everything is."""

    sequence: int
    """One more with every header written; the greater valid one counts. Its lowest bit tells the place: 0 is A."""
    version: int = VERSION
    job: JobId
    rank: Rank
    world_size: int
    state: SlotState
    checkpoint: CheckpointId | None = None
    writer: Incarnation | None = None
    """The trainer that last wrote the data."""
    layout: str
    """Hash of the layout, hexadecimal."""
    shards: str
    data_bytes: Bytes
    tail_room: Bytes
    tail_bytes: Bytes = 0
    """Used, of `tail_room`."""
    layout_bytes: Bytes
    root: str = ""
    """Set with SEALED: hash over the chunk hashes, the layout's hash and the checkpoint's id."""

    @property
    def tail_start(self) -> Bytes:
        return DATA_START + page_up(self.data_bytes)

    @property
    def layout_start(self) -> Bytes:
        return self.tail_start + page_up(self.tail_room)

    @property
    def hashes_start(self) -> Bytes:
        return self.layout_start + page_up(self.layout_bytes)

    @property
    def hashed_bytes(self) -> Bytes:
        """Length of what is hashed: from DATA_START to the hashes, gaps included (they are zero)."""
        return self.hashes_start - DATA_START

    @property
    def chunks(self) -> int:
        return -(-self.hashed_bytes // CHUNK)

    @property
    def file_bytes(self) -> Bytes:
        return self.hashes_start + page_up(self.chunks * HASH)


def page_up(count: Bytes) -> Bytes:
    """`count` rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def chunk_range(header: SlotHeader, chunk: int) -> tuple[Bytes, Bytes]:
    """(start, end) in the file of chunk number `chunk`."""
    start = DATA_START + chunk * CHUNK
    return start, min(start + CHUNK, header.hashes_start)


def header_start(sequence: int) -> Bytes:
    """Where the header with this sequence number is written."""
    return HEADER * (sequence & 1)


def encode_header(header: SlotHeader) -> bytes:
    """Exactly HEADER bytes."""
    body = msgspec.json.encode(header)
    if len(body) > HEADER - _FIXED.size:
        raise CorruptCheckpointError(f"a slot header of {len(body)} bytes does not fit; the job's name is too long")
    fixed = _FIXED.pack(_MAGIC, len(body), zlib.crc32(body))
    return (fixed + body).ljust(HEADER, b"\0")


def decode_header(first_pages: bytes | memoryview, file_bytes: Bytes) -> SlotHeader:
    """The newer valid header of the two. Raises CorruptCheckpointError where there is none, or it contradicts the file.

    `first_pages`: the file's first 2 * HEADER bytes; `file_bytes`: its size.
    """
    found = [header for place in (0, 1) if (header := _decode(first_pages[HEADER * place :], place)) is not None]
    if not found:
        raise CorruptCheckpointError("no valid slot header: the file is damaged, or is no slot of this version")
    newest = max(found, key=lambda header: header.sequence)
    if newest.file_bytes > file_bytes:
        raise CorruptCheckpointError(f"the slot is cut short: {file_bytes} of {newest.file_bytes} bytes are there")
    return newest


def _decode(part: bytes | memoryview, place: int) -> SlotHeader | None:
    if len(part) < HEADER:
        return None
    magic, length, crc = _FIXED.unpack_from(part)
    if magic != _MAGIC or length > HEADER - _FIXED.size:
        return None
    body = bytes(part[_FIXED.size : _FIXED.size + length])
    if zlib.crc32(body) != crc:
        return None
    try:
        header = msgspec.json.decode(body, type=SlotHeader)
    except msgspec.DecodeError:
        return None
    return header if header.version == VERSION and header.sequence & 1 == place else None
