"""The way out of a slot: what is copied is what was there, and what is damaged has the number of its chunk."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.wire.digest import chunk_digests
from perdure.wire.slots import CHUNK

pytest.importorskip("torch")
from perdure.trainer.checkpoint.copy import Copiers, out_of

SIZE = 2 * CHUNK + 12_345
SLOT = bytearray((i * 2_654_435_761 >> 13) & 0xFF for i in range(1 << 16)) * (SIZE // (1 << 16) + 1)
SLOT = SLOT[:SIZE]
DIGESTS = memoryview(chunk_digests(memoryview(SLOT)))
PIECES = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(0, 3 * CHUNK)).map(lambda p: (p[0], min(p[1], SIZE - p[0]))),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(PIECES, st.integers(1, 3))
def test_every_piece_arrives_wherever_it_begins_and_ends(pieces: list[tuple[int, int]], threads: int) -> None:
    targets = [bytearray(count + 1) for _, count in pieces]
    moves = [
        (start, ctypes.addressof(ctypes.c_char.from_buffer(target)), count)
        for (start, count), target in zip(pieces, targets, strict=True)
    ]
    assert out_of(memoryview(SLOT), DIGESTS, moves, Copiers(threads)) == ()
    for (start, count), target in zip(pieces, targets, strict=True):
        assert target == SLOT[start : start + count] + b"\0"


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=4), st.integers(1, 2))
def test_one_flipped_bit_names_its_chunk_also_where_nothing_is_copied(at: set[int], threads: int) -> None:
    """Thread 38 (torchtitan 4011)."""
    damaged = bytearray(SLOT)
    for place in at:
        damaged[place] ^= 4
    found = out_of(memoryview(damaged), DIGESTS, [], Copiers(threads))
    assert found == tuple(sorted({place // CHUNK for place in at}))


def test_an_empty_slot_is_nothing_to_do() -> None:
    assert out_of(memoryview(bytearray()), memoryview(b""), [], Copiers(2)) == ()
