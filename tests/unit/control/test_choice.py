"""What all ranks restore. Where a test is a thread of `reference/checkpoint.md`, section 5, it names it."""

from perdure.control import saves
from perdure.control.answer import RESTORE_PATIENCE
from perdure.vocab.checkpoint import Aside, CheckpointId, Shards, Stored
from perdure.vocab.ids import GenerationNumber
from perdure.wire.memory import Told
from tests.unit.control.a_memory import ATTEMPT, Memory, a_memory, an_id, node_id


def chosen(memory: Memory) -> CheckpointId | None:
    orders = memory.orders
    assert orders.chosen is not None, orders.refused
    return orders.chosen.checkpoint


def refused(memory: Memory) -> str:
    orders = memory.orders
    assert orders.chosen is None
    return orders.refused


def test_first_start_begins_at_step_0() -> None:
    assert chosen(a_memory(2).attached(restoring=True)) is None


def test_answer_comes_when_the_last_rank_has_asked_and_is_one_for_all() -> None:
    """Thread 14 (dlrover 1233): one selector result for all ranks."""
    memory = a_memory(2).attached().sealed(an_id(4)).attach(0, 2, restoring=True)
    assert memory.orders.chosen is None
    memory.attach(1, 2, restoring=True)
    answer = memory.orders.chosen
    assert chosen(memory) == an_id(4)
    memory.sealed(an_id(9)).in_storage(an_id(7))  # whatever comes later
    assert memory.orders.chosen == answer


def test_a_partial_set_is_never_chosen() -> None:
    """Thread 19 (metaseq 53): sizes checked, a partial set never selected."""
    memory = a_memory(3).attached().sealed(an_id(4))
    memory.holds(0, memory.copy(an_id(9), 0)).holds(1, memory.copy(an_id(9), 1))
    assert chosen(memory.attached(2, restoring=True)) == an_id(4)


def test_parts_of_different_worlds_are_not_mixed() -> None:
    """Thread 19 (metaseq 53): the parts of a set are of one world."""
    memory = a_memory(2).attached()
    memory.holds(0, memory.copy(an_id(9), 0)).holds(1, memory.copy(an_id(9), 1, world_size=3))
    assert "2 and 3 ranks wrote it" in refused(memory.attached(2, restoring=True))


def test_the_newest_complete_one_is_chosen_and_not_the_newest_name() -> None:
    """Thread 21 (transformers 35580): the newest complete one."""
    memory = a_memory(2).attached().sealed(an_id(100)).holds(1, a_memory(2).copy(an_id(200), 1))
    assert chosen(memory.attached(2, restoring=True)) == an_id(100)


def test_all_ranks_step_back_together_where_one_has_lost_its_newest() -> None:
    """Thread 30 (composer 2146, LlamaFactory 655, transformers 28270): all ranks take the same step."""
    memory = a_memory(3).attached().sealed(an_id(4)).sealed(an_id(9))
    memory.say(2, held=memory.reports[2].held[:1])
    assert chosen(memory.attached(2, restoring=True)) == an_id(4)


def test_an_explicit_step_goes_before_newer_ones() -> None:
    """Thread 31 (Megatron-Bridge 5260): restore(step=100) with newer memory copies loads 100."""
    memory = a_memory(2, store=True).attached().in_storage(an_id(100)).sealed(an_id(120))
    assert chosen(memory.attached(2, restoring=True, restore_step=100)) == an_id(100)
    assert memory.orders.committed == an_id(100)


def test_an_explicit_step_that_is_not_there_is_refused() -> None:
    """Thread 31 (Megatron-Bridge 5260): and nothing else instead."""
    memory = a_memory(2).attached().sealed(an_id(120)).attached(2, restoring=True, restore_step=100)
    assert "no complete checkpoint of step 100" in refused(memory)


def test_no_common_step_is_assumed_where_inventories_differ() -> None:
    """Thread 42 (lm-resiliency 85, 83): {5, 6}, {4, 6}, {4, 5} have no step in common."""
    memory = a_memory(3).attached()
    for rank, steps in enumerate([(5, 6), (4, 6), (4, 5)]):
        memory.holds(rank, *(memory.copy(an_id(step), rank) for step in steps))
    reason = refused(memory.attached(2, restoring=True))
    for step, rank in ((4, 0), (5, 1), (6, 2)):
        assert f"step {step} of generation 1: no copy of rank {rank} of 3" in reason
    assert "fresh=True" in reason


def test_a_copy_without_a_checksum_is_unverified_and_not_good() -> None:
    """Thread 42 (lm-resiliency 83): a missing checksum is unverified."""
    memory = a_memory(2).attached().sealed(an_id(4))
    memory.holds(0, memory.copy(an_id(9), 0)).holds(1, memory.copy(an_id(9), 1, root=""))
    assert chosen(memory.attached(2, restoring=True)) == an_id(4)


def test_every_nodes_part_is_found_where_it_is() -> None:
    """Thread 44 (Megatron-LM 1530): node-local directories; ranks have moved to other nodes."""
    memory = a_memory(3).attached().sealed(an_id(4))
    memory.shards = memory.shards[1:] + memory.shards[:1]
    memory.attached(2, restoring=True)
    answer = memory.orders.chosen
    assert answer is not None
    assert answer.holders == {rank: (node_id(rank),) for rank in range(3)}
    assert memory.orders.addresses.keys() == {node_id(rank) for rank in range(3)}


