"""One node's parity of a checkpoint, made of what the other nodes of its group have sealed: pulled, verified, XORed.

A slow, stopped or dead node of the group costs this try, within the patience of a connection; nobody waits for it.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from perdure.agent.memory.asking import ask
from perdure.agent.memory.parity import erase, finish, xor_into
from perdure.agent.memory.pieces import is_good, opened, receive_digests, sealed_header
from perdure.agent.memory.shelf import allocated
from perdure.errors import CorruptCheckpointError, HostError, WireError
from perdure.vocab.checkpoint import CheckpointId, Member
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId, NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire import digest, slotfile
from perdure.wire.bulk import Line, in_thread
from perdure.wire.parity import Places, Sheet, digests_of, others, places, terms_of
from perdure.wire.parity import flaw as sheet_flaw
from perdure.wire.slots import CHUNK, SlotHeader, chunk_range
from perdure.wire.transfer import Get, flaw, ranges_of, shown

PATIENCE: Seconds = 10.0


class Gathering(msgspec.Struct, frozen=True):
    """What is to be made, and where it can be had."""

    job: JobId
    node: NodeId
    checkpoint: CheckpointId
    members: tuple[Member, ...]
    own: Mapping[int, str]
    """Paths of this node's sealed slots, by rank."""
    addresses: Mapping[NodeId, Address]
    token: str

    @property
    def place(self) -> int:
        return [member.node for member in self.members].index(self.node)


async def gather(work: Gathering, path: str, *, patience: Seconds = PATIENCE) -> Sheet:
    """Make the parity in the file at `path`, whose present content counts as lost.

    Raises WireError, HostError, CorruptCheckpointError: there is no parity in it then.
    """
    line = Line(patience)
    return await in_thread(line, partial(_gather, line, work, Path(path)))


def _gather(line: Line, work: Gathering, path: Path) -> Sheet:
    headers, digests = [], b""
    for member in work.members:
        for rank in member.ranks:
            header, hashes = _head(line, work, member.node, Rank(rank))
            headers.append(header)
            digests += hashes
    sheet = Sheet(
        job=work.job, node=work.node, checkpoint=work.checkpoint, members=work.members, headers=tuple(headers)
    )
    if problem := sheet_flaw(sheet):
        raise WireError(f"no parity can be made of {work.checkpoint}: {problem}")
    text = msgspec.json.encode(sheet)
    where = places(sheet, len(text))
    if path.exists():
        with opened(path, writable=True) as fd:
            erase(fd)
    fd = allocated(path, where.file_bytes, "parity")
    try:
        finish(fd, text, digests + _stripes(line, work, sheet, digests, fd, where))
    finally:
        os.close(fd)
    return sheet


def _head(line: Line, work: Gathering, node: NodeId, rank: Rank) -> tuple[SlotHeader, bytes]:
    """Header and hashes of one slot of the group."""
    if node == work.node:
        return _own_head(work, rank)
    answer = ask(line, _address(work, node), Get(token=work.token, checkpoint=work.checkpoint, rank=rank, head=True))
    header, source = answer.header, f"{shown(answer.file)} on {shown(answer.node)}"
    if header is None or (header.checkpoint, header.rank, header.job) != (work.checkpoint, rank, work.job):
        raise WireError(f"{source} is not the slot of rank {rank}")
    if problem := flaw(header):
        raise WireError(f"{source}: {problem}")
    return header, receive_digests(line, header, source)


def _own_head(work: Gathering, rank: Rank) -> tuple[SlotHeader, bytes]:
    path = work.own.get(int(rank))
    if path is None:
        raise HostError(f"rank {rank} has no sealed slot of {work.checkpoint} here any more")
    with opened(path) as fd:
        header = sealed_header(fd, work.checkpoint, rank)
        digests = slotfile.read_digests(fd, header)
    if digest.root_of(digests, header.layout, work.checkpoint) != header.root:
        raise CorruptCheckpointError(f"the hashes of {path} are not those that were sealed")
    return header, digests


def _stripes(line: Line, work: Gathering, sheet: Sheet, digests: bytes, fd: int, where: Places) -> bytes:
    """XOR everything into the file; gives the hashes of the stripes. One node after the other, each in its own turn."""
    here, size = sheet.place, len(sheet.members)
    filled = 0
    """Stripes that have a term already: what was in the file before does not count."""
    if not where.stripes:
        return b""  # so few chunks that all of them go to other nodes
    with (
        slotfile.map_slot(fd, writable=True) as whole,
        memoryview(whole) as view,
        view[where.stripes_start : where.file_bytes] as region,
    ):
        for place in sorted(others(size, here), key=lambda place: (place - here) % size):  # not all ask the same one
            terms = terms_of(size, place, sheet.counts[place], here)
            filled = max(filled, _add(line, work, sheet, digests, place, terms, region, filled))
        return b"".join(_hash(region, stripe) for stripe in range(where.stripes))


def _add(
    line: Line,
    work: Gathering,
    sheet: Sheet,
    digests: bytes,
    place: int,
    terms: range,
    region: memoryview,
    filled: int,
) -> int:
    """One node's terms, in the order of the stripes; gives how many."""
    stripe = 0
    with memoryview(bytearray(CHUNK)) as buffer:
        for header, start in sheet.rows(place):
            numbers = [term - start for term in terms if start <= term < start + header.chunks]
            if not numbers:
                continue
            known = digests_of(sheet, digests, int(header.rank))
            source = _open(line, work, sheet.members[place].node, header, numbers)
            for number in numbers:
                first, end = chunk_range(header, number)
                with buffer[: end - first] as part:
                    line.receive(part)
                    if not is_good(part, known, number):
                        raise WireError(f"chunk {number} of {source} is not what was written")
                    _put(region[stripe * CHUNK : (stripe + 1) * CHUNK], part, begins=stripe >= filled)
                stripe += 1
    return stripe


def _open(line: Line, work: Gathering, node: NodeId, header: SlotHeader, numbers: list[int]) -> str:
    """Have these chunks sent; gives whose they are, in words."""
    get = Get(token=work.token, checkpoint=work.checkpoint, rank=header.rank, ranges=ranges_of(numbers))
    answer = ask(line, _address(work, node), get)
    source = f"{shown(answer.file)} on {shown(answer.node)}"
    if answer.header is None or answer.header.root != header.root:
        raise WireError(f"{source} is not the slot that the hashes here are of")
    return source


def _put(stripe: memoryview, part: memoryview, *, begins: bool) -> None:
    count = len(part)
    with stripe:
        if begins:
            stripe[:count] = part
            stripe[count:] = bytes(CHUNK - count)
        else:
            xor_into(stripe, part)


def _hash(region: memoryview, stripe: int) -> bytes:
    with region[stripe * CHUNK : (stripe + 1) * CHUNK] as part:
        return xxhash.xxh3_128_digest(part)


def _address(work: Gathering, node: NodeId) -> Address:
    address = work.addresses.get(node)
    if address is None:
        raise WireError(f"nobody says where the memory of {node} is")
    return address
