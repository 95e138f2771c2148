"""When the ranks save: the cadence in steps, and one more step before a stop. Pure.

A cadence is announced for a step that no rank has reached yet, so that all ranks save after the same steps.
"""

import msgspec

from perdure.control.memories import SavesState, attachments, furthest_step, policy, step_seconds
from perdure.policy.cadence import Failures, changed, failure_rates, in_steps, interval
from perdure.policy.draining import stop_after
from perdure.vocab.checkpoint import Cadence, CheckpointId
from perdure.vocab.units import Instant, Seconds

FIRST_COST: Seconds = 0.5
"""Stall of a checkpoint before one was made."""
DRAG_SHARE = 0.1
"""Of the time that sealing, sending and draining take: what they cost the training meanwhile, being niced."""
WORTH_A_CHANGE = 1.25
"""A cadence that is off by less stays."""
LEAST_OVERHEAD, MOST_OVERHEAD = 1e-4, 0.5


def pace(state: SavesState, now: Instant) -> SavesState:
    """Announce a cadence, or a better one."""
    state = _adopt_told(state)
    if state.world is None:
        return state
    fixed = policy(state).every
    new = _fixed(state, max(1, fixed), now) if fixed is not None else _measured(state, now)
    return state if new is None or new == state.cadence else msgspec.structs.replace(state, cadence=new)


def once_at(state: SavesState, now: Instant) -> int | None:
    """A step that no rank has reached: the furthest one and at least two, or about a second, later. None: none runs."""
    furthest = furthest_step(state, now)
    if furthest < 0:
        return None
    return stop_after([furthest], [step_seconds(state)])


def rates(state: SavesState, now: Instant) -> Failures:
    """Failures of the job per second, from its own history and those of others."""
    return failure_rates(state.world_size, state.failures, now - state.opened_at)


def overhead(state: SavesState) -> float:
    return min(max(policy(state).overhead, LEAST_OVERHEAD), MOST_OVERHEAD)


def _adopt_told(state: SavesState) -> SavesState:
    """A control that began anew goes on with the cadence that the trainers have."""
    cadence = state.told.cadence if state.cadence is None else state.cadence
    once = state.told.once if state.once is None else state.once
    return msgspec.structs.replace(state, cadence=cadence, once=once)


def _fixed(state: SavesState, every: int, now: Instant) -> Cadence | None:
    """After the steps every - 1, 2 every - 1, …: the same ones in each generation, wherever it begins."""
    if state.cadence is not None and state.cadence.every == every:
        return None
    first = 0
    if any(each.step >= 0 for each in attachments(state).values()):
        first = once_at(state, now) or 0
    return Cadence(first=first + (every - 1 - first) % every, every=every)


def _measured(state: SavesState, now: Instant) -> Cadence | None:
    seconds = step_seconds(state)
    ahead = once_at(state, now)
    if seconds is None or ahead is None:
        return None
    every = _wanted(state, seconds, now)
    old = state.cadence
    if old is None:
        return Cadence(first=ahead, every=every)  # one soon: what it costs is not known before
    furthest = furthest_step(state, now)
    if _was_missed(state, old, furthest):
        return Cadence(first=ahead, every=every)  # not a whole interval without one
    if furthest < old.first or max(every, old.every) <= WORTH_A_CHANGE * min(every, old.every):
        return None  # one change at a time
    due = furthest + 1 + (old.first - furthest - 1) % old.every
    if due < ahead and ahead - furthest < old.every:
        return None  # some ranks may reach a step that is due before they hear of the change: later
    return Cadence(first=max(due, ahead), every=every)


def _was_missed(state: SavesState, cadence: Cadence, furthest: int) -> bool:
    """Whether the last checkpoint that was due was aborted."""
    if furthest < cadence.first:
        return False
    last = furthest - (furthest - cadence.first) % cadence.every
    attempt, generation, turn = state.line
    return CheckpointId(attempt=attempt, generation=generation, turn=turn, step=last) in state.aborted


def _wanted(state: SavesState, seconds: Seconds, now: Instant) -> int:
    costs = state.costs
    commit = costs.commit or 0.0
    cost = (FIRST_COST if costs.stall is None else costs.stall) + DRAG_SHARE * commit
    best = interval(cost, rates(state, now).any, overhead=overhead(state), shortest=commit)
    current = None if state.cadence is None else state.cadence.every
    return changed(current, in_steps(best, seconds), in_steps(commit, seconds))
