"""The gate: whatever happens in whatever order, one committed checkpoint stays whole."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure.agent.memory import ring as facts
from perdure.agent.memory.ring import Ring, Slot
from perdure.vocab.checkpoint import CheckpointId, Level, SlotState
from perdure.vocab.ids import GenerationNumber, Rank

RANK = Rank(0)


def an_id(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(attempt=1, generation=GenerationNumber(generation), step=step)


def a_ring(*steps: int, slots: int = 2) -> Ring:
    """One rank; its first slots are sealed with these steps."""
    ring = facts.attached(Ring(), RANK, (1, 1), new=range(slots))
    for number, step in enumerate(steps):
        ring = facts.sealed(
            facts.written(facts.given(ring, (RANK, number)), (RANK, number), an_id(step)), (RANK, number)
        )
    return ring


def test_a_new_ring_gives_a_free_slot_and_goes_on_giving_the_same() -> None:
    ring = a_ring()
    assert facts.grant(ring, RANK) == 0
    ring = facts.given(ring, (RANK, 0))
    assert facts.grant(ring, RANK) == 0


def test_nothing_committed_gives_nothing_that_is_sealed() -> None:
    assert facts.grant(a_ring(1, 2), RANK) is None


def test_the_older_of_two_is_given_when_the_newer_is_committed_and_never_the_committed_one() -> None:
    ring = a_ring(1, 2)
    assert facts.grant(facts.committed(ring, an_id(1)), RANK) is None
    assert facts.grant(facts.committed(ring, an_id(2)), RANK) == 0


def test_an_aborted_one_is_given_and_a_committed_one_is_not_though_it_is_called_aborted() -> None:
    ring = facts.aborted(facts.committed(a_ring(1, 2), an_id(1)), [an_id(1), an_id(2)])
    assert facts.grant(ring, RANK) == 1


def test_a_pinned_slot_is_never_given() -> None:
    """Thread 12 (dlrover 1585, 1649): what a slow drain reads is not overwritten."""
    ring = facts.pinned(facts.committed(a_ring(1, 2), an_id(2)), (RANK, 0))
    assert facts.grant(ring, RANK) is None
    assert facts.grant(facts.unpinned(ring, (RANK, 0)), RANK) == 0


def test_a_slot_that_is_being_hashed_is_never_given() -> None:
    """Thread 8 (Megatron-LM 2288, 1861): a staging buffer is owned until it is sealed."""
    ring = facts.written(facts.given(a_ring(2), (RANK, 1)), (RANK, 1), an_id(1))
    assert facts.grant(facts.committed(ring, an_id(2)), RANK) is None


def test_a_step_back_keeps_what_was_restored_and_gives_what_was_left_behind() -> None:
    ring = facts.committed(a_ring(1, 2), an_id(2))
    ring = facts.chosen(facts.attached(ring, RANK, (1, 2)), (1, 2), an_id(1))
    assert facts.grant(ring, RANK) == 1
    ring = facts.sealed(facts.written(facts.given(ring, (RANK, 1)), (RANK, 1), an_id(2, 2)), (RANK, 1))
    assert facts.grant(ring, RANK) is None
    assert facts.grant(facts.committed(ring, an_id(2, 2)), RANK) == 0


def test_an_answer_to_another_generation_changes_nothing() -> None:
    ring = facts.attached(a_ring(1, 2), RANK, (1, 2))
    assert facts.chosen(ring, (1, 1), an_id(1)) == ring


def test_a_slot_of_another_layout_is_kept_until_a_newer_commit_and_is_never_given() -> None:
    ring = facts.attached(a_ring(1), RANK, (1, 2), new=[2, 3], obsolete=[0, 1])
    ring = facts.committed(ring, an_id(1))
    assert facts.removable(ring) == ((RANK, 1),)
    assert facts.grant(ring, RANK) == 2
    assert set(facts.removable(facts.committed(ring, an_id(2, 2)))) == {(RANK, 0), (RANK, 1)}


def test_slots_of_a_rank_that_has_moved_away_go_after_a_commit_of_the_present_line() -> None:
    ring = facts.committed(a_ring(1, 2), an_id(2))
    ring = facts.attached(ring, Rank(5), (1, 2), new=[0])
    assert facts.removable(ring) == ()
    assert set(facts.removable(facts.committed(ring, an_id(3, 2)))) == {(RANK, 0), (RANK, 1)}


def test_late_news_of_a_replica_is_not_taken_for_what_the_slot_has_now() -> None:
    ring = facts.committed(a_ring(1, 2), an_id(2))
    ring = facts.replicated(ring, (RANK, 1), an_id(2))
    assert ring.slots[RANK, 1].level is Level.REPLICATED
    ring = facts.sealed(facts.written(facts.given(ring, (RANK, 0)), (RANK, 0), an_id(3)), (RANK, 0))
    assert facts.replicated(ring, (RANK, 0), an_id(1)).slots[RANK, 0].level is Level.SEALED


class TwoRanks(RuleBasedStateMachine):
    """Two nodes with a rank each, and a control that knows what both have sealed; news arrives at each in its time."""

    def __init__(self) -> None:
        super().__init__()
        self.rings = {Rank(r): facts.attached(Ring(), Rank(r), (1, 1), new=range(2 + r)) for r in (0, 1)}
        self.committed: CheckpointId | None = None
        self.safe: CheckpointId | None = None
        self.aborted: set[CheckpointId] = set()
        self.generation, self.step = 1, 0

    @rule(rank=st.sampled_from((0, 1)))
    def give(self, rank: int) -> None:
        number = facts.grant(self.rings[rank], Rank(rank))
        if number is not None:
            self.rings[rank] = facts.given(self.rings[rank], (Rank(rank), number))

    @rule(rank=st.sampled_from((0, 1)), ahead=st.integers(0, 1))
    def write_and_seal(self, rank: int, ahead: int) -> None:
        key = next((key for key, slot in self.rings[rank].slots.items() if slot.given), None)
        what = an_id(self.step + ahead, self.generation)
        has = {slot.checkpoint for slot in self.rings[rank].slots.values()}
        if key is not None and what not in has and what not in self.aborted and (self.committed or what) <= what:
            self.rings[rank] = facts.sealed(facts.written(self.rings[rank], key, what), key)

    @rule()
    def step_on(self) -> None:
        self.step += 1

    @rule(rank=st.sampled_from((0, 1)))
    def tear(self, rank: int) -> None:
        """The trainer dies in the copy."""
        for key, slot in self.rings[rank].slots.items():
            if slot.given:
                self.rings[rank] = facts.trainer_gone(facts.torn(self.rings[rank], key), Rank(rank))

    @rule()
    def commit(self) -> None:
        both = self.complete()
        if both and (self.committed is None or max(both) > self.committed):
            self.committed = max(both)

    @precondition(lambda self: self.step > 0)
    @rule()
    def abort(self) -> None:
        """A rank has skipped the present step, so it is never complete."""
        what = an_id(self.step, self.generation)
        if what not in self.complete() and what != self.committed:
            self.aborted.add(what)

    @rule(rank=st.sampled_from((0, 1)))
    def tell(self, rank: int) -> None:
        self.rings[rank] = facts.aborted(facts.committed(self.rings[rank], self.committed), self.aborted)

    @rule(rank=st.sampled_from((0, 1)), on=st.booleans())
    def pin(self, rank: int, on: bool) -> None:
        for key, slot in self.rings[rank].slots.items():
            if slot.state is SlotState.SEALED and slot.checkpoint == self.committed:
                change = facts.pinned if on else facts.unpinned
                self.rings[rank] = change(self.rings[rank], key)

    @rule(back=st.booleans())
    def begin_anew(self, back: bool) -> None:
        """All trainers die; control chooses among what is complete, not always the newest."""
        both = sorted(self.complete())
        if not both:
            return
        chosen = both[0] if back else both[-1]
        self.generation += 1
        for rank, ring in self.rings.items():
            for key, slot in ring.slots.items():
                ring = facts.torn(ring, key) if slot.given else ring
            ring = facts.attached(facts.trainer_gone(ring, rank), rank, (1, self.generation))
            self.rings[rank] = facts.chosen(ring, (1, self.generation), chosen)
        self.step = chosen.step

    @invariant()
    def a_committed_checkpoint_stays_whole(self) -> None:
        if self.committed is not None:
            assert self.complete(), (self.committed, self.rings)

    def complete(self) -> set[CheckpointId]:
        return set.intersection(
            *(
                {s.checkpoint for s in r.slots.values() if s.state is SlotState.SEALED and s.checkpoint}
                for r in self.rings.values()
            )
        )


TestTwoRanks = TwoRanks.TestCase
TestTwoRanks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_gate_without_commits_is_caught_by_the_same_rules() -> None:
    ring = facts.committed(a_ring(1, 2), an_id(1))
    broken = msgspec.structs.replace(ring, committed=an_id(9))
    assert facts.grant(broken, RANK) is not None
    assert facts.grant(ring, RANK) is None
    assert facts.may_be_lost(ring, Slot())
