"""What is committed, aborted, paced, drained and paired, of reports alone."""

from typing import Any

import pytest

from perdure.control import saves
from perdure.control.commits import PART_PATIENCE
from perdure.control.memories import GATHER_PATIENCE
from perdure.control.storing import DRAIN_PATIENCE, FIRST_RETRY, FLUSH_PATIENCE, URGENT_RETRY
from perdure.vocab.checkpoint import Cadence
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber
from perdure.wire.memory import DrainFailure, DrainOrder, Parts, Told
from tests.unit.control.a_memory import ATTEMPT, Memory, a_memory, an_id, node_id

# --- commit ----------------------------------------------------------------------------------------------------------


def test_commit_waits_for_the_last_rank() -> None:
    memory = a_memory(3).attached()
    for index in range(3):
        assert memory.orders.committed is None
        memory.holds(index, memory.copy(an_id(4), index))
    assert memory.orders.committed == an_id(4)


def test_commit_with_replicas_waits_for_the_last_replica() -> None:
    memory = a_memory(2, replicas=1).attached().sealed(an_id(4))
    assert memory.orders.committed is None
    memory.holds(1, memory.copy(an_id(4), 0))
    assert memory.orders.committed is None
    memory.holds(0, memory.copy(an_id(4), 1))
    assert memory.orders.committed == an_id(4)


def test_commit_with_replicas_on_one_node_needs_none() -> None:
    assert a_memory(1, replicas=1).attached().sealed(an_id(4)).orders.committed == an_id(4)


def test_a_copy_without_a_hash_does_not_count() -> None:
    memory = a_memory(2).attached()
    memory.holds(0, memory.copy(an_id(4), 0)).holds(1, memory.copy(an_id(4), 1, root=""))
    assert memory.orders.committed is None


def test_committed_never_goes_back_while_servers_are_silent() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).sealed(an_id(9))
    memory.say(1, held=())
    assert memory.orders.committed == an_id(9)


def test_control_that_begins_anew_commits_the_same_from_reports() -> None:
    memory = a_memory(2, replicas=1).attached().sealed(an_id(4)).replicated(an_id(4))
    memory.restarted().say(0)
    assert memory.orders.committed is None
    assert memory.say(1).orders.committed == an_id(4)


def test_control_that_begins_anew_takes_over_what_was_told() -> None:
    cadence = Cadence(first=7, every=7)
    told = Told(committed=an_id(6), cadence=cadence, once=30)
    memory = a_memory(2).attached().restarted().say(0, told=told).say(1, told=told)
    orders = memory.orders
    assert (orders.committed, orders.cadence, orders.once) == (an_id(6), cadence, 30)


@pytest.mark.parametrize("done", [True, False])
def test_what_a_generation_that_ended_well_had_is_not_missed_by_the_next(done: bool) -> None:
    """Plain python without a store, the same script again: it begins at step 0, unless it had died."""
    memory = a_memory(1).attached().sealed(an_id(4)).say(0, done=done).lost(0)
    orders = memory.attached(2, restoring=True).orders
    assert (orders.chosen is not None and orders.chosen.checkpoint is None) == done
    assert bool(orders.refused) == (not done)


def test_what_one_node_closed_and_another_lost_is_missed() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).say(0, done=True).lost(1).say(0, done=True).lost(0)
    assert memory.attached(2, restoring=True).orders.refused, "a silent start from step 0"


def test_versions_of_the_next_life_are_greater() -> None:
    memory = a_memory(2).attached().sealed(an_id(1))
    before = memory.orders.version
    assert memory.after(1.0).restarted().orders.version > before


def test_version_stays_while_nothing_new_is_wanted() -> None:
    memory = a_memory(2).attached().sealed(an_id(1))
    before = memory.orders.version
    assert memory.say(0).say(1).orders.version == before


def test_late_report_of_the_same_or_an_earlier_life_changes_nothing() -> None:
    memory = a_memory(1).attached()
    early = memory.reports[0]
    memory.sealed(an_id(4))
    assert saves.reported(memory.state, early, memory.now) is memory.state


