"""Parts of slots that are borrowed from other nodes' memory for a restore: verified, from whoever has them."""

import os
from pathlib import Path

import anyio
import pytest

from perdure.agent.memory.transfer import fetch, offer
from perdure.errors import WireError
from perdure.vocab.checkpoint import SlotState
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId, Rank
from perdure.wire import digest, slotfile
from perdure.wire.slots import CHUNK, DATA_START, chunk_range
from perdure.wire.tcp import listen
from perdure.wire.transfer import borrowed_name
from tests.process.transfers import TOKEN, a_slot, flip, hashed, header_of, is_whole, replica, serving, step

pytestmark = pytest.mark.anyio
ONE, R3 = step(1), Rank(3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def chunk(path: Path, number: int) -> bytes:
    header = header_of(path)
    assert header is not None
    start, end = chunk_range(header, number)
    return path.read_bytes()[start:end]


def bytes_of(path: Path) -> int:
    return path.stat().st_blocks * 512


async def nobody() -> Address:
    """An address at which nobody listens."""
    listener = await listen("127.0.0.1", 0)
    await listener.aclose()
    return listener.address


async def test_head_has_the_layout_and_the_tail_and_no_more(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, ONE, 3, data=5 * CHUNK + 9)
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address:
        path = await fetch([address], TOKEN, ONE, R3, (), tmp_path)
    assert path == tmp_path / borrowed_name(ONE, R3)
    fd = slotfile.open_slot(str(path))
    try:
        borrowed = slotfile.read_header(fd)
        assert (borrowed.state, borrowed.checkpoint, borrowed.root) == (SlotState.SEALED, ONE, header.root)
        assert digest.layout_hash(slotfile.read_layout(fd, borrowed)) == header.layout
        assert os.pread(fd, 6000, borrowed.tail_start) == b"t" * 5000 + bytes(1000)
    finally:
        os.close(fd)
    assert path.stat().st_size == source.stat().st_size
    assert bytes_of(path) < 2 * CHUNK
    assert path.stat().st_mode & 0o777 == 0o600


async def test_only_the_chunks_that_are_asked_for_are_brought_and_more_later(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    a_slot(source, ONE, 3, data=6 * CHUNK)
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address:
        path = await fetch([address], TOKEN, ONE, R3, (1, 4), tmp_path)
        first = path.stat().st_ino
        assert [chunk(path, n) == chunk(source, n) for n in range(7)] == [False, True, False, False, True, False, True]
        assert bytes_of(path) < 4 * CHUNK
        await fetch([address], TOKEN, ONE, R3, (0, 1, 2, 3, 5), tmp_path)
    assert path.stat().st_ino == first, "whoever has it mapped sees the new chunks"
    assert is_whole(path)
    assert hashed(path) == hashed(source)
    assert await fetch([await nobody()], TOKEN, ONE, R3, range(7), tmp_path) == path, "all of it is here"
    assert sorted(os.listdir(tmp_path)) == sorted(["bob", "own.slot", path.name]), "no half-made file is left"


async def test_replica_is_given_like_an_own_slot(tmp_path: Path) -> None:
    """lm-resiliency (reference/lm-resiliency.md): replicas that are never fetched."""
    source, bob = tmp_path / "own.slot", tmp_path / "bob"
    header = a_slot(source, ONE, 3)
    async with serving(bob, {(ONE, R3): replica(bob, 0, 3)}) as address:
        await offer(address, TOKEN, NodeId("ada"), source, header)
        source.rename(tmp_path / "lost.slot")
        path = await fetch([address], TOKEN, ONE, R3, range(header.chunks), tmp_path)
    assert hashed(path) == hashed(tmp_path / "lost.slot")


async def test_bad_chunk_is_taken_from_the_next_source(tmp_path: Path) -> None:
    """Thread 1 (Megatron-LM 5281): flipped bytes in a replica are refused, the next source is used.
    Thread 4 (KempnerForge 194): by the default call. Each source has another bad chunk; together they have all."""
    first, second = tmp_path / "first.slot", tmp_path / "second.slot"
    header = a_slot(first, ONE, 3, data=4 * CHUNK)
    a_slot(second, ONE, 3, data=4 * CHUNK)
    good = hashed(first)
    flip(first, DATA_START + 2 * CHUNK + 1)
    flip(second, DATA_START + 3)
    flip(second, header.layout_start)
    async with (
        serving(tmp_path / "bob", {(ONE, R3): first}) as bob,
        serving(tmp_path / "cyd", {(ONE, R3): second}) as cyd,
    ):
        path = await fetch([bob, cyd], TOKEN, ONE, R3, range(header.chunks), tmp_path)
    assert hashed(path) == good
    assert is_whole(path)


async def test_chunk_that_is_bad_everywhere_is_named_with_node_and_file(tmp_path: Path) -> None:
    source, other = tmp_path / "own.slot", tmp_path / "other.slot"
    for path in (source, other):
        a_slot(path, ONE, 3, data=4 * CHUNK)
        flip(path, DATA_START + 2 * CHUNK + 1)
    slots, others = {(ONE, R3): source}, {(ONE, R3): other}
    async with serving(tmp_path / "bob", slots) as bob, serving(tmp_path / "cyd", others, node="cyd") as cyd:
        with pytest.raises(WireError) as raised:
            await fetch([bob, cyd], TOKEN, ONE, R3, (0, 2), tmp_path)
    assert f"{bob}: chunk 2 of {source} on bob is not what was written" in str(raised.value)
    assert f"{cyd}: chunk 2 of {other} on cyd is not what was written" in str(raised.value)
    borrowed = tmp_path / borrowed_name(ONE, R3)
    assert chunk(borrowed, 0) == chunk(source, 0), "what is good is kept"
    assert not any(chunk(borrowed, 2)), "what is bad never gets into the file"


async def test_one_bit_in_any_place_of_the_only_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, ONE, 3)
    places = [DATA_START, header.tail_start, header.layout_start + 1, header.hashes_start + 17, 4096 + 40]
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address:
        for place, at in enumerate(places):
            here = tmp_path / str(place)
            here.mkdir()  # good chunks of an earlier time are kept: each bit has its own folder
            flip(source, at)
            with pytest.raises(WireError):
                await fetch([address], TOKEN, ONE, R3, range(header.chunks), here)
            flip(source, at)
            assert is_whole(await fetch([address], TOKEN, ONE, R3, range(header.chunks), here))


async def test_same_step_with_other_bytes_is_not_mixed_in(tmp_path: Path) -> None:
    """One candidate, one root: two holders that differ are never put together (lm-resiliency pull 85)."""
    source, other = tmp_path / "own.slot", tmp_path / "other.slot"
    header = a_slot(source, ONE, 3, data=3 * CHUNK)
    a_slot(other, ONE, 3, data=3 * CHUNK + 1)
    flip(source, DATA_START)
    async with (
        serving(tmp_path / "bob", {(ONE, R3): source}) as bob,
        serving(tmp_path / "cyd", {(ONE, R3): other}) as cyd,
    ):
        with pytest.raises(WireError, match="is not the slot that the hashes here are of"):
            await fetch([bob, cyd], TOKEN, ONE, R3, range(header.chunks), tmp_path)


async def test_holder_that_is_gone_or_has_it_no_more_is_passed_over(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    a_slot(source, ONE, 3)
    (tmp_path / "torn.slot").write_bytes(source.read_bytes()[: CHUNK + 7])
    torn, newer = {(ONE, R3): tmp_path / "torn.slot"}, {(ONE, R3): tmp_path / "newer.slot"}
    a_slot(tmp_path / "newer.slot", step(2), 3)
    async with (
        serving(tmp_path / "bob", {}) as empty,
        serving(tmp_path / "bob", torn) as cut_short,
        serving(tmp_path / "bob", newer) as reused,
        serving(tmp_path / "bob", {(ONE, R3): source}) as good,
    ):
        addresses = [await nobody(), empty, cut_short, reused, good]
        path = await fetch(addresses, TOKEN, ONE, R3, (0, 1), tmp_path)
        assert chunk(path, 1) == chunk(source, 1)
        with pytest.raises(WireError) as raised:
            await fetch(addresses[:-1], TOKEN, ONE, Rank(3), (0, 1, 2), tmp_path / "bob")
    for said in ("cannot reach", "has no sealed slot of rank 3", "cut short", "step 2 of generation 1"):
        assert said in str(raised.value)


async def test_chunks_that_there_are_not_and_no_address_are_errors(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    a_slot(source, ONE, 3)
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address:
        for chunks in ((99,), (-1,)):
            with pytest.raises(WireError, match="has 3 chunks, and not all that were asked for"):
                await fetch([address], TOKEN, ONE, R3, chunks, tmp_path)
    with pytest.raises(WireError, match="nobody has it"):
        await fetch([], TOKEN, ONE, R3, (0,), tmp_path)


async def test_trainers_that_borrow_the_same_slot_at_once_share_a_file(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, ONE, 3, data=6 * CHUNK)
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address, anyio.create_task_group() as group:
        for each in range(header.chunks):
            group.start_soon(fetch, [address], TOKEN, ONE, R3, (each, (each + 1) % header.chunks), tmp_path)
    assert is_whole(tmp_path / borrowed_name(ONE, R3))
    assert sorted(os.listdir(tmp_path)) == sorted(["bob", "own.slot", borrowed_name(ONE, R3)])


async def test_file_that_is_no_slot_in_the_place_of_a_borrowed_one_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, ONE, 3)
    (tmp_path / borrowed_name(ONE, R3)).write_bytes(b"rubbish")
    async with serving(tmp_path / "bob", {(ONE, R3): source}) as address:
        assert is_whole(await fetch([address], TOKEN, ONE, R3, range(header.chunks), tmp_path))
