"""Hashes of chunks, roots and layouts; slot files made, mapped and read again."""

import os
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import CorruptCheckpointError
from perdure.vocab.checkpoint import CheckpointId, Layout, SlotState, TensorPart
from perdure.vocab.ids import GenerationNumber, JobId, Rank
from perdure.wire import slotfile
from perdure.wire.digest import bad_chunks, chunk_digests, data_digest, layout_hash, root_of, shards_hash
from perdure.wire.slots import CHUNK, HASH, HEADER, SlotHeader, header_start


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 77])
def test_digest_of_the_data_does_not_see_what_follows_and_sees_its_last_byte(size: int) -> None:
    data, after = os.urandom(size), os.urandom(5000)

    def digest(what: bytes) -> str:
        return data_digest(memoryview(what), chunk_digests(memoryview(what)), size)

    assert digest(data + after) == digest(data + after[::-1]) == digest(data)
    assert digest(data[:-1] + bytes([data[-1] ^ 1]) + after) != digest(data)
    assert data_digest(memoryview(after), chunk_digests(memoryview(after)), 0) == ""


def a_part(name: str, start: int = 0, offset: int = 0) -> TensorPart:
    return TensorPart(name=name, dtype="float32", shape=(4,), offsets=(offset,), whole=(8,), start=start, nbytes=16)


def a_layout(*parts: TensorPart, rank: int = 0, world_size: int = 2) -> Layout:
    return Layout(rank=Rank(rank), world_size=world_size, parts=parts, data_bytes=128)


def a_header(**changes: object) -> SlotHeader:
    made = SlotHeader(
        sequence=-1,
        job=JobId("job"),
        rank=Rank(0),
        world_size=1,
        state=SlotState.FREE,
        layout="l",
        shards="s",
        data_bytes=10_000,
        tail_room=4096,
        layout_bytes=100,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_digests_with_any_number_of_threads_are_those_of_each_chunk(size: int) -> None:
    data = memoryview(os.urandom(size))
    expected = b"".join(xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, size, CHUNK))
    assert chunk_digests(data) == chunk_digests(data, threads=4) == expected


@given(st.integers(0, 3 * CHUNK - 1), st.integers(0, 7))
def test_one_flipped_bit_names_its_chunk(at: int, bit: int) -> None:
    digests = chunk_digests(memoryview(_ZEROS))
    _ZEROS[at] ^= 1 << bit
    try:
        assert bad_chunks(memoryview(_ZEROS), digests) == (at // CHUNK,)
    finally:
        _ZEROS[at] ^= 1 << bit


_ZEROS = bytearray(3 * CHUNK)


def test_a_root_differs_with_every_thing_that_it_stands_for() -> None:
    one = CheckpointId(attempt=1, generation=GenerationNumber(2), step=3)
    roots = {
        root_of(b"d" * HASH, "l", one),
        root_of(b"e" * HASH, "l", one),
        root_of(b"d" * HASH, "m", one),
        root_of(b"d" * HASH, "l", CheckpointId(attempt=1, generation=GenerationNumber(2), step=4)),
        root_of(b"d" * HASH, "l", CheckpointId(attempt=1, generation=GenerationNumber(3), step=3)),
    }
    assert len(roots) == 5


def test_a_layout_hash_is_the_same_for_every_rank_and_differs_with_a_part() -> None:
    parts = (a_part("a"), a_part("b", start=64))
    assert layout_hash(a_layout(*parts)) == layout_hash(a_layout(*parts, rank=1, world_size=9))
    assert layout_hash(a_layout(*parts)) != layout_hash(a_layout(parts[0]))


def test_a_shards_hash_does_not_depend_on_order_or_place() -> None:
    there = a_layout(a_part("a"), a_part("b", start=64))
    moved = a_layout(a_part("b", start=0), a_part("a", start=64), rank=1)
    assert shards_hash(there) == shards_hash(moved)
    assert shards_hash(there) != shards_hash(a_layout(a_part("a", offset=4), a_part("b", start=64)))


# --- slot files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def slot(tmp_path: Path) -> tuple[int, SlotHeader]:
    header = a_header()
    fd = slotfile.create(str(tmp_path / "slot"), header.file_bytes)
    return fd, slotfile.write_header(fd, header)


def test_a_header_is_read_as_it_was_written_in_turn(slot: tuple[int, SlotHeader]) -> None:
    fd, header = slot
    for state in (SlotState.WRITING, SlotState.WRITTEN, SlotState.SEALED):
        header = slotfile.write_header(fd, msgspec.structs.replace(header, state=state))
        assert slotfile.read_header(fd) == header
    assert header.sequence == 3
    os.close(fd)


def test_a_torn_header_leaves_the_one_before(slot: tuple[int, SlotHeader]) -> None:
    fd, header = slot
    newer = slotfile.write_header(fd, msgspec.structs.replace(header, state=SlotState.WRITING))
    os.pwrite(fd, b"\xff" * 100, header_start(newer.sequence) + 20)
    assert slotfile.read_header(fd) == header
    os.pwrite(fd, b"\0" * HEADER, header_start(header.sequence))
    with pytest.raises(CorruptCheckpointError):
        slotfile.read_header(fd)
    os.close(fd)


def test_a_file_that_is_cut_short_is_refused(slot: tuple[int, SlotHeader]) -> None:
    fd, header = slot
    os.ftruncate(fd, header.file_bytes - 1)
    with pytest.raises(CorruptCheckpointError, match="cut short"):
        slotfile.read_header(fd)
    os.ftruncate(fd, 10)
    with pytest.raises(CorruptCheckpointError, match="cut short"):
        slotfile.map_slot(fd)
    os.close(fd)


def test_populating_changes_no_byte(slot: tuple[int, SlotHeader]) -> None:
    fd, header = slot
    os.pwrite(fd, b"x" * 10_000, 8192)
    before = os.pread(fd, header.file_bytes, 0)
    with slotfile.map_slot(fd, writable=True) as mapped:
        slotfile.populate(mapped)
        assert mapped[:] == before
    os.close(fd)


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space|too large|File too"):
        slotfile.create(str(tmp_path / "slot"), 1 << 60)
    assert not list(tmp_path.iterdir())