# --- abort -----------------------------------------------------------------------------------------------------------


def test_a_skip_of_one_rank_aborts_the_step_for_all() -> None:
    memory = a_memory(2).attached().holds(0, a_memory(2).copy(an_id(4), 0)).say(1, skipped=(an_id(4),))
    assert memory.orders.aborted == (an_id(4),)
    assert memory.orders.committed is None


def test_a_step_that_one_rank_missed_is_given_up_in_time() -> None:
    memory = a_memory(2).attached()
    memory.holds(0, memory.copy(an_id(4), 0)).at_step(5).after(PART_PATIENCE - 1)
    assert memory.orders.aborted == ()
    assert saves.next_deadline(memory.state, memory.now) == memory.now + 1
    assert memory.after(1.5).orders.aborted == (an_id(4),)


def test_a_step_that_a_rank_has_not_come_to_is_waited_for() -> None:
    memory = a_memory(2).attached()
    memory.holds(0, memory.copy(an_id(4), 0)).at_step(4).after(10 * PART_PATIENCE)
    assert memory.orders.aborted == ()


def test_replicas_that_never_come_do_not_block_the_ring_for_ever() -> None:
    memory = a_memory(2, replicas=1).attached().sealed(an_id(4)).replicated(an_id(4)).sealed(an_id(9))
    memory.at_step(15).after(2 * PART_PATIENCE)
    assert memory.orders.aborted == ()
    memory.say(0, skipped=(an_id(14),))
    assert an_id(9) in memory.orders.aborted
    assert memory.orders.committed == an_id(4)


def test_the_only_sealed_checkpoint_is_kept_where_none_is_committed() -> None:
    memory = a_memory(2, replicas=1).attached().sealed(an_id(4)).sealed(an_id(9)).at_step(15).after(2 * PART_PATIENCE)
    memory.say(0, skipped=(an_id(14),))
    assert memory.orders.aborted == (an_id(4), an_id(14))


def test_what_an_ended_generation_left_incomplete_is_aborted_once_the_next_one_knows_what_it_restores() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).holds(0, a_memory(2).copy(an_id(9), 0))
    memory.attach(0, 2, restoring=True)
    assert memory.orders.aborted == ()
    memory.attach(1, 2, restoring=True)
    assert memory.orders.aborted == (an_id(9),)
    assert memory.orders.committed == an_id(4)


def test_a_restored_step_with_fewer_copies_does_not_displace_the_committed_one_yet() -> None:
    memory = a_memory(2, replicas=1).attached().sealed(an_id(4)).replicated(an_id(4)).sealed(an_id(9))
    memory.attached(2, restoring=True)
    assert memory.orders.chosen is not None
    assert memory.orders.chosen.checkpoint == an_id(9)
    assert memory.orders.committed == an_id(4)
    assert memory.replicated(an_id(9)).orders.committed == an_id(9)


# --- cadence ---------------------------------------------------------------------------------------------------------


def test_fixed_cadence_is_announced_before_the_first_step_and_is_the_same_in_each_life() -> None:
    memory = a_memory(2, every=5)
    memory.attach(0)
    assert memory.orders.cadence is None
    memory.attach(1)
    assert memory.orders.cadence == Cadence(first=4, every=5)
    assert memory.attached(2).orders.cadence == Cadence(first=4, every=5)


def test_measured_cadence_begins_at_a_step_that_no_rank_has_reached() -> None:
    memory = a_memory(2).attached().at_step(100, seconds=0.1)
    cadence = memory.orders.cadence
    assert cadence is not None
    assert 110 <= cadence.first <= 115


def test_steps_done_since_the_last_report_count_as_reached() -> None:
    memory = a_memory(1).attached()
    memory.say(0, attached=memory.reports[0].attached)
    memory.at_step(100, seconds=0.1)
    memory.state = saves.asked_to_save(memory.state, memory.now + 5.0)
    assert memory.state.once is not None
    assert memory.state.once > 150


