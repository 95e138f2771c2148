"""Parity groups of any size, with rows of any length: which single loss is made good again, and what a file may say."""

from functools import reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import CorruptCheckpointError
from perdure.policy.replicas import xor_groups
from perdure.vocab.checkpoint import CheckpointId, Group, Member, SlotState
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire.parity import (
    HEAD,
    Sheet,
    decode_sheet,
    digests_of,
    encode_head,
    flaw,
    head_lengths,
    home,
    others,
    parity_bytes,
    places,
    stripes,
    terms_of,
    terms_with,
)
from perdure.wire.slots import CHUNK, HASH, SlotHeader

SIZE = 4
"""Bytes of a chunk here; the last one of a row may be shorter."""
ONE = CheckpointId(attempt=1, generation=GenerationNumber(1), step=5)


def xor(parts: list[bytes]) -> bytes:
    padded = [part.ljust(SIZE, b"\0") for part in parts]
    return reduce(lambda a, b: bytes(x ^ y for x, y in zip(a, b, strict=True)), padded, bytes(SIZE))


def rows(draw_from: list[bytes]) -> list[list[bytes]]:
    return [[row[at : at + SIZE] for at in range(0, len(row), SIZE)] for row in draw_from]


def parity(all_rows: list[list[bytes]], holder: int) -> list[bytes]:
    counts = [len(row) for row in all_rows]
    made = []
    for stripe in range(stripes(counts, holder)):
        terms = [(place, terms_of(len(counts), place, counts[place], holder)) for place in others(len(counts), holder)]
        made.append(xor([all_rows[place][there[stripe]] for place, there in terms if stripe < len(there)]))
    return made


@given(st.lists(st.binary(min_size=0, max_size=40), min_size=2, max_size=6))
def test_any_single_lost_node_of_a_group_comes_out_equal(data: list[bytes]) -> None:
    all_rows = rows(data)
    counts = [len(row) for row in all_rows]
    kept = [parity(all_rows, holder) for holder in range(len(all_rows))]
    for lost, row in enumerate(all_rows):
        for number, chunk in enumerate(row):
            holder, stripe, terms = terms_with(counts, lost, number)
            assert lost not in {holder, *(place for place, _ in terms)}, "what is lost is of no use"
            made = xor([kept[holder][stripe], *(all_rows[place][other] for place, other in terms)])
            assert made[: len(chunk)] == chunk


