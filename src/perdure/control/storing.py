"""Which checkpoint goes to storage, and when: one at a time, each rank's part written by one node. Pure.

What fails is tried again, ever more seldom; who waits for it is told when waiting has no sense any more. It does not
know how storage works (`store.checkpoints`), only what nodes say of it.
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.control.commits import patience, smoothed
from perdure.control.inventory import Standing, line_of
from perdure.control.memories import (
    Draining,
    SavesState,
    StoreProblem,
    attachments,
    copies_needed,
    is_gathered,
    policy,
    present,
    stand_in,
    standing,
    stored,
)
from perdure.control.tempo import DRAG_SHARE, overhead, rates
from perdure.policy.cadence import LONGEST_IN_STORAGE, interval
from perdure.vocab.checkpoint import CheckpointId, Level, covers
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Bytes, Instant, Seconds
from perdure.wire.memory import DrainFailure, DrainOrder

DRAIN_PATIENCE: Seconds = 600.0
"""Without one more byte on any node: each node's own waits for a store are shorter, and end with a reason."""
FIRST_DRAIN: Seconds = 10.0
"""What a drain is taken to last before there was one."""
FIRST_RETRY, LONGEST_RETRY = 5.0, 300.0
"""Seconds from a failure to the next try; twice as many after each."""
URGENT_RETRY: Seconds = 10.0
"""The longest while somebody waits for it."""
FLUSH_PATIENCE: Seconds = 60.0
"""Tries of so long must have failed before those who wait are told: what a store's short outage lasts."""


def store(state: SavesState, now: Instant) -> SavesState:
    """Note what has become durable, follow the drain that is under way, and begin the next one when it is due."""
    state = _note_waiting(state, now)
    state = _note_durable(state, now)
    state = _follow(state, now)
    state = _begin(state, now)
    unstorable = _why_unstorable(state, now)
    return state if unstorable == state.unstorable else msgspec.structs.replace(state, unstorable=unstorable)


def drain_order(state: SavesState) -> DrainOrder | None:
    """What all nodes are to do for the drain that is under way."""
    drain = state.drain
    if drain is None:
        return None
    size = standing(state, drain.checkpoint).world_size
    return DrainOrder(
        number=drain.number,
        checkpoint=drain.checkpoint,
        ranks=() if len(drain.ranks) == size else drain.ranks,
        writers=drain.writers,
        committer=_committer(state, drain),
        is_written=drain.written >= set(drain.ranks),
    )


def is_due(state: SavesState, checkpoint: CheckpointId, now: Instant) -> bool:
    """Whether `checkpoint` is to be drained now, by steps, by time, or because somebody waits for it."""
    if is_urgent(state):
        return True
    every = policy(state).store_every
    if every is not None:
        return checkpoint.step - _last_step(state, checkpoint) >= max(1, every)
    due = due_at(state, now)
    return due is None or now >= due


def is_urgent(state: SavesState) -> bool:
    """Whether somebody waits for the newest one to be in storage: the end is near, or may be."""
    return state.stopping or state.noticed or state.awaited_since is not None


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
    times = [] if state.awaited_since is None else [_told_at(state, state.awaited_since)]
    if _has_store(state) and _next(state, now) is not None:
        due = due_at(state, now) if policy(state).store_every is None else None
        times += [time for time in (due, _retry_at(state)) if time is not None]
    return min((time for time in times if time > now), default=None)


# --- which one -------------------------------------------------------------------------------------------------------


def _has_store(state: SavesState) -> bool:
    return any(report.store for report in present(state).values())


def _next(state: SavesState, now: Instant) -> tuple[CheckpointId, tuple[int, ...]] | None:
    """The newest committed one that is whole in memory and not in storage, and the ranks whose slots make it up.

    Where replicas do not come, the newest one that is sealed everywhere: then storage is all the more wanted, and who
    waits for storage does not wait for replicas before.
    """
    limit = 0.0 if state.awaited_since is not None else patience(state)
    sealed = [each for each, at in state.seen_at.items() if now >= at + limit]
    candidates = sorted([*sealed, *([] if state.committed is None else [state.committed])], reverse=True)
    for each in candidates:
        if each in state.bad or (state.durable is not None and each <= state.durable):
            continue
        found = standing(state, each)
        ranks = _ranks_of(state, found)
        if found.stored is None and ranks:
            return each, ranks
    return None