def test_measured_cadence_changes_by_two_at_most_and_only_from_a_due_step_ahead() -> None:
    memory = a_memory(1).attached().at_step(10)
    first = memory.orders.cadence
    assert first is not None
    memory.say(0, stall_seconds=100.0, commit_seconds=1.0).sealed(an_id(first.first))
    memory.at_step(first.first + 1)
    after = memory.orders.cadence
    assert after is not None
    assert after.every == 2 * first.every
    assert first.is_due(after.first)
    assert after.first > first.first + 1
    assert memory.at_step(first.first + 2).orders.cadence == after  # one change at a time


def test_once_is_ahead_of_all_ranks_and_stays() -> None:
    memory = a_memory(2).attached().at_step(50, seconds=0.25)
    memory.state = saves.asked_to_save(memory.state, memory.now)
    once = memory.orders.once
    assert once is not None
    assert once >= 54
    memory.state = saves.asked_to_save(memory.state, memory.now)
    assert memory.orders.once == once


# --- storage ---------------------------------------------------------------------------------------------------------


def stored_every_ten(**policy: Any) -> Memory:
    return a_memory(2, store=True, every=5, store_every=10, **policy).attached()


def ordered(memory: Memory) -> DrainOrder:
    order = memory.orders.drain
    assert order is not None
    return order


def failed(memory: Memory, index: int = 1, *, lasting: bool = False) -> Memory:
    failure = DrainFailure(number=ordered(memory).number, why="the store says no", lasting=lasting)
    return memory.say(index, drain_failure=failure)


def test_drain_takes_one_at_a_time_by_steps() -> None:
    memory = stored_every_ten().sealed(an_id(4))
    assert memory.orders.drain is None
    memory.sealed(an_id(9))
    order = ordered(memory)
    assert (order.checkpoint, order.writers, order.committer) == (
        an_id(9),
        {node_id(0): (0,), node_id(1): (1,)},
        node_id(0),
    )
    memory.sealed(an_id(19))
    assert ordered(memory).checkpoint == an_id(9)
    memory.in_storage(an_id(9))
    assert (memory.orders.durable, ordered(memory).checkpoint) == (an_id(9), an_id(19))


def test_drain_without_a_store_is_never_ordered() -> None:
    assert a_memory(1, store_every=1).attached().sealed(an_id(4)).orders.drain is None


def test_drain_is_committed_when_all_parts_are_there_and_not_before() -> None:
    memory = stored_every_ten().sealed(an_id(9))
    number = ordered(memory).number
    memory.say(0, parts=(Parts(number=number, ranks=(0,)),))
    assert not ordered(memory).is_written
    memory.say(1, parts=(Parts(number=number - 1, ranks=(1,)),))
    assert not ordered(memory).is_written, "a part of another drain was counted"
    memory.say(1, parts=(Parts(number=number, ranks=(1,)),))
    assert ordered(memory).is_written


def test_drain_that_failed_is_tried_again_ever_more_seldom() -> None:
    """Thread 11 (Megatron-LM 1435): training goes on, and the next attempt is made."""
    memory = stored_every_ten().sealed(an_id(9))
    numbers, wait = [ordered(memory).number], FIRST_RETRY
    for _ in range(4):
        failed(memory)
        assert memory.orders.drain is None
        assert memory.orders.store_trouble == "the store says no"
        assert memory.after(wait - 0.5).orders.drain is None
        numbers.append(ordered(memory.after(0.6)).number)
        wait *= 2
    assert numbers == sorted(set(numbers)), "a failure under an old number would count for the new try"
    memory.in_storage(an_id(9))
    assert memory.orders.store_trouble == ""


@pytest.mark.parametrize("how", ["went", "silent"])
def test_drain_that_cannot_end_is_given_up(how: str) -> None:
    memory = stored_every_ten().sealed(an_id(9))
    if how == "went":
        memory.lost(1).after(GATHER_PATIENCE + 1)
    else:
        memory.after(DRAIN_PATIENCE + 1)
    assert memory.orders.drain is None


def test_drain_that_gets_on_slowly_is_not_given_up() -> None:
    memory = stored_every_ten().sealed(an_id(9))
    for nbytes in (1, 2, 3):
        memory.after(DRAIN_PATIENCE - 1).say(1, drain_bytes=nbytes)
    assert ordered(memory).checkpoint == an_id(9)