@given(st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_every_chunk_is_a_term_of_one_other_node_and_parity_is_a_share_of_a_row(counts: list[int]) -> None:
    size = len(counts)
    for place, chunks in enumerate(counts):
        there = {
            (holder, stripe): number
            for holder in others(size, place)
            for stripe, number in enumerate(terms_of(size, place, chunks, holder))
        }
        assert sorted(there.values()) == list(range(chunks))
        assert all(home(size, place, number) == where for where, number in there.items())
    for holder in range(size):
        assert stripes(counts, holder) <= -(-max(counts) // (size - 1))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7, 10])
def test_room_that_is_asked_for_is_enough_for_every_group_that_is_made(nodes: int, k: int) -> None:
    chunks = 23
    groups = xor_groups([(NodeId(f"n{n}"), f"rack {n}") for n in range(nodes)], k)
    assert sum(map(len, groups)) == nodes
    for group in groups:
        assert len(group) <= max(k + 1, 3)
        counts = [chunks] * len(group)
        assert max(stripes(counts, holder) for holder in range(len(group))) * CHUNK <= parity_bytes(
            chunks * CHUNK, nodes, k
        )


def test_of_a_group_one_lost_node_is_rebuildable_and_two_are_not() -> None:
    members = tuple(Member(node=NodeId(f"n{n}"), ranks=(2 * n, 2 * n + 1)) for n in range(3))
    everybody = Group(members=members, holders=(NodeId("n0"), NodeId("n1"), NodeId("n2")))
    assert everybody.is_whole
    assert everybody.rebuildable({0, 1, 2, 3}) == {4, 5}
    assert everybody.rebuildable(range(6)) == set(range(6))
    assert everybody.rebuildable({0, 1, 2}) == frozenset()
    lacking = msgspec.structs.replace(everybody, holders=(NodeId("n0"), NodeId("n2")))
    assert not lacking.is_whole
    assert lacking.rebuildable(range(6)) == {2, 3}, "only the one whose own parity is not needed"


# --- the file --------------------------------------------------------------------------------------------------------


def a_header(rank: int, data: int) -> SlotHeader:
    return SlotHeader(
        sequence=1,
        job=JobId("j"),
        rank=Rank(rank),
        world_size=8,
        state=SlotState.SEALED,
        checkpoint=ONE,
        layout="0" * 32,
        shards="0" * 32,
        data_bytes=data,
        tail_room=4096,
        layout_bytes=10,
        root=f"{rank:032}",
    )


def a_sheet() -> Sheet:
    members = (
        Member(node=NodeId("a"), ranks=(0, 3)),
        Member(node=NodeId("b"), ranks=(1,)),
        Member(node=NodeId("c"), ranks=(2,)),
    )
    sizes = {0: 3 * CHUNK, 3: 10, 1: 5 * CHUNK, 2: 1}
    headers = tuple(a_header(rank, sizes[rank]) for member in members for rank in member.ranks)
    return Sheet(job=JobId("j"), node=NodeId("b"), checkpoint=ONE, members=members, headers=headers)


def a_file(sheet: Sheet) -> tuple[bytes, bytes, bytes]:
    text = msgspec.json.encode(sheet)
    hashes = bytes(n % 251 for n in range(places(sheet, len(text)).hashes_bytes))
    return encode_head(text, hashes), text, hashes


def test_what_is_written_is_read_again_and_each_rank_has_its_own_hashes() -> None:
    sheet = a_sheet()
    head, text, hashes = a_file(sheet)
    assert len(head) == HEAD
    assert head_lengths(head) == (len(text), len(hashes))
    assert decode_sheet(head, text, hashes) == sheet
    assert sheet.counts == (5, 6, 1)
    assert (sheet.place, sheet.stripes) == (1, 3)
    assert digests_of(sheet, hashes, 3) == hashes[4 * HASH : 5 * HASH]
    assert [(header.rank, number) for header, number in map(sheet.located, [(0, 3), (0, 4), (1, 5)])] == [
        (0, 3),
        (3, 0),
        (1, 5),
    ]


def read(head: bytes, text: bytes, hashes: bytes) -> Sheet:
    """As a reader does: so many bytes as the head says."""
    sheet_bytes, hashes_bytes = head_lengths(head)
    rest = text + hashes
    return decode_sheet(head, rest[:sheet_bytes], rest[sheet_bytes : sheet_bytes + hashes_bytes])


@pytest.mark.parametrize("part", [0, 1, 2])
def test_one_bit_in_any_byte_of_head_sheet_or_hashes_is_found_out(part: int) -> None:
    parts = a_file(a_sheet())
    used = 40 if part == 0 else len(parts[part])
    for at in range(used):
        damaged = [bytearray(each) for each in parts]
        damaged[part][at] ^= 4
        head, text, hashes = map(bytes, damaged)
        with pytest.raises(CorruptCheckpointError):
            read(head, text, hashes)


def test_file_without_a_head_is_no_parity() -> None:
    for head in (b"", bytes(HEAD), b"x" * HEAD):
        with pytest.raises(CorruptCheckpointError):
            head_lengths(head)


def test_hostile_sheet_is_refused_before_it_is_used() -> None:
    sheet = a_sheet()
    foreign = msgspec.structs.replace(sheet.headers[0], rank=Rank(7))
    unsealed = msgspec.structs.replace(sheet.headers[0], state=SlotState.WRITTEN)
    wrong = [
        {"node": NodeId("x")},
        {"members": sheet.members[1:2], "headers": sheet.headers[2:3]},
        {"members": (sheet.members[0], sheet.members[0], *sheet.members[1:])},
        {"headers": sheet.headers[1:]},
        {"headers": (foreign, *sheet.headers[1:])},
        {"headers": (unsealed, *sheet.headers[1:])},
    ]
    for changes in wrong:
        damaged = msgspec.structs.replace(sheet, **changes)
        assert flaw(damaged), changes
        text = msgspec.json.encode(damaged)
        with pytest.raises(CorruptCheckpointError):
            decode_sheet(encode_head(text, b""), text, b"")
    assert flaw(sheet) == ""
