"""Which checkpoint is committed, and which will never be. Pure.

Committed is what all ranks can go back to: the gate (`agent.memory.ring`) gives a slot away only because a later
checkpoint is committed or its own is aborted. So a wrong commit here is a lost checkpoint, and a missing abort a slot
that is never free again.
"""

import msgspec

from perdure.control.inventory import Standing, line_of
from perdure.control.memories import (
    SavesState,
    attachments,
    copies_needed,
    is_gathered,
    is_whole,
    policy,
    present,
    standing,
    stored,
)
from perdure.control.parity import is_protected
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.units import Instant, Seconds

PART_PATIENCE: Seconds = 30.0
"""For the missing parts, or replicas, of a checkpoint of which a first part was seen."""
PATIENCE_PER_COMMIT = 10.0
"""The same in terms of what a commit took so far."""
MOST_PATIENCE = 64
"""Times PART_PATIENCE: it doubles with every checkpoint that was given up since the last commit."""
SMOOTHING = 0.5
MOST_ABORTED = 512


def commit(state: SavesState, now: Instant) -> SavesState:
    """Commit the newest complete one, follow the choice, and abort what will never be complete."""
    state = _follow_choice(_leave_bad(_adopt_told(state)), now)
    if is_gathered(state, now):
        state = _commit_newest(state)
    state = _note_seen(state, now)
    state = _abort_skipped(state)
    state = _aborting(state, set(state.bad & state.copies.keys()))
    state = _abort_unsaved(state)
    state = _abort_of_earlier_lines(state)
    state = _abort_late(state, now)
    return _forget(state)


def know_bad(state: SavesState) -> SavesState:
    """Which of all that there are were set aside."""
    known = {*state.copies, *stored(state), state.committed, state.told.committed} - {None}
    bad = frozenset(each for each in known if each is not None and any(a.covers(each) for a in state.asides))
    return state if bad == state.bad else msgspec.structs.replace(state, bad=bad)


def is_safe(state: SavesState, found: Standing) -> bool:
    """Whether it is complete at the level that the policy asks for."""
    if found.stored is not None:
        return True
    if policy(state).xor:
        return found.is_held(1) and is_protected(state, found)
    return found.is_held(copies_needed(state))


def patience(state: SavesState) -> Seconds:
    """How long missing parts are waited for. It grows while nothing is committed: hashing may take as long."""
    least = max(PART_PATIENCE, PATIENCE_PER_COMMIT * (state.costs.commit or 0.0))
    return least * min(1 << state.aborts, MOST_PATIENCE)


def next_late(state: SavesState, now: Instant) -> Instant | None:
    """When the next uncommitted checkpoint has been waited for long enough."""
    times = (at + patience(state) for at in state.seen_at.values())
    return min((at for at in times if at > now), default=None)


# --- committed -------------------------------------------------------------------------------------------------------


def _adopt_told(state: SavesState) -> SavesState:
    """A control that began anew takes over what the servers were told."""
    newest = state.told.committed
    if newest is None or (state.committed is not None and newest <= state.committed):
        return state
    if newest in state.aborted or newest in state.bad:
        return state
    return msgspec.structs.replace(state, committed=newest)


def _leave_bad(state: SavesState) -> SavesState:
    """What was committed and is bad protects nothing any more; the newest good one before it does, if there is one."""
    if state.committed is None or state.committed not in state.bad:
        return state
    before = {each for each in {*state.copies, *stored(state)} - state.bad - state.aborted if each < state.committed}
    newest = max((each for each in before if is_whole(state, each)), default=None)
    return msgspec.structs.replace(state, committed=newest)


def _follow_choice(state: SavesState, now: Instant) -> SavesState:
    """What all ranks restore is what is kept, until the line has a commit of its own.

    Where it is newer than the committed one and has fewer copies than the policy asks for, the committed one is kept
    beside it until it has them, if it has them itself: a node may still be lost. Not for ever, since both take up a
    slot, and a place at the partner; and not where a loss has left no more of the one than of the other.
    """
    answer = None if state.choice is None else state.choice.chosen
    chosen, before = (None if answer is None else answer.checkpoint), state.committed
    if chosen is None or chosen == before or chosen in state.bad:
        return state
    if before is not None and line_of(before) >= state.line:
        return state
    if before is not None and before < chosen and _is_safe_in_memory(state, before):
        since = state.seen_at.get(chosen, now)
        if not is_safe(state, standing(state, chosen)) and now < since + patience(state):
            return state
    return msgspec.structs.replace(state, committed=chosen)


def _is_safe_in_memory(state: SavesState, checkpoint: CheckpointId) -> bool:
    found = standing(state, checkpoint)
    return found.stored is None and found.is_complete and is_safe(state, found)


def _commit_newest(state: SavesState) -> SavesState:
    floor = state.committed
    for checkpoint in sorted({*state.copies, *stored(state)}, reverse=True):
        if floor is not None and checkpoint <= floor:
            break
        if line_of(checkpoint) > state.line or checkpoint in state.aborted or checkpoint in state.bad:
            continue
        if state.choice is not None and line_of(checkpoint) < state.line:
            continue  # the ranks have gone back to another one; this was not complete then
        if is_safe(state, standing(state, checkpoint)):
            return _measured(msgspec.structs.replace(state, committed=checkpoint, aborts=0))
    return state


