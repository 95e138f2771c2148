"""When the ranks of a generation are told what they restore. Pure; which one it is decides `control.choice`.

They may ask more than once (decision 0013): the n-th question is answered when all have asked it; it begins a turn.
"""

from collections.abc import Collection

import msgspec

from perdure.control.choice import Choice, Wish, choose, chosen_of, ranks_in_words, wish_of
from perdure.control.memories import SavesState, attachments, policy, present, standing, stored
from perdure.vocab.checkpoint import CheckpointId, Chosen
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant, Seconds
from perdure.wire.memory import Attachment, Told

RESTORE_PATIENCE: Seconds = 120.0
"""From the first rank's question until it is answered with what is known: longer than ranks differ in starting."""


def answer(state: SavesState, now: Instant) -> SavesState:
    """One answer for all ranks to each question, when all have asked it or have had the time; kept until the next."""
    if state.generation == 0:
        return state
    state = _at_turn_of_ranks(state)
    asking = [each for each in attachments(state).values() if each.restoring > state.question]
    if asking and state.asked_at is None:
        state = msgspec.structs.replace(state, asked_at=now)
    late = state.asked_at is not None and now >= state.asked_at + RESTORE_PATIENCE
    if state.told.answered > state.question:
        found = _repeated(state, state.told.chosen, late=late)
        if found is not None:
            return answer(_answered(state, state.told.answered, found), now)
        if any(each.restoring <= state.told.answered for each in asking):
            return state
    number = max((each.restoring for each in asking), default=0)
    if not number or not (late or _have_all_asked(state, number)):
        return state
    return _answered(state, number, _choice(state, number, asking))


def _at_turn_of_ranks(state: SavesState) -> SavesState:
    """A control that began anew may hear only from the ranks that they have gone back meanwhile."""
    turn = max((each.turn for each in attachments(state).values()), default=0)
    return state if turn <= state.turn else msgspec.structs.replace(state, turn=turn)


def _answered(state: SavesState, number: int, choice: Choice) -> SavesState:
    """The answer holds; after a second one nothing that was said before it of saving holds any more."""
    after = msgspec.structs.replace(state, question=number, choice=choice, asked_at=None)
    turn = number - 1
    if choice.chosen is None or turn <= state.turn:
        return after
    return msgspec.structs.replace(after, turn=turn, cadence=None, told=Told())


def _choice(state: SavesState, number: int, asking: Collection[Attachment]) -> Choice:
    if number > 1 and not _have_all_asked(state, number):
        return Choice(refused=_not_by_all(state, number))
    wish = wish_of(asking)
    return Choice(refused=wish) if isinstance(wish, str) else _chosen(state, wish, again=number > 1)


def _have_all_asked(state: SavesState, number: int) -> bool:
    members = present(state)
    if state.members is not None and not state.members <= members.keys():
        return False
    attached = attachments(state)
    asked = all(each.restoring == number for each in attached.values())
    is_whole = state.world is not None and attached.keys() >= set(range(state.world_size))
    return is_whole and asked and not _unlooked(state)


def _not_by_all(state: SavesState, number: int) -> str:
    attached = attachments(state)
    others = [r for r in range(state.world_size) if r not in attached or attached[r].restoring != number]
    if not others:
        return f"the storage was not listed within {RESTORE_PATIENCE:g} s: {'; '.join(_unlooked(state).values())}"
    return (
        f"some ranks have called restore() again, and {ranks_in_words(others)} not within {RESTORE_PATIENCE:g} s; call"
        " it as often, and between the same saves, on all ranks"
    )


def _unlooked(state: SavesState) -> dict[NodeId, str]:
    return {node: report.unlooked for node, report in present(state).items() if report.unlooked}


def _newest_known(state: SavesState) -> CheckpointId | None:
    """The newest one that was ever committed, as far as anybody remembers."""
    return max((each for each in (state.committed, state.told.committed) if each is not None), default=None)


def _chosen(state: SavesState, wish: Wish, *, again: bool) -> Choice:
    found, existed = {*state.copies, *stored(state)}, _newest_known(state)
    if again and wish.fresh:  # it was a fresh start: what this run has saved since is its own
        wish = msgspec.structs.replace(wish, fresh=False)
        found = {each for each in found if each.life == state.life}
        existed = existed if existed is not None and existed.life == state.life else None
    return choose(
        wish,
        [standing(state, each) for each in found],
        looked=sorted(state.reports),
        unlooked=_unlooked(state),
        bad=state.bad,
        asides=state.asides,
        discards=policy(state).discards,
        left=state.aborted,
        existed=existed,
    )


def _repeated(state: SavesState, checkpoint: CheckpointId | None, *, late: bool) -> Choice | None:
    """Some ranks have their answer from a control that was here before: the others get the same. None: not yet."""
    if checkpoint is None:
        return Choice(chosen=Chosen(checkpoint=None))
    found = standing(state, checkpoint)
    if found.is_complete:
        return Choice(chosen=chosen_of(found))
    if not late:
        return None
    why = f"some ranks have restored {checkpoint}, and not all of it can be read any more: restart the workers"
    return Choice(refused=why)
