"""Names of files, ranges of chunks, and what a peer's words may make us do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber, NodeId, Rank
from perdure.wire.transfer import borrowed_name, chunks_in, parse_replica_name, ranges_of, replica_name, shown

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=16)


@given(TEXT, st.integers(0, 1 << 24), st.sampled_from([0, 1]))
def test_replica_name_is_one_name_in_the_folder_and_can_be_read_back(node: str, rank: int, k: int) -> None:
    name = replica_name(NodeId(node), Rank(rank), k)
    assert "/" not in name
    assert "\0" not in name
    assert name.startswith("peer-")
    assert len(name.encode()) <= 255
    assert parse_replica_name(name) == (node, rank, k)


@pytest.mark.parametrize("node", ["", "\ud800", "n" * 201, "ü" * 34])
def test_replica_name_of_no_name_is_an_error(node: str) -> None:
    with pytest.raises(ValueError, match="is no name of a node"):
        replica_name(NodeId(node), Rank(0), 0)


@pytest.mark.parametrize(
    "name", ["own-0-1.slot", "peer-a-0.slot", "peer-a-0-2.slot", "peer-a-0-1.slot.new", "peer--1-0"]
)
def test_other_names_are_no_replicas(name: str) -> None:
    assert parse_replica_name(name) is None


def test_borrowed_name_tells_the_checkpoint_and_the_rank() -> None:
    checkpoint = CheckpointId(attempt=1_700_000_000, generation=GenerationNumber(2), step=30)
    assert borrowed_name(checkpoint, Rank(4)) == "borrowed-1700000000-2-0-30-4.slot"


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_the_same_chunks(numbers: set[int]) -> None:
    assert chunks_in(ranges_of(sorted(numbers)), 301) == tuple(sorted(numbers))


@pytest.mark.parametrize("ranges", [((0, 5),), ((-1, 2),), ((0, 0),), ((3, 1 << 60),), ((1, 2), (2, 1)), ((0, 1),) * 5])
def test_chunks_that_there_are_not_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    assert chunks_in(ranges, 4) is None


def test_words_of_a_peer_are_short_and_printable() -> None:
    assert shown("a\x1b[2J\n" + "b" * 1000) == "a?[2J?" + "b" * 394