def test_part_of_a_lost_node_is_written_by_who_has_its_replica() -> None:
    memory = stored_every_ten(replicas=1).sealed(an_id(9)).replicated(an_id(9)).lost(1)
    order = ordered(memory)
    assert (order.checkpoint, order.writers) == (an_id(9), {node_id(0): (0, 1)})


@pytest.mark.parametrize("how", ["flushing", "stop"])
def test_newest_committed_is_drained_at_once_when_somebody_waits_for_it(how: str) -> None:
    memory = stored_every_ten().sealed(an_id(4))
    if how == "stop":
        memory.state = saves.asked_to_save(memory.state, memory.now)
    else:
        memory.say(0, flushing=True)
    assert ordered(memory).checkpoint == an_id(4)


def test_end_that_comes_before_anybody_of_a_new_generation_stores_what_the_last_one_had() -> None:
    memory = stored_every_ten().sealed(an_id(4))
    nodes = [node_id(0), node_id(1)]
    memory.state = saves.began(memory.state, ATTEMPT, GenerationNumber(2), nodes, 2, memory.now)
    assert memory.orders.drain is None
    memory.state = saves.hurried(memory.state, memory.now)
    assert ordered(memory).checkpoint == an_id(4)


def test_who_waits_is_told_at_once_that_a_store_refuses_for_good() -> None:
    memory = stored_every_ten().sealed(an_id(4)).say(0, flushing=True)
    assert memory.orders.unstorable == ""
    assert failed(memory, lasting=True).orders.unstorable == "the store says no"


def test_who_waits_is_told_of_a_short_outage_only_when_it_has_lasted() -> None:
    memory = stored_every_ten().sealed(an_id(4)).say(0, flushing=True)
    begun = memory.now
    while memory.now < begun + FLUSH_PATIENCE + 2 * URGENT_RETRY:
        failed(memory)
        if memory.orders.unstorable:
            break
        assert memory.now < begun + FLUSH_PATIENCE
        memory.after(URGENT_RETRY + 0.1)
    assert memory.orders.unstorable == "the store says no"


def test_drain_goes_on_after_the_trainers_have_closed() -> None:
    """Thread 13 (dlrover 1378): the last one is drained after the trainers have ended."""
    memory = stored_every_ten().sealed(an_id(9)).say(0, attached=()).say(1, attached=())
    assert ordered(memory).checkpoint == an_id(9)
    assert memory.in_storage(an_id(9)).orders.durable == an_id(9)


def test_what_is_in_storage_is_committed_although_memory_lost_it() -> None:
    memory = stored_every_ten().sealed(an_id(9)).in_storage(an_id(9)).lost(1)
    assert memory.orders.committed == an_id(9)
    assert memory.attached(2, restoring=True).orders.chosen.checkpoint == an_id(9)  # type: ignore[union-attr]


# --- partners --------------------------------------------------------------------------------------------------------


def test_partners_are_named_when_all_members_have_reported() -> None:
    memory = a_memory(2, replicas=1)
    nodes = [node_id(0), node_id(1)]
    memory.state = saves.began(memory.state, ATTEMPT, GenerationNumber(1), nodes, 2, memory.now)
    assert memory.attach(0).orders.partners == {}
    assert memory.attach(1).orders.partners == {
        node_id(0): (Address("127.0.0.1", 7001),),
        node_id(1): (Address("127.0.0.1", 7000),),
    }


def test_partners_are_named_without_a_member_that_does_not_come() -> None:
    memory = a_memory(3, replicas=1)
    nodes = [node_id(index) for index in range(3)]
    memory.state = saves.began(memory.state, ATTEMPT, GenerationNumber(1), nodes, 3, memory.now)
    assert memory.attach(0).attach(1).after(31).orders.partners.keys() == {node_id(0), node_id(1)}


def test_an_earlier_generation_does_not_come_back() -> None:
    memory = a_memory(2).attached(2)
    assert saves.began(memory.state, ATTEMPT, GenerationNumber(1), None, 2, memory.now) is memory.state