def _ranks_of(state: SavesState, found: Standing) -> tuple[int, ...]:
    """All of them, if all are in memory; those that are left, if they have every shard of a committed one; or none."""
    if found.is_held(1):
        return tuple(range(found.world_size))
    world = state.worlds.get(found.checkpoint.life)
    if found.checkpoint != state.committed or world is None or not found.in_memory:
        return ()
    return tuple(sorted(found.holders)) if covers(world, found.holders) else ()


def _last_step(state: SavesState, checkpoint: CheckpointId) -> int:
    """The step from which `store_every` counts: the last one in storage, or the one that the line began with."""
    if state.durable is not None and line_of(state.durable) == line_of(checkpoint):
        return state.durable.step
    answer = None if state.choice is None else state.choice.chosen
    restored = None if answer is None else answer.checkpoint
    known = [each.step for each in (state.durable, restored) if each is not None and each.step <= checkpoint.step]
    return max(known, default=-1)


# --- the drain that is under way -------------------------------------------------------------------------------------


def _begin(state: SavesState, now: Instant) -> SavesState:
    if state.drain is not None or not _has_store(state) or now < (_retry_at(state) or now):
        return state
    wanted = _next(state, now)
    if wanted is None or not is_due(state, wanted[0], now):
        return state
    checkpoint, ranks = wanted
    writers = _writers(state, checkpoint, ranks, {})
    if writers is None:
        return state
    if lacking := _lack_of_room(state, checkpoint, ranks):
        return _failed(state, lacking, lasting=False, now=now)
    begun = Draining(
        number=state.version + 1, checkpoint=checkpoint, since=now, ranks=ranks, writers=writers, moved_at=now
    )
    return msgspec.structs.replace(state, drain=begun, drained_at=now)


def _writers(
    state: SavesState, checkpoint: CheckpointId, ranks: Iterable[int], before: Mapping[NodeId, tuple[int, ...]]
) -> dict[NodeId, tuple[int, ...]] | None:
    """Who writes each rank's part: who did so before, its own node, or whoever has a replica. None: nobody has one."""
    holders = standing(state, checkpoint).holders
    assigned = {rank: node for node, several in before.items() for rank in several}
    writers: dict[NodeId, list[int]] = {}
    for rank in ranks:
        able = [node for node in holders.get(rank, ()) if state.reports[node].store]
        if not able:
            return None
        own = [node for node in able if rank in _ranks_on(state, node)]
        node = next((node for node in able if assigned.get(rank) == node), (own or able)[0])
        writers.setdefault(node, []).append(rank)
    return {node: tuple(several) for node, several in sorted(writers.items())}


def _ranks_on(state: SavesState, node: NodeId) -> set[int]:
    report = state.reports[node]
    return {*report.ranks, *(each.rank for each in report.attached)}


def _committer(state: SavesState, drain: Draining) -> NodeId:
    """Rank 0's node, which knows what is in storage; where it is gone, its stand-in."""
    here = present(state)
    first = next((node for node in sorted(here) if 0 in _ranks_on(state, node)), None)
    return first or stand_in(state) or min(drain.writers or here or state.reports)


def _lack_of_room(state: SavesState, checkpoint: CheckpointId, ranks: tuple[int, ...]) -> str:
    """Why it will not fit, with the arithmetic; empty: it will, as far as anybody knows."""
    free = min((r.free_store for r in present(state).values() if r.free_store is not None), default=None)
    needed = bytes_of(state, checkpoint, ranks)
    if free is None or needed <= free:
        return ""
    store = next(report.store for report in present(state).values() if report.store)
    return (
        f"the next checkpoint takes {needed / 2**20:.1f} MiB in the store {store}, where {free / 2**20:.1f} MiB are"
        " free; free some space on it"
    )


def bytes_of(state: SavesState, checkpoint: CheckpointId, ranks: Iterable[int]) -> Bytes:
    """What it takes in storage: replicas have the same shards, which are written once."""
    wanted = set(ranks)
    helds = [held for several in state.copies.get(checkpoint, {}).values() for held in several if held.rank in wanted]
    by_shards: dict[str, Bytes] = {}
    for held in helds:
        by_shards[held.shards] = max(by_shards.get(held.shards, 0), held.nbytes)
    return sum(by_shards.values())