def test_a_node_that_is_no_member_any_more_still_gives_its_part() -> None:
    """Thread 44 (Megatron-LM 1530): wherever it is now."""
    memory = a_memory(3).attached().sealed(an_id(4))
    nodes = [node_id(0), node_id(1)]
    memory.state = saves.began(memory.state, ATTEMPT, GenerationNumber(2), nodes, 2, memory.now)
    assert chosen(memory.attach(0, 2, restoring=True).attach(1, 2, restoring=True)) == an_id(4)


def test_replicas_make_good_for_a_lost_rank_and_say_what_is_missing() -> None:
    memory = a_memory(2)
    memory.shards = ["the same", "the same"]
    memory.attached().sealed(an_id(4)).lost(1)
    world = Shards(attempt=ATTEMPT, generation=GenerationNumber(1), by_rank=("the same", "the same"))
    memory.restarted().say(0, worlds=(world,)).attached(2, restoring=True)
    answer = memory.orders.chosen
    assert answer is not None
    assert (answer.checkpoint, answer.missing) == (an_id(4), (1,))


def test_a_step_that_only_some_replicas_saved_gives_way_to_the_one_before() -> None:
    """Its tensors are all there, and the dead rank's place in the data is not."""
    memory = a_memory(2)
    memory.shards = ["the same", "the same"]
    memory.attached().sealed(an_id(4)).holds(0, memory.copy(an_id(5), 0))
    assert chosen(memory.attached(2, restoring=True)) == an_id(4)


def test_memory_and_storage_are_mixed_for_one_checkpoint() -> None:
    memory = a_memory(2, store=True).attached().sealed(an_id(4)).in_storage(an_id(4)).lost(1)
    memory.attached(2, restoring=True)
    answer = memory.orders.chosen
    assert answer is not None
    assert answer.stored is not None
    assert (answer.holders, answer.missing) == ({0: (node_id(0),)}, ())


def test_copies_that_contradict_each_other_are_not_used() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).holds(1, a_memory(2).copy(an_id(4), 0, root="another"))
    assert "the copies of rank 0 differ" in refused(memory.attached(2, restoring=True))


def test_nothing_is_left_of_a_committed_one_and_that_is_no_first_start() -> None:
    memory = a_memory(1).attached().sealed(an_id(4)).lost(0).attached(2, restoring=True)
    assert "no copy of any part of it is left" in refused(memory)


def test_fresh_start_leaves_what_is_there_alone() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).attached(2, restoring=True, fresh=True)
    assert chosen(memory) is None
    assert memory.orders.committed == an_id(4)


def test_ranks_that_want_different_things_are_refused() -> None:
    memory = a_memory(2).attached().sealed(an_id(4))
    memory.attach(0, 2, restoring=True, fresh=True).attach(1, 2, restoring=True)
    assert "rank 0 asked for a fresh start" in refused(memory)
    memory.attach(0, 3, restoring=True, restore_step=4).attach(1, 3, restoring=True)
    assert "the newest step and step 4" in refused(memory)


def test_storage_that_was_not_listed_yet_is_waited_for() -> None:
    memory = a_memory(2, store=True).attached(restoring=False).say(0, unlooked="it is being listed")
    memory.attached(restoring=True)
    assert memory.orders.chosen is None
    stored = Stored(checkpoint=an_id(40), path="p", world_size=2, nbytes=1)
    assert chosen(memory.say(0, unlooked="", stored=(stored,))) == an_id(40)


def test_storage_that_cannot_be_listed_is_no_reason_to_begin_at_0() -> None:
    memory = (
        a_memory(2, store=True).say(0, unlooked="403 forbidden").attached(restoring=True).after(RESTORE_PATIENCE + 1)
    )
    assert "403 forbidden" in refused(memory)


def test_a_checkpoint_that_was_set_aside_is_not_chosen_again() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).sealed(an_id(9))
    aside = Aside(checkpoint=an_id(9), line=an_id(0, 7).line, reason="the loss is nan")
    memory.say(0, asides=(aside,))
    assert memory.orders.committed == an_id(4)
    assert chosen(memory.attached(2, restoring=True)) == an_id(4)
    assert an_id(9) in memory.orders.aborted


def test_after_a_step_back_the_abandoned_line_is_history() -> None:
    memory = a_memory(2).attached().sealed(an_id(50)).sealed(an_id(100))
    memory.attached(2, restoring=True, restore_step=50).sealed(an_id(60, 2))
    assert chosen(memory.attached(3, restoring=True)) == an_id(60, 2)


def test_control_that_begins_anew_gives_the_rest_the_answer_that_some_have() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).attached(2, restoring=True)
    told = Told(answered=1, chosen=an_id(4))
    memory.restarted().attach(1, 2, restoring=True).sealed(an_id(9))
    memory.say(0, told=told, attached=())
    assert chosen(memory) == an_id(4)


def test_a_rank_that_never_asks_does_not_hold_up_the_others_for_ever() -> None:
    memory = a_memory(2).attached().sealed(an_id(4)).attach(0, 2, restoring=True).say(1)
    assert memory.after(RESTORE_PATIENCE - 1).orders.chosen is None
    assert chosen(memory.after(2)) == an_id(4)
