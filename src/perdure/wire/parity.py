"""Parity of the slots of a group of nodes: which chunk goes into which stripe of whom, and a parity file's pages. Pure.

The nodes of a group have a place each. The chunks of a node are those of all its slots, rank after rank, as one row.
Chunk c of the node at place p goes to one of the m - 1 others, in turn (RAID-5 style): there it is a term of stripe
c // (m - 1), the XOR of one chunk at most of each other node, the shorter ones padded with zeros. So a node keeps
about 1/(m - 1) of a slot, takes in as much as its slots have, and any one lost node can be made again from the others.

    0      head     64 bytes: magic, length of the sheet, its CRC-32, length of hashes, their XXH3-128; zeros: no parity
    64     sheet    a `Sheet` as JSON
    …      hashes   HASH per chunk of all slots of the sheet, in its order; then HASH per stripe
    …      stripes  CHUNK each, from the next page on
"""

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId, Member, Parity, SlotState
from perdure.vocab.ids import JobId, NodeId
from perdure.vocab.units import Bytes
from perdure.wire.slots import CHUNK, HASH, SlotHeader, page_up

HEAD: Bytes = 64
FILES = 2
"""In turn, so that the older parity stays whole until the newer one is."""
SHEET_LIMIT: Bytes = 64 << 20
HASHES_LIMIT: Bytes = 256 << 20
GROUP_LIMIT = 256

_MAGIC = b"PERDXOR1"
_FIXED = struct.Struct("<8sIIQ16s")

Term = tuple[int, int]
"""(place of a node, number of one of its chunks in its row)."""


# --- places ----------------------------------------------------------------------------------------------------------


def others(size: int, place: int) -> tuple[int, ...]:
    """The other places of a group of `size`."""
    return tuple(other for other in range(size) if other != place)


def home(size: int, place: int, chunk: int) -> tuple[int, int]:
    """(place of the node, its stripe) that has chunk `chunk` of the node at `place` as a term."""
    turn = chunk % (size - 1)
    return (turn if turn < place else turn + 1), chunk // (size - 1)


def terms_of(size: int, place: int, chunks: int, holder: int) -> range:
    """Of the node at `place` with so many chunks: those that `holder` has, by its stripe."""
    first = holder if holder < place else holder - 1
    return range(first, chunks, size - 1)


def stripes(counts: Sequence[int], holder: int) -> int:
    """How many the node at place `holder` keeps, where the nodes have `counts` chunks."""
    size = len(counts)
    return max(len(terms_of(size, place, counts[place], holder)) for place in others(size, holder))


def terms_with(counts: Sequence[int], lost: int, chunk: int) -> tuple[int, int, tuple[Term, ...]]:
    """(holder, stripe, the other terms of it) from which chunk `chunk` of the node at `lost` is made again."""
    size = len(counts)
    holder, stripe = home(size, lost, chunk)
    found = []
    for place in others(size, holder):
        there = terms_of(size, place, counts[place], holder)
        if place != lost and stripe < len(there):
            found.append((place, there[stripe]))
    return holder, stripe, tuple(found)


