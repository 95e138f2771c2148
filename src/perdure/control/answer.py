"""When the ranks of a generation are told what they restore. Pure; which one it is decides `control.choice`."""

import msgspec

from perdure.control.choice import Choice, Wish, choose, chosen_of, wish_of
from perdure.control.memories import SavesState, attachments, present, standing, stored
from perdure.vocab.checkpoint import CheckpointId, Chosen
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant, Seconds

RESTORE_PATIENCE: Seconds = 120.0
"""From the first rank's question until it is answered with what is known: longer than ranks differ in starting."""


def answer(state: SavesState, now: Instant) -> SavesState:
    """One answer for all ranks of the generation, when all have asked or have had the time; kept until it ends."""
    if state.choice is not None or state.generation == 0:
        return state
    attached = attachments(state)
    asking = [each for each in attached.values() if each.restoring]
    if asking and state.asked_at is None:
        state = msgspec.structs.replace(state, asked_at=now)
    late = state.asked_at is not None and now >= state.asked_at + RESTORE_PATIENCE
    if state.told.answered:
        return _repeat(state, state.told.chosen, late=late)
    if not asking or not (late or _have_all_asked(state)):
        return state
    wish = wish_of(asking)
    choice = Choice(refused=wish) if isinstance(wish, str) else _chosen(state, wish)
    return msgspec.structs.replace(state, choice=choice)


def _have_all_asked(state: SavesState) -> bool:
    members = present(state)
    if state.members is not None and not state.members <= members.keys():
        return False
    attached = attachments(state)
    asked = all(each.restoring for each in attached.values())
    return state.world is not None and asked and not _unlooked(state)


def _unlooked(state: SavesState) -> dict[NodeId, str]:
    return {node: report.unlooked for node, report in present(state).items() if report.unlooked}


def _newest_known(state: SavesState) -> CheckpointId | None:
    """The newest one that was ever committed, as far as anybody remembers."""
    return max((each for each in (state.committed, state.told.committed) if each is not None), default=None)


def _chosen(state: SavesState, wish: Wish) -> Choice:
    return choose(
        wish,
        [standing(state, each) for each in {*state.copies, *stored(state)}],
        looked=sorted(state.reports),
        unlooked=_unlooked(state),
        bad=state.bad,
        left=state.aborted,
        existed=_newest_known(state),
    )


def _repeat(state: SavesState, checkpoint: CheckpointId | None, *, late: bool) -> SavesState:
    """Some ranks have their answer from a control that was here before: the others get the same."""
    if checkpoint is None:
        return msgspec.structs.replace(state, choice=Choice(chosen=Chosen(checkpoint=None)))
    found = standing(state, checkpoint)
    if found.is_complete:
        return msgspec.structs.replace(state, choice=Choice(chosen=chosen_of(found)))
    if not late:
        return state
    why = f"some ranks have restored {checkpoint}, and not all of it can be read any more: restart the workers"
    return msgspec.structs.replace(state, choice=Choice(refused=why))
