"""Which committed checkpoint goes to storage, and when: one at a time. Pure.

Each node writes its own part; the node with the lowest rank commits it in the store and reports it `stored`.
"""

import msgspec

from perdure.control.commits import is_safe, patience, smoothed
from perdure.control.inventory import line_of
from perdure.control.memories import (
    Draining,
    SavesState,
    copies_needed,
    is_gathered,
    policy,
    present,
    standing,
    stored,
)
from perdure.control.tempo import DRAG_SHARE, overhead, rates
from perdure.policy.cadence import LONGEST_IN_STORAGE, interval
from perdure.vocab.checkpoint import CheckpointId, Level
from perdure.vocab.units import Instant, Seconds

DRAIN_PATIENCE: Seconds = 1800.0
"""Without one more part: longer than any pause of a busy store."""
FIRST_DRAIN: Seconds = 10.0
"""What a drain is taken to last before there was one."""


def store(state: SavesState, now: Instant) -> SavesState:
    """Note what has become durable, give up what will not, and begin the next drain when it is due."""
    state = _note_durable(state, now)
    state = _note_parts(state, now)
    if state.drain is None and _has_store(state):
        wanted = _next(state, now)
        if wanted is not None and is_due(state, wanted, now):
            begun = Draining(checkpoint=wanted, since=now, nodes=frozenset(present(state)), moved_at=now)
            state = msgspec.structs.replace(state, drain=begun, drained_at=now)
    return state


def is_due(state: SavesState, checkpoint: CheckpointId, now: Instant) -> bool:
    """Whether `checkpoint` is to be drained now, by steps, by time, or because somebody waits for it."""
    if state.stopping or any(report.flushing for report in present(state).values()):
        return True
    every = policy(state).store_every
    if every is not None:
        return checkpoint.step - _last_step(state, checkpoint) >= max(1, every)
    due = due_at(state, now)
    return due is None or now >= due


def due_at(state: SavesState, now: Instant) -> Instant | None:
    """When the next drain is due by time; None: at once, since none was made yet."""
    if state.drained_at is None:
        return None
    took = FIRST_DRAIN if state.costs.drain is None else state.costs.drain
    level = Level.REPLICATED if copies_needed(state) > 1 else Level.SEALED
    best = interval(
        DRAG_SHARE * took,
        rates(state, now).beyond(level),
        overhead=overhead(state),
        shortest=took,
        longest=LONGEST_IN_STORAGE,
    )
    return state.drained_at + best


def next_due(state: SavesState, now: Instant) -> Instant | None:
    """When to look again, as far as time alone decides."""
    if state.drain is not None:
        return state.drain.moved_at + DRAIN_PATIENCE
    if not _has_store(state) or _next(state, now) is None or policy(state).store_every is not None:
        return None
    return due_at(state, now)


def _has_store(state: SavesState) -> bool:
    return any(report.store or report.free_store is not None for report in present(state).values())


def _next(state: SavesState, now: Instant) -> CheckpointId | None:
    """The newest committed one that is whole in memory and not in storage.

    Where replicas do not come, the newest one that is sealed everywhere: then storage is all the more wanted.
    """
    limit = patience(state)
    stuck = [each for each, at in state.seen_at.items() if now >= at + limit]
    candidates = sorted([*stuck, *([] if state.committed is None else [state.committed])], reverse=True)
    for each in candidates:
        if each in state.undrained or each in state.bad or (state.durable is not None and each <= state.durable):
            continue
        found = standing(state, each)
        if found.stored is None and found.is_held(1) and (each != state.committed or is_safe(state, found)):
            return each
    return None


def _last_step(state: SavesState, checkpoint: CheckpointId) -> int:
    """The step from which `store_every` counts: the last one in storage, or the one that the line began with."""
    if state.durable is not None and line_of(state.durable) == line_of(checkpoint):
        return state.durable.step
    answer = None if state.choice is None else state.choice.chosen
    restored = None if answer is None else answer.checkpoint
    known = [each.step for each in (state.durable, restored) if each is not None and each.step <= checkpoint.step]
    return max(known, default=-1)


def _note_durable(state: SavesState, now: Instant) -> SavesState:
    newest = max((each for each in stored(state) if line_of(each) <= state.line), default=None)
    if newest is not None and (state.durable is None or newest > state.durable):
        state = msgspec.structs.replace(state, durable=newest)
    drain = state.drain
    if drain is None or drain.checkpoint not in stored(state):
        return state
    costs = msgspec.structs.replace(state.costs, drain=smoothed(state.costs.drain, now - drain.since))
    return msgspec.structs.replace(state, drain=None, costs=costs)


def _note_parts(state: SavesState, now: Instant) -> SavesState:
    """Follow a drain; give it up when a part of it cannot come any more, or when nothing has moved for long."""
    drain = state.drain
    if drain is None:
        return state
    parts = drain.parts | {node for node, report in state.reports.items() if drain.checkpoint in report.parts}
    if parts != drain.parts:
        drain = msgspec.structs.replace(drain, parts=parts, moved_at=now)
        state = msgspec.structs.replace(state, drain=drain)
    awaited = drain.nodes - parts
    went = bool(awaited - state.reports.keys())
    overwritten = bool(awaited) and is_gathered(state, now) and not standing(state, drain.checkpoint).is_held(1)
    failed = any(drain.checkpoint in report.failed for report in state.reports.values())
    if went or overwritten or failed or now >= drain.moved_at + DRAIN_PATIENCE:
        return _given_up(state, drain.checkpoint)
    return state


def _given_up(state: SavesState, checkpoint: CheckpointId) -> SavesState:
    kept = {each for each in state.undrained if each in state.copies}
    return msgspec.structs.replace(state, drain=None, undrained=frozenset(kept | {checkpoint}))