def _follow(state: SavesState, now: Instant) -> SavesState:
    """Take in what nodes tell of it; give it up where it has failed, cannot become whole, or does not get on."""
    drain = state.drain
    if drain is None:
        return state
    reports = state.reports.values()
    failure = _failure(state, drain)
    if failure is not None:
        return _failed(state, failure.why, lasting=failure.lasting, now=now)
    parts = (part for report in reports for part in report.parts if part.number == drain.number)
    written = drain.written | {rank for part in parts for rank in part.ranks}
    nbytes = sum(report.drain_bytes for report in reports)
    moved_at = now if (written, nbytes) != (drain.written, drain.nbytes) else drain.moved_at
    if now >= moved_at + DRAIN_PATIENCE:
        return _failed(state, f"nothing has got into the store for {DRAIN_PATIENCE:g} s", lasting=False, now=now)
    awaited = [rank for rank in drain.ranks if rank not in written]
    writers = _writers(state, drain.checkpoint, awaited, drain.writers)
    if writers is None:
        if is_gathered(state, now):
            return msgspec.structs.replace(state, drain=None)  # a part that was awaited is in no memory any more
        writers = dict(drain.writers)
    drain = msgspec.structs.replace(drain, written=written, nbytes=nbytes, moved_at=moved_at, writers=writers)
    return state if drain == state.drain else msgspec.structs.replace(state, drain=drain)


def _failure(state: SavesState, drain: Draining) -> DrainFailure | None:
    failures = [report.drain_failure for report in state.reports.values() if report.drain_failure is not None]
    mine = [failure for failure in failures if failure.number == drain.number]
    return max(mine, key=lambda failure: failure.lasting, default=None)


def _failed(state: SavesState, why: str, *, lasting: bool, now: Instant) -> SavesState:
    before = state.problem
    problem = StoreProblem(
        why=why,
        lasting=lasting,
        since=now if before is None else before.since,
        failed_at=now,
        tries=1 if before is None else before.tries + 1,
    )
    return msgspec.structs.replace(state, drain=None, problem=problem)


def _retry_at(state: SavesState) -> Instant | None:
    """When it may be tried again; None: nothing has failed, or somebody waits who has not seen it fail."""
    problem = state.problem
    if problem is None or (state.awaited_since is not None and state.awaited_since > problem.failed_at):
        return None
    longest = URGENT_RETRY if is_urgent(state) else LONGEST_RETRY
    return problem.failed_at + min(FIRST_RETRY * 2.0 ** min(problem.tries - 1, 16), longest)


def _note_durable(state: SavesState, now: Instant) -> SavesState:
    newest = max((each for each in stored(state) if line_of(each) <= state.line), default=None)
    if newest is not None and (state.durable is None or newest > state.durable):
        state = msgspec.structs.replace(state, durable=newest)
        if state.noticed and line_of(newest) == state.line and newest.step >= (state.once or 0):
            state = msgspec.structs.replace(state, noticed=False)
    drain = state.drain
    if drain is None or drain.checkpoint not in stored(state):
        return state
    costs = msgspec.structs.replace(state.costs, drain=smoothed(state.costs.drain, now - drain.since))
    return msgspec.structs.replace(state, drain=None, problem=None, costs=costs)


# --- those who wait --------------------------------------------------------------------------------------------------


def _note_waiting(state: SavesState, now: Instant) -> SavesState:
    waits = any(report.flushing for report in present(state).values())
    since = None if not waits else now if state.awaited_since is None else state.awaited_since
    return state if since == state.awaited_since else msgspec.structs.replace(state, awaited_since=since)


def _told_at(state: SavesState, since: Instant) -> Instant:
    """When failures have lasted for long enough to tell those who wait since `since`."""
    return max(since, since if state.problem is None else state.problem.since) + FLUSH_PATIENCE


def _why_unstorable(state: SavesState, now: Instant) -> str:
    """Why those who wait need not wait any longer; empty: they do, or nobody waits."""
    since, problem = state.awaited_since, state.problem
    if since is None:
        return ""
    if problem is not None and problem.failed_at >= since:
        return problem.why if problem.lasting or now >= _told_at(state, since) else ""
    all_wait = all(each.flushing for each in attachments(state).values())
    if state.drain is not None or not all_wait or now < since + FLUSH_PATIENCE or _next(state, now) is not None:
        return ""
    newest = state.committed
    if newest is None or (state.durable is not None and state.durable >= newest):
        return ""
    lost = standing(state, newest).lost
    return f"not all of {newest} is in memory any more (no copy of rank {', '.join(map(str, lost[:8]))})"
