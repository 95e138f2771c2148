"""A lost slot made again from its parity group: the stripes of its holders, less the other terms, verified at the end.

What comes out is believed by the hashes that were made from the first copy, and by nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from perdure.agent.memory.asking import ask
from perdure.agent.memory.parity import receive_sheet, xor_into
from perdure.agent.memory.pieces import is_good, missing_chunks, opened, write
from perdure.agent.memory.transfer import begin_borrowed, is_begun
from perdure.errors import WireError
from perdure.vocab.checkpoint import CheckpointId, Group
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire import slotfile
from perdure.wire.bulk import Line, in_thread
from perdure.wire.parity import Places, Sheet, Term, digests_of, places, terms_with
from perdure.wire.slots import CHUNK, SlotHeader, chunk_range
from perdure.wire.transfer import Get, GetParity, borrowed_name, flaw, head_chunks, ranges_of, shown

PATIENCE: Seconds = 10.0
AT_ONCE = 16
"""Chunks in the works: 64 MiB."""


class Lost(msgspec.Struct, frozen=True):
    """Whose slot is wanted, and who has what of its group."""

    checkpoint: CheckpointId
    rank: Rank
    group: Group
    addresses: Mapping[NodeId, Address]
    slots: Mapping[int, tuple[Address, ...]]
    """Who has the slots of the other ranks."""
    token: str


class Piece(msgspec.Struct, frozen=True):
    """One chunk that is wanted, and of what it is made."""

    number: int
    """In the lost slot."""
    stripe: int
    terms: tuple[Term, ...]


Sheets = dict[NodeId, tuple[Sheet, bytes]]


async def rebuild(lost: Lost, chunks: Iterable[int], folder: str, *, patience: Seconds = PATIENCE) -> Path:
    """A sparse slot file in `folder` that has the header, the hashes, the tail, the layout and these `chunks`.

    As `transfer.fetch` makes it, and in the same file. Raises WireError where the group cannot give it, HostError
    where the folder cannot take it; what was good is kept.
    """
    line = Line(patience)
    path = Path(folder) / borrowed_name(lost.checkpoint, lost.rank)
    try:
        await in_thread(line, partial(_rebuild, line, lost, frozenset(chunks), path))
    except WireError as exc:
        raise WireError(f"the slot of rank {lost.rank} of {lost.checkpoint} cannot be made again: {exc}") from exc
    return path


def _rebuild(line: Line, lost: Lost, wanted: frozenset[int], path: Path) -> None:
    sheets: Sheets = {}
    sheet, hashes = _first_sheet(line, lost, sheets)
    get = Get(token=lost.token, checkpoint=lost.checkpoint, rank=lost.rank)
    if not is_begun(path, get):
        header = next(header for header in sheet.headers if header.rank == lost.rank)
        begin_borrowed(path, get, header, digests_of(sheet, hashes, int(lost.rank)))
    with opened(path, writable=True) as fd:
        header = slotfile.read_header(fd)
        digests = slotfile.read_digests(fd, header)
        if header.root != sheet.roots[int(lost.rank)]:
            raise WireError("the parity is of another slot than the one that is here in part")
        if wanted and not 0 <= min(wanted) <= max(wanted) < header.chunks:
            raise WireError(f"the slot of rank {lost.rank} has {header.chunks} chunks, not all that were asked for")
        missing = missing_chunks(fd, header, digests, wanted.union(head_chunks(header)))
        for holder, pieces in _pieces(sheet, int(lost.rank), missing):
            for at in range(0, len(pieces), AT_ONCE):
                batch = pieces[at : at + AT_ONCE]
                _make(line, lost, sheets, holder, batch, partial(_keep, fd, header, digests, batch))


def _first_sheet(line: Line, lost: Lost, sheets: Sheets) -> tuple[Sheet, bytes]:
    """Of the first holder that can give one: all have the headers and hashes of the whole group."""
    said = []
    for node in lost.group.holders:
        try:
            return _sheet(line, lost, sheets, node)
        except WireError as exc:
            said.append(f"{node}: {exc}")
    raise WireError("; ".join(said) or "nobody has parity of it")


def _sheet(line: Line, lost: Lost, sheets: Sheets, node: NodeId) -> tuple[Sheet, bytes]:
    if node not in sheets:
        ask(line, _address(lost, node), GetParity(token=lost.token, checkpoint=lost.checkpoint, head=True))
        sheet, hashes = receive_sheet(line, f"the parity on {node}")
        known = next((one for one, _ in sheets.values()), sheet)
        unsound = next((problem for header in sheet.headers if (problem := flaw(header))), "")
        if unsound or (sheet.checkpoint, sheet.node, sheet.members) != (lost.checkpoint, node, lost.group.members):
            raise WireError(f"the parity on {node} is not that of this group{unsound and ': ' + unsound}")
        if sheet.roots != known.roots:
            raise WireError(f"the parity on {node} is of other slots")
        sheets[node] = sheet, hashes
    return sheets[node]


def _pieces(sheet: Sheet, rank: int, numbers: Iterable[int]) -> Iterator[tuple[NodeId, list[Piece]]]:
    """By holder, the pieces in the order of their stripes."""
    lost = sheet.place_of(rank)
    start = next(start for header, start in sheet.rows(lost) if int(header.rank) == rank)
    found: dict[int, list[Piece]] = {}
    for number in sorted(numbers):
        holder, stripe, terms = terms_with(sheet.counts, lost, start + number)
        found.setdefault(holder, []).append(Piece(number, stripe, terms))
    for holder, pieces in found.items():
        yield sheet.members[holder].node, pieces


def _make(
    line: Line,
    lost: Lost,
    sheets: Sheets,
    holder: NodeId,
    pieces: Sequence[Piece],
    keep: Callable[[memoryview], None],
) -> None:
    """Make one batch in memory and have it kept."""
    sheet, hashes = _sheet(line, lost, sheets, holder)
    where = places(sheet, 0)
    with memoryview(bytearray(len(pieces) * CHUNK)) as room:
        _take_stripes(line, lost, holder, pieces, hashes, where, room)
        for rank, wanted in _by_slot(sheet, pieces).items():
            _take_terms(line, lost, sheet, hashes, rank, wanted, room)
        keep(room)


def _take_stripes(
    line: Line,
    lost: Lost,
    holder: NodeId,
    pieces: Sequence[Piece],
    hashes: bytes,
    where: Places,
    room: memoryview,
) -> None:
    ranges = ranges_of([piece.stripe for piece in pieces])
    ask(line, _address(lost, holder), GetParity(token=lost.token, checkpoint=lost.checkpoint, ranges=ranges))
    for at, piece in enumerate(pieces):
        with room[at * CHUNK : (at + 1) * CHUNK] as part:
            line.receive(part)
            if xxhash.xxh3_128_digest(part) != where.stripe_hash(hashes, piece.stripe):
                raise WireError(f"stripe {piece.stripe} of the parity on {holder} is not what was written")


def _by_slot(sheet: Sheet, pieces: Sequence[Piece]) -> dict[int, list[tuple[int, int]]]:
    """By rank: (chunk of its slot, place in the batch), ascending."""
    found: dict[int, list[tuple[int, int]]] = {}
    for at, piece in enumerate(pieces):
        for term in piece.terms:
            header, number = sheet.located(term)
            found.setdefault(int(header.rank), []).append((number, at))
    return found


def _take_terms(
    line: Line,
    lost: Lost,
    sheet: Sheet,
    hashes: bytes,
    rank: int,
    wanted: Sequence[tuple[int, int]],
    room: memoryview,
) -> None:
    """XOR chunks of the slot of `rank` into the batch; what one of its holders cannot give, the next one may."""
    header = next(header for header in sheet.headers if int(header.rank) == rank)
    digests = digests_of(sheet, hashes, rank)
    said, left = [], list(wanted)
    for address in lost.slots.get(rank, ()):
        try:
            left = _take_some(line, lost, address, header, digests, left, room)
        except WireError as exc:
            said.append(f"{address}: {exc}")
        if not left:
            return
    bad = f"chunk {left[0][0]} of the slot of rank {rank} is not to be had"
    raise WireError(f"{bad} ({'; '.join(said)})" if said else bad)


def _take_some(
    line: Line,
    lost: Lost,
    address: Address,
    header: SlotHeader,
    digests: bytes,
    wanted: list[tuple[int, int]],
    room: memoryview,
) -> list[tuple[int, int]]:
    """Gives those that have arrived damaged. Raises WireError where none was XORed."""
    get = Get(token=lost.token, checkpoint=lost.checkpoint, rank=header.rank)
    answer = ask(line, address, msgspec.structs.replace(get, ranges=ranges_of([number for number, _ in wanted])))
    if answer.header is None or answer.header.root != header.root:
        raise WireError(f"{shown(answer.file)} on {shown(answer.node)} is not the slot that the parity is of")
    bad, good = [], []
    with memoryview(bytearray(len(wanted) * CHUNK)) as buffer:
        for index, (number, at) in enumerate(wanted):
            start, end = chunk_range(header, number)
            with buffer[index * CHUNK : index * CHUNK + end - start] as part:
                line.receive(part)
                if not is_good(part, digests, number):
                    bad.append((number, at))
                    continue
            good.append((index, end - start, at))
        for index, count, at in good:  # all have come: a connection that breaks off has changed nothing
            with buffer[index * CHUNK : index * CHUNK + count] as part, room[at * CHUNK : (at + 1) * CHUNK] as sum_:
                xor_into(sum_, part)
    return bad


def _keep(fd: int, header: SlotHeader, digests: bytes, pieces: Sequence[Piece], room: memoryview) -> None:
    for at, piece in enumerate(pieces):
        start, end = chunk_range(header, piece.number)
        with room[at * CHUNK : at * CHUNK + end - start] as part:
            if not is_good(part, digests, piece.number):
                raise WireError(f"chunk {piece.number} does not come out as it was written")
            write(fd, part, start)


def _address(lost: Lost, node: NodeId) -> Address:
    address = lost.addresses.get(node)
    if address is None:
        raise WireError(f"nobody says where the memory of {node} is")
    return address
