"""The generation's table, and assignments."""

import pytest

from perdure.errors import IllegalMove
from perdure.vocab.generation import TABLE, Assignment, Member, Move, Phase, move
from perdure.vocab.ids import GenerationNumber, NodeId, Rank


def member(node: str, first: int, count: int = 2) -> Member:
    return Member(node=NodeId(node), first_rank=Rank(first), count=count)


def assignment(*members: Member, store: str = "a") -> Assignment:
    return Assignment(number=GenerationNumber(1), members=members, store_host=NodeId(store))


@pytest.mark.parametrize("by", Move)
@pytest.mark.parametrize("phase", Phase)
def test_every_pair_moves_or_raises(phase: Phase, by: Move) -> None:
    if (phase, by) in TABLE:
        assert move(phase, by) is TABLE[phase, by]
    else:
        with pytest.raises(IllegalMove, match=f"{phase} cannot move by {by}"):
            move(phase, by)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_every_state_can_fail_and_reaches_the_end(phase: Phase) -> None:
    assert TABLE[phase, Move.FAULT] is Phase.ENDED
    reached = {phase}
    while True:
        more = {after for (before, _), after in TABLE.items() if before in reached} - reached
        if not more:
            break
        reached |= more
    assert Phase.ENDED in reached


def test_nothing_follows_the_end() -> None:
    assert not [pair for pair in TABLE if pair[0] is Phase.ENDED]


def test_running_is_reached_from_the_beginning() -> None:
    phase = Phase.INTERRUPTING
    for by in (Move.CLEARED, Move.GATHERED, Move.STARTED):
        phase = move(phase, by)
    assert phase is Phase.RUNNING


def test_assignment_finds_the_node_of_a_rank() -> None:
    world = assignment(member("a", 0), member("b", 2, 3))
    assert world.world_size == 5
    assert [world.node_of(Rank(r)) for r in range(6)] == ["a", "a", "b", "b", "b", None]


@pytest.mark.parametrize(
    "members",
    [(member("a", 1),), (member("a", 0), member("b", 3)), (member("a", 0), member("a", 2)), (member("a", 0, 0),)],
)
def test_assignment_with_gaps_or_a_node_twice_is_refused(members: tuple[Member, ...]) -> None:
    with pytest.raises(ValueError, match="generation 1"):
        assignment(*members)


def test_assignment_with_the_store_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="is no member"):
        assignment(member("a", 0), store="z")
