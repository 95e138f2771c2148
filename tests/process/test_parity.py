"""Parity between memory servers: real sockets and files; nodes are folders. What is rebuilt is what was written."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from perdure.agent.memory.gathering import Gathering, gather
from perdure.agent.memory.parity import verified
from perdure.agent.memory.rebuild import Lost, rebuild
from perdure.errors import CorruptCheckpointError, WireError
from perdure.vocab.checkpoint import Group, Member
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId, Rank
from perdure.wire.parity import HEAD, Sheet
from perdure.wire.slots import CHUNK, DATA_START
from perdure.wire.transfer import borrowed_name
from tests.process.transfers import JOB, TOKEN, Slots, a_slot, flip, hashed, is_whole, serving, step, stop_at, through

pytestmark = pytest.mark.anyio
ONE = step(1)
SIZES = {"a": (5 * CHUNK, 3 * CHUNK + 7), "b": (7 * CHUNK,), "c": (100,), "d": (4 * CHUNK + 1, 9, 2 * CHUNK)}
"""Data bytes of each rank of each node: other numbers of ranks, other sizes, one nearly empty."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def size_of(path: Path) -> int:
    return path.stat().st_size


def memory_of(path: Path) -> int:
    return path.stat().st_blocks * 512


class Cluster:
    """Nodes that serve their slots and their parity."""

    def __init__(self, folder: Path, sizes: dict[str, tuple[int, ...]]) -> None:
        self.folder, self.slots, self.members = folder, dict[int, Path](), list[Member]()
        self.addresses: dict[NodeId, Address] = {}
        self.parity: dict[NodeId, str] = {}
        for node, each in sizes.items():
            ranks = []
            for data in each:
                rank = len(self.slots)
                self.slots[rank] = folder / node / f"own-{rank}-0.slot"
                a_slot(self.slots[rank], ONE, rank, data=data)
                ranks.append(rank)
            self.members.append(Member(node=NodeId(node), ranks=tuple(ranks)))

    def ranks_of(self, node: str) -> tuple[int, ...]:
        return next(member.ranks for member in self.members if member.node == node)

    def path(self, node: str) -> str:
        return str(self.folder / node / "parity-0.xor")

    async def make(self, node: str, *, patience: float = 10.0) -> Sheet:
        own = {rank: str(self.slots[rank]) for rank in self.ranks_of(node)}
        work = Gathering(JOB, NodeId(node), ONE, tuple(self.members), own, self.addresses, TOKEN)
        sheet = await gather(work, self.path(node), patience=patience)
        self.parity[NodeId(node)] = self.path(node)
        return sheet

    async def rebuilt(self, node: str, rank: int, into: Path, chunks: range | None = None) -> Path:
        """The slot of `rank` of the lost `node`, made again by somebody else."""
        os.makedirs(into, exist_ok=True)
        others = [member for member in self.members if member.node != node]
        slots = {other: (self.addresses[m.node],) for m in others for other in m.ranks}
        group = Group(members=tuple(self.members), holders=tuple(m.node for m in others if m.node in self.parity))
        addresses = {member.node: self.addresses[member.node] for member in others}
        lost = Lost(ONE, Rank(rank), group, addresses, slots, TOKEN)
        count = -(-(self.slots[rank].stat().st_size) // CHUNK)
        wanted = range(count) if chunks is None else chunks
        return await rebuild(lost, [n for n in wanted if n < self.chunks(rank)], str(into), patience=3.0)

    def chunks(self, rank: int) -> int:
        return -(-len(hashed(self.slots[rank])) // CHUNK)


@asynccontextmanager
async def a_cluster(folder: Path, sizes: dict[str, tuple[int, ...]] = SIZES) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, sizes)
    async with AsyncExitStack() as stack:
        for member in cluster.members:
            slots: Slots = {(ONE, Rank(rank)): cluster.slots[rank] for rank in member.ranks}
            parity = {ONE: cluster.path(member.node)}
            serve = serving(folder / member.node, slots, node=member.node, parity=parity)
            cluster.addresses[member.node] = await stack.enter_async_context(serve)
        yield cluster


async def made(cluster: Cluster) -> None:
    for member in cluster.members:
        await cluster.make(member.node)


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_every_rank_of_any_one_lost_node_comes_out_equal(tmp_path: Path, size: int) -> None:
    async with a_cluster(tmp_path, dict(list(SIZES.items())[:size])) as cluster:
        await made(cluster)
        for member in cluster.members:
            for rank in member.ranks:
                path = await cluster.rebuilt(member.node, rank, tmp_path / f"for-{rank}")
                assert is_whole(path)
                assert hashed(path) == hashed(cluster.slots[rank])
                assert path.name == borrowed_name(ONE, Rank(rank))


async def test_group_of_one_chunk_each_in_which_a_node_has_nothing_to_keep_is_rebuilt_all_the_same(
    tmp_path: Path,
) -> None:
    async with a_cluster(tmp_path, dict.fromkeys("abc", (5000,))) as cluster:
        sheets = [await cluster.make(member.node) for member in cluster.members]
        assert min(sheet.stripes for sheet in sheets) == 0
        assert [verified(cluster.path(member.node)) for member in cluster.members] == sheets
        for rank, node in enumerate("abc"):
            assert is_whole(await cluster.rebuilt(node, rank, tmp_path / f"for-{rank}"))


async def test_parity_of_equal_nodes_takes_its_share_of_a_slot(tmp_path: Path) -> None:
    """The design's memory budget (section 11): S/k for each of k + 1 nodes, from what the files take."""
    k, data = 3, 24 * CHUNK
    async with a_cluster(tmp_path, dict.fromkeys("abcd", (data,))) as cluster:
        await made(cluster)
        for member in cluster.members:
            taken = memory_of(Path(cluster.path(member.node)))
            assert data / k <= taken <= data / k + 2 * CHUNK


async def test_only_the_chunks_that_are_asked_for_are_made(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        await made(cluster)
        (rank,) = cluster.ranks_of("b")
        path = await cluster.rebuilt("b", rank, tmp_path / "here", range(1))
        assert memory_of(path) < 4 * CHUNK
        assert not is_whole(path)
        await cluster.rebuilt("b", rank, tmp_path / "here")
        assert is_whole(path)


async def test_flipped_bit_in_a_stripe_or_a_members_slot_is_never_rebuilt_into_a_slot(tmp_path: Path) -> None:
    """Whoever reads it goes to the next source (storage, or an older step); nothing wrong comes out."""
    async with a_cluster(tmp_path) as cluster:
        await made(cluster)
        (rank,) = cluster.ranks_of("b")
        parity = Path(cluster.path("a"))
        flip(parity, size_of(parity) - 3)
        with pytest.raises(WireError, match="stripe .* of the parity on a is not what was written"):
            await cluster.rebuilt("b", rank, tmp_path / "one")
        flip(parity, size_of(parity) - 3)
        other = cluster.slots[cluster.ranks_of("d")[0]]
        flip(other, DATA_START + 5)
        flip(other, DATA_START + CHUNK + 5)
        flip(other, DATA_START + 2 * CHUNK + 5)
        with pytest.raises(WireError, match="of the slot of rank .* is not to be had"):
            await cluster.rebuilt("b", rank, tmp_path / "two")
        assert not is_whole(tmp_path / "two" / borrowed_name(ONE, Rank(rank)))


async def test_second_loss_in_a_group_is_told_and_gives_nothing(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        await made(cluster)
        (rank,) = cluster.ranks_of("b")
        del cluster.parity[NodeId("d")]
        cluster.slots[cluster.ranks_of("d")[0]].unlink()
        with pytest.raises(WireError, match=r"rank 2 of step 1 of generation 1 cannot be made again"):
            await cluster.rebuilt("b", rank, tmp_path / "here")


async def test_damaged_slot_makes_no_parity_and_the_older_parity_is_gone_from_that_file(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        await cluster.make("a")
        flip(cluster.slots[cluster.ranks_of("b")[0]], DATA_START + 1)
        flip(cluster.slots[cluster.ranks_of("b")[0]], DATA_START + 1 + CHUNK)
        flip(cluster.slots[cluster.ranks_of("b")[0]], DATA_START + 1 + 2 * CHUNK)
        with pytest.raises(WireError, match="is not what was written"):
            await cluster.make("a")
        with pytest.raises(CorruptCheckpointError):
            verified(cluster.path("a"))


async def test_parity_file_is_believed_only_if_every_byte_is_right(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        sheet = await cluster.make("a")
        path = Path(cluster.path("a"))
        assert verified(str(path)) == sheet
        for at in (3, HEAD + 10, size_of(path) - 1, size_of(path) - CHUNK):
            flip(path, at)
            with pytest.raises(CorruptCheckpointError):
                verified(str(path))
            flip(path, at)
        os.truncate(path, size_of(path) - 1)
        with pytest.raises(CorruptCheckpointError, match="cut short"):
            verified(str(path))


async def test_node_that_stops_in_the_middle_costs_this_try_and_no_more(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as cluster:
        good = cluster.addresses[NodeId("b")]
        stop = stop_at(0)
        with through(good, lambda proxy, *part: part[1] if proxy.connections < 2 else stop(proxy, *part)) as proxy:
            cluster.addresses[NodeId("b")] = proxy.address
            with anyio.fail_after(8.0), pytest.raises(WireError):
                await cluster.make("a", patience=0.5)
        cluster.addresses[NodeId("b")] = good
        await made(cluster)
        path = await cluster.rebuilt("b", cluster.ranks_of("b")[0], tmp_path / "here")
        assert is_whole(path)
