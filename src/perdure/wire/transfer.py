"""What memory servers say to each other when slots are copied, and which of it may be believed. Pure; opens nothing.

    asking side                              giving side
    Get: head                            →   Answer: header; then the slot's hashes
    Get: ranges of chunks                →   Answer: header; then those chunks
    GetParity                            →   Answer; its head, sheet and hashes (`wire.parity`), then stripes, as asked
    Put: header                          →   Answer (held: it is here already; error: no room, …)
    the slot's hashes, then all chunks   →   Answer (again: chunks that have arrived damaged; they are sent once more),
                                             then Answer: sealed

Every request is one line of JSON on a connection of its own; so is an Answer. The rest are bytes of the slot file.
"""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote

import msgspec

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.vocab.ids import NodeId, Rank
from perdure.vocab.units import Bytes
from perdure.wire.slots import CHUNK, DATA_START, TAIL_LIMIT, SlotHeader, encode_header

LINE_LIMIT: Bytes = 1 << 20
"""Longest line: a Get for every second chunk of some 300 GiB."""
SLOT_LIMIT: Bytes = 4 << 40
"""Larger than any machine's memory: whoever names such a slot has no slot. Its hashes are 16 MiB."""
LAYOUT_LIMIT: Bytes = 64 << 20
WORLD_LIMIT = 1 << 24
REPLICAS_PER_RANK = 2
"""Files in turn, so that the older replica stays whole until the newer one is sealed."""

_NAME_LIMIT = 200  # of 255 (NAME_MAX), quoted
_HASH = re.compile(r"[0-9a-f]{32}")
_REPLICA = re.compile(r"peer-(.+)-(\d{1,8})-([01])\.slot")


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Give parts of a sealed slot."""

    token: str
    checkpoint: CheckpointId
    rank: Rank
    head: bool = False
    """The hashes. The chunks are asked for when these are known to be right."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(first chunk, how many)."""


class GetParity(msgspec.Struct, frozen=True, kw_only=True, tag="parity"):
    """Give parts of a whole parity of a checkpoint."""

    token: str
    checkpoint: CheckpointId
    head: bool = False
    ranges: tuple[tuple[int, int], ...] = ()
    """(first stripe, how many)."""


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Take a replica of a slot of `node`."""

    token: str
    node: NodeId
    header: SlotHeader


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`error` is one sentence, and then nothing follows."""

    error: str = ""
    denied: bool = False
    """The token is wrong."""
    node: str = ""
    file: str = ""
    """Both: whose it is that is being given, for a sentence about it."""
    header: SlotHeader | None = None
    held: bool = False
    again: tuple[int, ...] = ()
    sealed: bool = False


# --- what may be believed ---------------------------------------------------------------------------------------------


def flaw(header: SlotHeader) -> str:
    """Why nothing may be allocated, or named, from this header of a peer; empty: it is sound.

    That its numbers are no negative ones is already checked where it was decoded.
    """
    checkpoint = header.checkpoint
    if header.state != SlotState.SEALED or checkpoint is None:
        return "the slot is not sealed"
    if min(*checkpoint.line, checkpoint.step) < 0:
        return f"there is no checkpoint of attempt {checkpoint.attempt}, {checkpoint}"
    if not 0 <= header.rank < header.world_size <= WORLD_LIMIT:
        return f"there is no rank {header.rank} in a world of {header.world_size}"
    if header.tail_room > TAIL_LIMIT or header.tail_bytes > header.tail_room or header.layout_bytes > LAYOUT_LIMIT:
        return f"a tail of {header.tail_bytes} bytes or a layout of {header.layout_bytes} bytes is too large"
    if header.data_bytes > SLOT_LIMIT:
        return f"a slot of {header.data_bytes} bytes is larger than any memory"
    if not all(_HASH.fullmatch(each) for each in (header.layout, header.shards, header.root)):
        return "its hashes are no hashes"
    try:
        encode_header(msgspec.structs.replace(header, sequence=1 << 62))
    except CorruptCheckpointError as exc:
        return str(exc)
    return ""


def chunks_in(ranges: Iterable[tuple[int, int]], chunks: int) -> tuple[int, ...] | None:
    """The chunk numbers that `ranges` name, in order; None where one is not below `chunks`, or one is named twice."""
    numbers: list[int] = []
    for first, count in ranges:
        if first < 0 or count < 1 or first + count > chunks or len(numbers) + count > chunks:
            return None
        numbers.extend(range(first, first + count))
    return tuple(numbers) if len(set(numbers)) == len(numbers) else None


def ranges_of(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The shortest ranges for ascending chunk numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and sum(ranges[-1]) == number:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((number, 1))
    return tuple(ranges)


def head_chunks(header: SlotHeader) -> range:
    """The chunks with the tail and the layout: whoever reads a slot needs them."""
    return range((header.tail_start - DATA_START) // CHUNK, header.chunks)


def shown(text: str) -> str:
    """A peer's words, fit for a sentence of ours."""
    return "".join(each if each.isprintable() else "?" for each in text[:400])


# --- names of files --------------------------------------------------------------------------------------------------


def replica_name(node: NodeId, rank: Rank, k: int) -> str:
    """File name of the k-th replica of a rank of `node`, whatever that is called. Raises ValueError for no name."""
    try:
        quoted = quote(node, safe="")
    except UnicodeEncodeError as exc:
        raise ValueError(f"{node!r} is no name of a node") from exc
    if not 0 < len(quoted) <= _NAME_LIMIT:
        raise ValueError(f"{node[:80]!r} is no name of a node: it has {len(quoted)} characters")
    return f"peer-{quoted}-{rank}-{k}.slot"


def parse_replica_name(name: str) -> tuple[NodeId, Rank, int] | None:
    """(node, rank, k) of a `replica_name`; None for other names."""
    match = _REPLICA.fullmatch(name)
    return (NodeId(unquote(match[1])), Rank(int(match[2])), int(match[3])) if match else None


def borrowed_name(checkpoint: CheckpointId, rank: Rank) -> str:
    """File name of what was fetched of another rank's slot."""
    return f"borrowed-{'-'.join(map(str, checkpoint.line))}-{checkpoint.step}-{rank}.slot"
