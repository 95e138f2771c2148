"""Parity files: read, verified, given to others; and XOR. What is in them and why: `wire.parity`.

Blocking, for threads. It does not know which parity is wanted.
"""

import os

import xxhash

from perdure.agent.memory.pieces import opened, write
from perdure.errors import CorruptCheckpointError, WireError
from perdure.vocab.ids import NodeId
from perdure.wire.bulk import Line
from perdure.wire.parity import HEAD, Places, Sheet, decode_sheet, encode_head, head_lengths, places
from perdure.wire.slots import CHUNK
from perdure.wire.transfer import Answer, GetParity, chunks_in, shown

NAME = "parity-{}.xor"


def xor_into(target: memoryview, more: memoryview) -> None:
    """`target` ^= `more`, which is not longer. NumPy does it at memory speed and gives the interpreter to others."""
    count = len(more)
    try:
        import numpy  # not at the top: the server must start fast, and most jobs have no parity
    except ImportError:
        whole = int.from_bytes(target[:count], "little") ^ int.from_bytes(more, "little")
        target[:count] = whole.to_bytes(count, "little")
        return
    there = numpy.frombuffer(target[:count], numpy.uint8)
    numpy.bitwise_xor(there, numpy.frombuffer(more, numpy.uint8), out=there)


def read_parity(fd: int) -> tuple[Sheet, bytes, Places]:
    """(what it is of, its hashes, where everything is). Raises CorruptCheckpointError: no whole parity."""
    head = os.pread(fd, HEAD, 0)
    sheet_bytes, hashes_bytes = head_lengths(head)
    text = os.pread(fd, sheet_bytes, HEAD)
    hashes = os.pread(fd, hashes_bytes, HEAD + sheet_bytes)
    sheet = decode_sheet(head, text, hashes)
    where = places(sheet, sheet_bytes)
    if os.fstat(fd).st_size < where.file_bytes:
        raise CorruptCheckpointError("the parity is cut short")
    return sheet, hashes, where


def verified(path: str) -> Sheet:
    """What the parity file at `path` is of; every byte is read. Raises CorruptCheckpointError, HostError, OSError."""
    with opened(path) as fd:
        sheet, hashes, where = read_parity(fd)
        for stripe in range(where.stripes):
            part = os.pread(fd, CHUNK, where.stripe_start(stripe))
            if xxhash.xxh3_128_digest(part) != where.stripe_hash(hashes, stripe):
                raise CorruptCheckpointError(f"stripe {stripe} of {path} is not what was written")
        return sheet


def erase(fd: int) -> None:
    """No parity any more, before anything else of it changes."""
    write(fd, bytes(HEAD), 0)


def finish(fd: int, text: bytes, hashes: bytes) -> None:
    """All stripes are there: the head is stored last."""
    write(fd, text, HEAD)
    write(fd, hashes, HEAD + len(text))
    write(fd, encode_head(text, hashes), 0)


def give_parity(line: Line, wanted: GetParity, node: NodeId, path: str | None) -> None:
    """Answer one request. Raises WireError, CorruptCheckpointError, HostError before the first byte."""
    if path is None:
        raise WireError(f"{node} has no parity of {wanted.checkpoint}")
    with opened(path) as fd:
        sheet, _, where = read_parity(fd)
        if sheet.checkpoint != wanted.checkpoint:
            raise WireError(f"{node} has no parity of {wanted.checkpoint} any more")
        numbers = chunks_in(wanted.ranges, where.stripes)
        if numbers is None:
            raise WireError(f"a parity of {where.stripes} stripes has not all that were asked for")
        line.say(Answer(node=node, file=path))
        try:
            if wanted.head:
                line.send_file(fd, 0, where.hashes_start + where.hashes_bytes)
            for stripe in numbers:
                line.send_file(fd, where.stripe_start(stripe), where.stripe_start(stripe) + CHUNK)
        except WireError:
            return  # no line can be put between the bytes; the connection ends too early, and that says it


def receive_sheet(line: Line, source: str) -> tuple[Sheet, bytes]:
    """What `give_parity` sends with `head`: the sheet and the hashes. Raises WireError where they are no such."""
    try:
        head = _taken(line, HEAD)
        sheet_bytes, hashes_bytes = head_lengths(head)
        text = _taken(line, sheet_bytes)
        hashes = _taken(line, hashes_bytes)
        return decode_sheet(head, text, hashes), hashes
    except CorruptCheckpointError as exc:
        raise WireError(f"{shown(source)}: {exc}") from exc


def _taken(line: Line, count: int) -> bytes:
    room = bytearray(count)
    with memoryview(room) as view:
        line.receive(view)
    return bytes(room)
