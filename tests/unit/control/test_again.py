"""Ranks that ask a second time in one generation, and checkpoints that are set aside (decision 0013)."""

import msgspec

from perdure.control.answer import RESTORE_PATIENCE
from perdure.vocab.checkpoint import Aside, CheckpointId
from perdure.wire.memory import Told
from tests.unit.control.a_memory import Memory, a_memory, an_id


def ask(memory: Memory, number: int, *ranks: int, step: int | None = None, fresh: bool = False) -> Memory:
    for index in ranks:
        memory.attach(index, restore_step=step, fresh=fresh)
        (trainer,) = memory.reports[index].attached
        asking = msgspec.structs.replace(trainer, restoring=number, turn=max(number - 2, 0))
        memory.say(index, attached=(asking,))
    return memory


def turned(step: int, turn: int = 1) -> CheckpointId:
    return msgspec.structs.replace(an_id(step), turn=turn)


def answer(memory: Memory) -> tuple[int, int, CheckpointId | None]:
    orders = memory.orders
    assert orders.chosen is not None, orders.refused
    return orders.question, orders.turn, orders.chosen.checkpoint


def begun() -> Memory:
    """Two ranks that have begun at step 0, and have saved steps 4 and 9."""
    memory = ask(a_memory(2, every=5), 1, 0, 1)
    assert answer(memory) == (1, 0, None)
    return memory.attached().at_step(9).sealed(an_id(4)).sealed(an_id(9))


def test_second_question_uses_what_was_sealed_since_the_first() -> None:
    """pytorch/torchtitan 930: restore() after step() in one process uses the sealed slot."""
    assert answer(ask(begun(), 2, 0, 1)) == (2, 1, an_id(9))


def test_second_question_waits_for_all_ranks_and_the_first_answer_stands_till_then() -> None:
    memory = ask(begun(), 2, 0)
    assert answer(memory) == (1, 0, None)
    assert answer(ask(memory, 2, 1)) == (2, 1, an_id(9))


def test_second_question_that_not_all_ask_is_refused_by_name() -> None:
    memory = ask(begun(), 2, 0).after(RESTORE_PATIENCE + 1)
    orders = memory.orders
    assert (orders.question, orders.turn, orders.chosen) == (2, 0, None)
    assert "rank 1 not within 120 s" in orders.refused


def test_after_going_back_the_same_steps_are_saved_under_other_ids_and_are_newer() -> None:
    memory = ask(begun(), 2, 0, 1, step=4)
    assert answer(memory) == (2, 1, an_id(4))
    assert memory.orders.committed == an_id(4)
    assert an_id(9) in memory.orders.aborted
    memory.attached(turn=1).sealed(turned(9))
    assert memory.orders.committed == turned(9) > an_id(9)
    assert answer(ask(memory, 3, 0, 1)) == (3, 2, turned(9))


def test_control_that_begins_anew_learns_the_turn_from_servers_or_from_ranks() -> None:
    memory = ask(begun(), 2, 0, 1).attached(turn=1)
    memory.restarted().say(0).say(1, told=Told(answered=2, chosen=an_id(9), committed=an_id(9)))
    assert answer(memory) == (2, 1, an_id(9))
    memory.restarted().say(0, told=Told()).say(1, told=Told())
    assert memory.orders.turn == 1
    assert memory.sealed(turned(14)).orders.committed == turned(14)


def test_second_question_of_a_fresh_run_goes_back_to_its_own_saves_only() -> None:
    memory = a_memory(2, every=5).attached().sealed(an_id(50))
    for index in (0, 1):
        memory.attach(index, 2, restoring=True, fresh=True)
    assert answer(memory) == (1, 0, None)
    memory.sealed(an_id(4, 2))
    for index in (0, 1):
        memory.attach(index, 2, fresh=True)
        (trainer,) = memory.reports[index].attached
        memory.say(index, attached=(msgspec.structs.replace(trainer, restoring=2),))
    assert answer(memory) == (2, 1, an_id(4, 2))


def aside(checkpoint: CheckpointId, line: CheckpointId) -> Aside:
    return Aside(checkpoint=checkpoint, line=line.line, reason="the loss is nan")


def test_what_was_saved_after_a_bad_restore_is_set_aside_with_it() -> None:
    memory = ask(begun(), 2, 0, 1).attached(turn=1).sealed(turned(14))
    assert memory.orders.committed == turned(14)
    memory.say(1, asides=(aside(an_id(9), turned(0)),))
    assert memory.orders.committed == an_id(4)
    assert {an_id(9), turned(14)} <= set(memory.orders.aborted)
    assert answer(ask(memory, 3, 0, 1)) == (3, 2, an_id(4))


def test_what_was_set_aside_is_spread_and_told_back_by_any_one_server() -> None:
    bad = aside(an_id(9), an_id(0))
    spread = begun().say(1, asides=(bad,)).orders.asides
    assert spread == (bad,)
    memory = begun().restarted().say(0).say(1)
    assert memory.orders.asides == ()
    assert memory.say(0, asides=spread).orders.asides == (bad,)


def test_more_in_a_row_than_the_policy_allows_are_refused_with_the_list() -> None:
    memory = a_memory(2, every=5, discards=1).attached()
    for step in (4, 9, 14):
        memory.sealed(an_id(step))
    memory.say(0, asides=(aside(an_id(14), an_id(0, 7)), aside(an_id(9), an_id(0, 8))))
    reason = memory.attached(2, restoring=True).orders.refused
    assert "2 checkpoints in a row were set aside" in reason
    assert "step 14 of generation 1: set aside as bad (the loss is nan)" in reason
    memory.attached(3, restoring=True, restore_step=9)
    assert answer(memory)[2] == an_id(9)
