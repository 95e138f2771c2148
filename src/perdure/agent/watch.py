"""What an agent tells of its running workers: steps begun, caught up, saved; stopped or stalled. Pure.

It speaks once of each thing in each life; what is done about it is decided by control.
"""

import msgspec

from perdure.agent.progress import is_stopped, stall
from perdure.agent.state import (
    UNSENT,
    AgentAction,
    AgentState,
    Step,
    Tell,
    WorkerState,
    changed,
    generation_of,
)
from perdure.vocab.event import CaughtUp, SavePassed, StepsBegun, WorkerStalled, WorkerStopped
from perdure.vocab.units import Instant
from perdure.wire.messages import Orders


def tell_steps(state: AgentState, now: Instant) -> Step:
    orders = state.orders
    assert orders is not None
    generation = generation_of(state)
    workers = state.of(generation)
    if generation == 0 or len(workers) < state.slots:
        return state, []
    actions: list[AgentAction] = []
    steps = [w.progress.step for w in workers if w.progress.step is not None]
    all_step = len(steps) == len(workers) and all(w.progress.has_stepped for w in workers)
    if all_step and state.begun < generation:
        state = msgspec.structs.replace(state, begun=generation)
        event = StepsBegun(id=UNSENT, at=now, node=state.node, generation=generation, step=min(steps))
        actions.append(Tell(event))
    tells = all(w.progress.tells for w in workers)
    redo = orders.redo_until
    # Steps that are only counted begin at 1 in every life: nobody can say which of them were done before.
    is_past = (redo is not None and min(steps, default=0) >= redo) if tells else orders.restarts > 0
    if all_step and is_past and state.caught_up < generation:
        state = msgspec.structs.replace(state, caught_up=generation)
        actions.append(Tell(CaughtUp(id=UNSENT, at=now, node=state.node, generation=generation, step=min(steps))))
    saves = max((w.progress.reading.saves for w in workers if w.progress.reading is not None), default=0)
    if saves > state.saves:
        state = msgspec.structs.replace(state, saves=saves)
        step = max(steps, default=0)
        actions.append(Tell(SavePassed(id=UNSENT, at=now, node=state.node, generation=generation, step=step)))
    return state, actions


def watch(state: AgentState, now: Instant) -> Step:
    """Say once of each life that it is stopped or stalled."""
    orders = state.orders
    assert orders is not None
    actions: list[AgentAction] = []
    for worker in state.alive():
        if worker.generation != generation_of(state) or worker.killed_at is not None:
            continue
        state, more = _watch_one(state, worker, orders, now)
        actions.extend(more)
    return state, actions


def _watch_one(state: AgentState, worker: WorkerState, orders: Orders, now: Instant) -> Step:
    progress = worker.progress
    common = {
        "id": UNSENT,
        "at": now,
        "node": state.node,
        "generation": worker.generation,
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "pid": worker.pid,
        "step": progress.step,
    }
    if is_stopped(progress, now, orders.stalls) and not progress.told_stopped:
        told = msgspec.structs.replace(progress, told_stopped=True)
        stopped_for = now - (progress.stopped_since or now)
        event = msgspec.convert({**common, "kind": "worker_stopped", "stopped_for": stopped_for}, WorkerStopped)
        return changed(state, worker, progress=told), [Tell(event)]
    limit = stall(progress, worker.state_letter, now, orders.stalls)
    if limit is not None and not progress.told_stalled:
        told = msgspec.structs.replace(progress, told_stalled=True)
        stalled = msgspec.convert(
            {
                **common,
                "kind": "worker_stalled",
                "phase": progress.phase.name.lower(),
                "silent_for": now - progress.since,
                "limit": limit.quiet,
                "limit_source": limit.source,
                "process_state": worker.state_letter,
            },
            WorkerStalled,
        )
        return changed(state, worker, progress=told), [Tell(stalled)]
    return state, []
