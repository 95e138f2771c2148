"""Replicas between memory servers: real sockets, real files, and networks that damage, stop and cut.

Threads of reference/checkpoint.md, section 5, are named at the tests that they became.
"""

import os
from pathlib import Path

import anyio
import pytest

from perdure.agent.memory.transfer import offer
from perdure.errors import WireError
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId
from perdure.wire.slots import CHUNK, DATA_START, PAGE, SlotHeader
from tests.process.transfers import (
    NODE,
    TOKEN,
    Proxy,
    a_slot,
    damage_at,
    flip,
    happened,
    hashed,
    header_of,
    is_whole,
    replica,
    send,
    serving,
    step,
    steps_in,
    stop_at,
    through,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# --- replicas --------------------------------------------------------------------------------------------------------


async def test_replica_is_sealed_and_equal_when_the_offer_returns(tmp_path: Path) -> None:
    """Thread 10 (Megatron-LM 1763): sealed is not replicated. Thread 3 (KempnerForge 104): no collective."""
    sealed: list[tuple[NodeId, Path, SlotHeader]] = []
    header = a_slot(tmp_path / "own.slot", step(7))
    async with serving(tmp_path / "bob", sealed=sealed) as address:
        await send(address, tmp_path / "own.slot", header)
        copy = replica(tmp_path / "bob", 0)
        assert is_whole(copy)
        assert hashed(copy) == hashed(tmp_path / "own.slot")
        present = header_of(copy)
        assert present is not None
        same = ("job", "rank", "world_size", "checkpoint", "layout", "shards", "root", "tail_bytes", "writer")
        assert [getattr(present, name) for name in same] == [getattr(header, name) for name in same]
        assert copy.stat().st_mode & 0o777 == 0o600
        assert copy.stat().st_blocks * 512 >= header.file_bytes, "it has all its memory"
        await send(address, tmp_path / "own.slot", header)  # the second one is on_sealed's turn, and is held already
    assert [(node, path, one.checkpoint) for node, path, one in sealed] == [(NODE, copy, step(7))]


async def test_replica_that_is_here_already_is_acknowledged_and_not_sent_again(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(7))
    async with serving(tmp_path / "bob") as address:
        await send(address, tmp_path / "own.slot", header)
        before = replica(tmp_path / "bob", 0).stat().st_mtime_ns
        with through(address, lambda proxy, passed, part: part if passed + len(part) < PAGE else None) as proxy:
            await send(proxy.address, tmp_path / "own.slot", header)
    assert replica(tmp_path / "bob", 0).stat().st_mtime_ns == before
    assert not replica(tmp_path / "bob", 1).exists()


async def test_replicas_take_turns_and_the_newer_one_stays_whole_until_its_successor_is_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "bob"
    slots = {n: (tmp_path / f"{n}.slot", a_slot(tmp_path / f"{n}.slot", step(n))) for n in (1, 2, 3)}
    async with serving(folder, patience=2.0) as address:
        await send(address, *slots[1])
        await send(address, *slots[2])
        assert steps_in(folder) == {1, 2}
        with through(address, stop_at(CHUNK + 5)) as proxy:
            async with anyio.create_task_group() as group:
                group.start_soon(_fails, proxy.address, *slots[3])
                await happened(proxy.reached)
                assert steps_in(folder) == {2}, "3 is on its way into the place of 1"
        assert steps_in(folder) == {2}
        await send(address, *slots[3])
    assert steps_in(folder) == {2, 3}


async def _fails(address: Address, path: Path, header: SlotHeader) -> None:
    with pytest.raises(WireError):
        await send(address, path, header, patience=1.0)


async def test_replica_that_is_still_needed_is_not_overwritten(tmp_path: Path) -> None:
    """Thread 12 (dlrover 1585, 1649): what must not be lost is never written over; the sender is told, and goes on."""
    folder, committed = tmp_path / "bob", [0]
    slots = {n: (tmp_path / f"{n}.slot", a_slot(tmp_path / f"{n}.slot", step(n))) for n in (1, 2, 3)}
    async with serving(folder, spent=lambda one: one.step < committed[0]) as address:
        await send(address, *slots[1])
        await send(address, *slots[2])
        with pytest.raises(WireError, match="both replicas of rank 0 of ada are still needed"):
            await send(address, *slots[3])
        assert steps_in(folder) == {1, 2}
        committed[0] = 2
        await send(address, *slots[3])
        assert steps_in(folder) == {2, 3}


async def test_older_checkpoint_does_not_replace_newer_ones(tmp_path: Path) -> None:
    slots = {n: (tmp_path / f"{n}.slot", a_slot(tmp_path / f"{n}.slot", step(n))) for n in (1, 2, 3)}
    async with serving(tmp_path / "bob") as address:
        for number in (2, 3):
            await send(address, *slots[number])
        with pytest.raises(WireError, match="newer replicas of rank 0 of ada are here"):
            await send(address, *slots[1])
    assert steps_in(tmp_path / "bob") == {2, 3}


async def test_layout_that_has_grown_gets_a_file_that_fits(tmp_path: Path) -> None:
    folder = tmp_path / "bob"
    sizes = {1: CHUNK, 2: CHUNK, 3: 3 * CHUNK, 4: 100}
    async with serving(folder) as address:
        for number, size in sizes.items():
            header = a_slot(tmp_path / f"{number}.slot", step(number), data=size)
            await send(address, tmp_path / f"{number}.slot", header)
            assert number in steps_in(folder)
    assert steps_in(folder) == {3, 4}
    assert sorted(os.listdir(folder)) == sorted([replica(folder, 0).name, replica(folder, 1).name])


async def test_ranks_of_several_nodes_are_taken_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "bob"
    async with serving(folder) as address, anyio.create_task_group() as group:
        for rank in range(6):
            header = a_slot(tmp_path / f"{rank}.slot", step(1), rank)
            node = NodeId(f"node-{rank % 2}")
            group.start_soon(offer, address, TOKEN, node, tmp_path / f"{rank}.slot", header)
    for rank in range(6):
        assert is_whole(replica(folder, 0, rank, NodeId(f"node-{rank % 2}")))


async def test_same_rank_twice_at_once_is_refused_once(tmp_path: Path) -> None:
    """Thread 32 (Automodel 3824, 3261): two saves submitted at once."""
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        with through(address, stop_at(CHUNK)) as proxy:
            async with anyio.create_task_group() as group:
                group.start_soon(_fails, proxy.address, tmp_path / "own.slot", header)
                await happened(proxy.reached)
                with pytest.raises(WireError, match="another replica of rank 0 of ada is on its way"):
                    await send(address, tmp_path / "own.slot", header)
        async with serving(tmp_path / "cyd") as other:
            await send(other, tmp_path / "own.slot", header)


# --- damage ----------------------------------------------------------------------------------------------------------


async def test_one_bit_in_any_region_of_the_source_and_no_replica_is_sealed(tmp_path: Path) -> None:
    """Thread 38 (torchtitan 4011): one bit in each place in turn, all refused."""
    path = tmp_path / "own.slot"
    header = a_slot(path, step(1))
    places = {
        "data, chunk 0": DATA_START,
        "data, chunk 1": DATA_START + CHUNK + 77,
        "gap": DATA_START + header.data_bytes + 1,
        "tail": header.tail_start + 9,
        "tail, unused": header.tail_start + 6000,
        "layout": header.layout_start + 30,
        "hashes": header.hashes_start + 3,
    }
    async with serving(tmp_path / "bob") as address:
        for name, at in places.items():
            flip(path, at)
            with pytest.raises(WireError, match="of the slot of rank 0 of ada (is|are) not what was written"):
                await send(address, path, header)
            assert steps_in(tmp_path / "bob") == set(), name
            flip(path, at)
        await send(address, path, header)
    assert steps_in(tmp_path / "bob") == {1}


async def test_chunk_that_is_damaged_under_way_is_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "own.slot"
    header = a_slot(path, step(1))
    async with serving(tmp_path / "bob") as address:
        with through(address, damage_at(CHUNK + 4321)) as proxy:
            await send(proxy.address, path, header)
            assert proxy.connections == 1
    assert hashed(replica(tmp_path / "bob", 0)) == hashed(path)


async def test_slot_that_changes_after_the_header_was_read_is_not_offered(tmp_path: Path) -> None:
    """Thread 8 (Megatron-LM 2288): what is being sent must not be overwritten; if it is, it is found out."""
    path = tmp_path / "own.slot"
    old = a_slot(path, step(1))
    path.unlink()
    a_slot(path, step(3))
    async with serving(tmp_path / "bob") as address:
        with pytest.raises(WireError, match="own.slot cannot be sent: the slot is sealed, of rank 0, step 3"):
            await send(address, path, old)
        with pytest.raises(WireError, match="cannot be opened: no such file"):
            await send(address, tmp_path / "gone.slot", old)
    assert not os.listdir(tmp_path / "bob")


async def test_source_that_is_cut_short_is_no_hang_and_no_replica(tmp_path: Path) -> None:
    path = tmp_path / "own.slot"
    header = a_slot(path, step(1))

    def cut(proxy: Proxy, passed: int, part: bytes) -> bytes:
        if passed == 0:
            os.truncate(path, DATA_START + CHUNK)
        return part

    async with serving(tmp_path / "bob") as address:
        with through(address, cut) as proxy, pytest.raises(WireError, match="cut short|file ends before"):
            await send(proxy.address, path, header)
        assert steps_in(tmp_path / "bob") == set()