def parity_bytes(slots: Bytes, nodes: int, k: int) -> Bytes:
    """The most that one node keeps in one parity file, where each of `nodes` nodes has `slots` bytes; domains apart."""
    if k < 1 or nodes < 2:
        return 0
    groups = min(-(-nodes // (k + 1)), nodes // 2)
    return -(-slots // max(1, nodes // groups - 1)) + 2 * CHUNK


# --- the file --------------------------------------------------------------------------------------------------------


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """What a parity file is of."""

    job: JobId
    node: NodeId
    """Who keeps it: one of `members`."""
    checkpoint: CheckpointId
    members: tuple[Member, ...]
    headers: tuple[SlotHeader, ...]
    """Of all members' slots, in the order of `members` and of their ranks."""

    @property
    def place(self) -> int:
        return [member.node for member in self.members].index(self.node)

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks in each member's row."""
        chunks = {int(header.rank): header.chunks for header in self.headers}
        return tuple(sum(chunks[rank] for rank in member.ranks) for member in self.members)

    @property
    def stripes(self) -> int:
        return stripes(self.counts, self.place)

    @property
    def roots(self) -> dict[int, str]:
        return {int(header.rank): header.root for header in self.headers}

    def rows(self, place: int) -> Iterator[tuple[SlotHeader, int]]:
        """The slots of the member at `place`, and where each begins in its row."""
        ranks, start = {int(rank) for rank in self.members[place].ranks}, 0
        for header in self.headers:
            if int(header.rank) in ranks:
                yield header, start
                start += header.chunks

    def place_of(self, rank: int) -> int:
        """Raises CorruptCheckpointError where the rank is nobody's here."""
        for place, member in enumerate(self.members):
            if rank in member.ranks:
                return place
        raise CorruptCheckpointError(f"the parity on {self.node} has nothing of rank {rank}")

    def located(self, term: Term) -> tuple[SlotHeader, int]:
        """(the slot, its chunk) that a term is."""
        place, number = term
        for header, start in self.rows(place):
            if start <= number < start + header.chunks:
                return header, number - start
        raise CorruptCheckpointError(f"the slots of {self.members[place].node} have no chunk {number}")

    def parity(self) -> Parity:
        """As control is told of it."""
        nbytes = self.stripes * CHUNK
        return Parity(checkpoint=self.checkpoint, members=self.members, roots=self.roots, nbytes=nbytes)


class Places(msgspec.Struct, frozen=True):
    """Where everything is in a parity file."""

    sheet_bytes: Bytes
    chunks: int
    """Of all slots of the sheet."""
    stripes: int

    @property
    def hashes_start(self) -> Bytes:
        return HEAD + self.sheet_bytes

    @property
    def hashes_bytes(self) -> Bytes:
        return (self.chunks + self.stripes) * HASH

    @property
    def stripes_start(self) -> Bytes:
        return page_up(self.hashes_start + self.hashes_bytes)

    @property
    def file_bytes(self) -> Bytes:
        return self.stripes_start + self.stripes * CHUNK

    def stripe_start(self, stripe: int) -> Bytes:
        return self.stripes_start + stripe * CHUNK

    def stripe_hash(self, hashes: bytes, stripe: int) -> bytes:
        at = (self.chunks + stripe) * HASH
        return hashes[at : at + HASH]


def flaw(sheet: Sheet) -> str:
    """Why this is no sheet that can be worked with; empty: it is sound. What a header says is checked elsewhere."""
    nodes = [member.node for member in sheet.members]
    ranks = [int(rank) for member in sheet.members for rank in member.ranks]
    if not 2 <= len(nodes) <= GROUP_LIMIT or len(set(nodes)) != len(nodes) or sheet.node not in nodes:
        return "its group is none"
    if len(set(ranks)) != len(ranks) or [int(header.rank) for header in sheet.headers] != ranks:
        return "its slots are not those of its group"
    if any(h.checkpoint != sheet.checkpoint or h.state is not SlotState.SEALED for h in sheet.headers):
        return "its slots are not sealed, or of another checkpoint"
    return ""


def places(sheet: Sheet, sheet_bytes: Bytes) -> Places:
    return Places(sheet_bytes, sum(header.chunks for header in sheet.headers), sheet.stripes)


def encode_head(sheet: bytes, hashes: bytes) -> bytes:
    """HEAD bytes. Written last: a file is a parity from then on."""
    fixed = _FIXED.pack(_MAGIC, len(sheet), zlib.crc32(sheet), len(hashes), xxhash.xxh3_128_digest(hashes))
    return fixed.ljust(HEAD, b"\0")


def head_lengths(head: bytes) -> tuple[Bytes, Bytes]:
    """Lengths of the sheet and the hashes. Raises CorruptCheckpointError where it is no head."""
    if len(head) < HEAD:
        raise CorruptCheckpointError("the parity is cut short")
    magic, sheet_bytes, _, hashes_bytes, _ = _FIXED.unpack_from(head)
    if magic != _MAGIC or sheet_bytes > SHEET_LIMIT or hashes_bytes > HASHES_LIMIT:
        raise CorruptCheckpointError("it is no whole parity")
    return sheet_bytes, hashes_bytes


def decode_sheet(head: bytes, text: bytes, hashes: bytes) -> Sheet:
    """The sheet that belongs to a head. Raises CorruptCheckpointError where any of the three is damaged."""
    _, sheet_bytes, crc, hashes_bytes, check = _FIXED.unpack_from(head)
    if (len(text), len(hashes)) != (sheet_bytes, hashes_bytes):
        raise CorruptCheckpointError("the parity is cut short")
    if zlib.crc32(text) != crc or xxhash.xxh3_128_digest(hashes) != check:
        raise CorruptCheckpointError("the parity's sheet or its hashes are damaged")
    try:
        sheet = msgspec.json.decode(text, type=Sheet)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptCheckpointError(f"the parity's sheet cannot be read: {exc}") from exc
    problem = flaw(sheet)
    if not problem and len(hashes) != places(sheet, len(text)).hashes_bytes:
        problem = "its hashes are not all there"
    if problem:
        raise CorruptCheckpointError(f"the parity cannot be used: {problem}")
    return sheet


def digests_of(sheet: Sheet, hashes: bytes, rank: int) -> bytes:
    """HASH per chunk of one rank's slot."""
    start = 0
    for header in sheet.headers:
        if int(header.rank) == rank:
            return hashes[start : start + header.chunks * HASH]
        start += header.chunks * HASH
    raise CorruptCheckpointError(f"the parity on {sheet.node} has nothing of rank {rank}")