def _measured(state: SavesState) -> SavesState:
    reports = present(state).values()
    stall = max((r.stall_seconds for r in reports if r.stall_seconds is not None), default=None)
    took = max((r.commit_seconds for r in reports if r.commit_seconds is not None), default=None)
    costs = msgspec.structs.replace(
        state.costs, stall=smoothed(state.costs.stall, stall), commit=smoothed(state.costs.commit, took)
    )
    return msgspec.structs.replace(state, costs=costs)


def smoothed(before: Seconds | None, measured: Seconds | None) -> Seconds | None:
    """An exponentially weighted mean, so that one odd checkpoint does not count alone."""
    if before is None or measured is None:
        return before if measured is None else measured
    return before + SMOOTHING * (measured - before)


# --- aborted ---------------------------------------------------------------------------------------------------------


def _open_ones(state: SavesState) -> set[CheckpointId]:
    """In some memory, and neither committed, older than that, nor aborted."""
    return {
        checkpoint
        for checkpoint in state.copies
        if checkpoint not in state.aborted and (state.committed is None or checkpoint > state.committed)
    }


def _note_seen(state: SavesState, now: Instant) -> SavesState:
    seen = {checkpoint: state.seen_at.get(checkpoint, now) for checkpoint in _open_ones(state)}
    return state if seen == state.seen_at else msgspec.structs.replace(state, seen_at=seen)


def _abort_skipped(state: SavesState) -> SavesState:
    skipped = {each for report in state.reports.values() for each in report.skipped}
    return _aborting(state, {each for each in skipped if state.committed is None or each > state.committed})


def _abort_unsaved(state: SavesState) -> SavesState:
    """A rank that waits for its last checkpoint to be stored saves no more: what it has no part of is never whole."""
    attached = attachments(state)
    done = {rank for rank, each in attached.items() if each.flushing}
    if not done:
        return state
    return _aborting(state, {each for each in _open_ones(state) if done & set(standing(state, each).lost)})


def _abort_of_earlier_lines(state: SavesState) -> SavesState:
    """Once the ranks have been told what they restore, or go on without asking, the rest of the past is past."""
    if not _past_is_settled(state):
        return state
    left = {each for each in _open_ones(state) if line_of(each) < state.line}
    if state.choice is None:
        return _aborting(state, {each for each in left if not is_whole(state, each)})
    kept = None if state.choice.chosen is None else state.choice.chosen.checkpoint
    if kept is not None and state.committed == kept:
        # It may be an older one than others that are complete: those were not wanted, or are bad.
        left |= {each for each in state.copies if kept < each and line_of(each) < state.line}
    return _aborting(state, left - {kept})


def _past_is_settled(state: SavesState) -> bool:
    if state.choice is not None:
        return state.choice.chosen is not None
    attached = attachments(state)
    return state.world is not None and len(attached) > 0 and all(each.step >= 0 for each in attached.values())


def _abort_late(state: SavesState, now: Instant) -> SavesState:
    """Give up checkpoints whose missing parts do not come: a rank that missed the step, a partner that takes nothing.

    One that is sealed everywhere and only lacks replicas is the best that a lost process could restore: it goes only
    when a rank had no slot for a later one, and never the last such one unless something is committed.
    """
    limit = patience(state)
    late = {
        each
        for each in _open_ones(state)
        if now >= state.seen_at[each] + limit and (line_of(each) == state.line or _past_is_settled(state))
    }
    if not late:
        return state
    sealed = {each for each in late if standing(state, each).is_held(1)}
    torn = {each for each in late - sealed if _is_missed(state, each)}
    newest_skipped = max((each for r in present(state).values() for each in r.skipped), default=None)
    kept = max(sealed, default=None) if not is_whole(state, state.committed) else None
    unwanted = {each for each in sealed if newest_skipped is not None and each < newest_skipped and each != kept}
    gone = torn | unwanted
    aborted = _aborting(state, gone)
    return msgspec.structs.replace(aborted, aborts=min(state.aborts + 1, 16)) if gone else aborted


def _is_missed(state: SavesState, checkpoint: CheckpointId) -> bool:
    """Whether every rank without a copy has gone on, or has gone: none is still on its way to this step."""
    attached = attachments(state)
    lacking = [attached[rank] for rank in standing(state, checkpoint).lost if rank in attached]
    return all(each.step > checkpoint.step or each.flushing for each in lacking)


def _aborting(state: SavesState, checkpoints: set[CheckpointId]) -> SavesState:
    new = checkpoints - state.aborted - {state.committed}
    if not new:
        return state
    seen = {each: at for each, at in state.seen_at.items() if each not in new}
    return msgspec.structs.replace(state, aborted=state.aborted | new, seen_at=seen)


def _forget(state: SavesState) -> SavesState:
    """What is older than the committed one needs no abort; the list stays short."""
    kept = {each for each in state.aborted if state.committed is None or each > state.committed or each in state.copies}
    if len(kept) > MOST_ABORTED:
        newest = sorted(kept, reverse=True)[:MOST_ABORTED]
        kept = {*newest, *(kept & state.copies.keys())}  # what some slot still has would be needed for ever otherwise
    return state if kept == state.aborted else msgspec.structs.replace(state, aborted=frozenset(kept))
