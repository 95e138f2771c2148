"""An agent's decisions: `act` says what follows from the state now. Pure; each action is asked for once."""

import msgspec

from perdure.agent.state import (
    EXIT_FENCED,
    SIGKILL,
    SIGTERM,
    STOP_GRACE,
    UNSENT,
    AgentAction,
    AgentState,
    AskPeers,
    EndStore,
    Exit,
    Signal,
    StartStore,
    StartWorkers,
    Step,
    StopAfter,
    StoreState,
    Tell,
    WorkerState,
    bound_until,
    changed,
    fence,
    generation_of,
)
from perdure.agent.watch import tell_steps, watch
from perdure.vocab.event import (
    DrainAcked,
    MemoryEvidence,
    NodeFenced,
    NodeGathered,
    WorkerError,
    WorkerExited,
    WorkersStarted,
    WorkerUnkillable,
)
from perdure.vocab.generation import Assignment
from perdure.vocab.units import Instant, show_duration
from perdure.wire.messages import Beat, Duty, Orders

PACE_SECONDS = 0.5
"""Steps that have not shown their pace for as long are slow enough to be stopped at without it."""


def act(state: AgentState, now: Instant) -> tuple[AgentState, tuple[AgentAction, ...]]:
    """Everything that is to be done now; the state remembers that it was asked for."""
    if state.exiting or state.orders is None:
        return state, ()
    actions: list[AgentAction] = []
    for rule in (
        _fence_when_alone,
        _end_workers,
        _end_store,
        _start_store,
        _gather,
        _start,
        _drain,
        tell_steps,
        watch,
    ):
        state, more = rule(state, now)
        actions.extend(more)
    state, more = _exit(state, now)
    return state, (*actions, *more)


def beat(state: AgentState) -> Beat:
    """What to say of the workers in a report."""
    workers = state.of(generation_of(state))
    seconds = [s for w in workers if (s := w.progress.step_seconds()) is not None]
    return Beat(
        generation=generation_of(state),
        steps=tuple(-1 if w.progress.step is None else w.progress.step for w in workers),
        step_seconds=max(seconds, default=None),
        tells=bool(workers) and all(w.progress.tells for w in workers),
    )


# --- leases ----------------------------------------------------------------------------------------------------------


def _fence_when_alone(state: AgentState, now: Instant) -> Step:
    """Ask the peers when control is silent; end this life when nobody can tell that it has not been replaced."""
    assert state.orders is not None
    lease = state.orders.rules.lease
    if state.fenced is not None or not (state.alive() or state.launching):
        return state, []
    silent = now - max(state.contact, state.peers_ok)
    if silent > lease:
        reason = f"neither control nor a majority of its peers was reached for {show_duration(silent)}"
        event = NodeFenced(id=UNSENT, at=now, node=state.node, generation=state.orders.generation, silent_for=silent)
        return fence(state, reason), [Tell(event)]
    if now - state.contact > lease / 2 and now - state.peers_asked > lease / 5:
        return msgspec.structs.replace(state, peers_asked=now), [AskPeers()]
    return state, []


# --- ending ----------------------------------------------------------------------------------------------------------


def _end_workers(state: AgentState, now: Instant) -> Step:
    """End every worker that is not of the ordered generation; of one that outlives SIGKILL, say so once."""
    assert state.orders is not None
    wanted = generation_of(state)
    gently = state.orders.duty is Duty.STOP and state.fenced is None and not state.orders.at_once
    actions: list[AgentAction] = []
    ask, kill = [], []
    for worker in state.alive():
        if worker.generation == wanted:
            continue
        if worker.killed_at is not None:
            state, more = _outlived(state, worker, now)
            actions.extend(more)
        elif gently and worker.asked_at is None and worker.progress.stopped_since is None:
            state = changed(state, worker, asked_at=now)
            ask.append(worker.pid)
        elif not gently or now - (worker.asked_at or 0.0) >= STOP_GRACE:
            state = _remember_step(changed(state, worker, killed_at=now), worker)
            kill.append(worker.pid)
    if ask:
        actions.append(Signal(tuple(ask), SIGTERM))
    if kill:
        actions.append(Signal(tuple(kill), SIGKILL))
    return state, actions


def _remember_step(state: AgentState, worker: WorkerState) -> AgentState:
    step = worker.progress.step
    if step is None or not worker.progress.tells or (state.last_step is not None and step <= state.last_step):
        return state
    return msgspec.structs.replace(state, last_step=step)


def _outlived(state: AgentState, worker: WorkerState, now: Instant) -> Step:
    assert state.orders is not None and worker.killed_at is not None
    waited = now - worker.killed_at
    if waited < state.orders.stalls.unkillable_after:
        return state, []
    event = WorkerUnkillable(
        id=UNSENT,
        at=now,
        node=state.node,
        generation=state.orders.generation,
        rank=worker.rank,
        pid=worker.pid,
        waited=waited,
        process_state=worker.state_letter,
    )
    return changed(state, worker, abandoned=True), [Tell(event)]


def _end_store(state: AgentState, now: Instant) -> Step:
    store = state.store
    if store is None or store.pid is None or store.ending or store.generation == generation_of(state):
        return state, []
    return msgspec.structs.replace(state, store=msgspec.structs.replace(store, ending=True)), [EndStore(store.pid)]


def _exit(state: AgentState, now: Instant) -> Step:
    assert state.orders is not None
    if state.alive() or state.launching or (state.fenced is None and state.orders.duty is not Duty.STOP):
        return state, []
    if state.fenced is not None:
        action = Exit(EXIT_FENCED, state.fenced)
    else:
        action = Exit(0, "the job has ended")
    return msgspec.structs.replace(state, exiting=True), [action]


def worker_ended(
    state: AgentState,
    pid: int,
    *,
    exit_code: int | None,
    signal: int | None,
    error: WorkerError | None,
    memory: MemoryEvidence | None,
    log_tail: str,
    now: Instant,
) -> Step:
    """Take in the end of a worker; it is told unless we ended it ourselves."""
    worker = state.workers.get(pid)
    if worker is None or worker.ended:
        return state, []
    state = _remember_step(changed(state, worker, ended=True), worker)
    if worker.killed_at is not None or worker.asked_at is not None:
        return state, []
    event = WorkerExited(
        id=UNSENT,
        at=now,
        node=state.node,
        generation=worker.generation,
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=pid,
        exit_code=exit_code,
        signal=signal,
        step=worker.progress.step,
        error=error,
        memory=memory,
        log_tail=log_tail,
    )
    return state, [Tell(event)]


# --- gathering and starting ------------------------------------------------------------------------------------------


def _hosted(state: AgentState) -> Assignment | None:
    """The assignment whose store this node is to host."""
    orders = state.orders
    if orders is None or generation_of(state) == 0 or orders.assignment is None:
        return None
    return orders.assignment if orders.assignment.store_host == state.node else None


def _start_store(state: AgentState, now: Instant) -> Step:
    hosted = _hosted(state)
    if hosted is None or not state.ready or (state.store is not None and state.store.generation >= hosted.number):
        return state, []
    if state.orders is not None and state.orders.duty is not Duty.GATHER:
        return state, []
    if state.store is not None and state.store.pid is None:
        return state, []  # the one of an earlier generation is still being started; it comes first
    waiting = msgspec.structs.replace(state, store=StoreState(generation=hosted.number))
    return waiting, [StartStore(hosted.number)]


def _gather(state: AgentState, now: Instant) -> Step:
    orders = state.orders
    assert orders is not None
    if orders.duty is not Duty.GATHER or generation_of(state) == 0 or state.gathered >= orders.generation:
        return state, []
    if state.alive() or state.launching or now <= bound_until(state):
        return state, []
    address = None
    if _hosted(state) is not None:
        if state.store is None or state.store.generation != orders.generation or state.store.address is None:
            return state, []
        address = state.store.address
    event = NodeGathered(
        id=UNSENT,
        at=now,
        node=state.node,
        generation=orders.generation,
        store=address,
        last_step=state.last_step,
    )
    kept = {pid: w for pid, w in state.workers.items() if w.abandoned}
    return msgspec.structs.replace(state, gathered=orders.generation, workers=kept), [Tell(event)]


def _start(state: AgentState, now: Instant) -> Step:
    """Start the ranks once; tell when all are up."""
    orders = state.orders
    assert orders is not None
    if orders.duty is not Duty.RUN or generation_of(state) == 0:
        return state, []
    # Late orders of a node that has been cut off meanwhile start nothing: it may have been replaced.
    in_touch = now - max(state.contact, state.peers_ok) <= orders.rules.lease
    may_start = state.ready and in_touch and not state.alive() and not state.launching
    if may_start and state.starting < orders.generation:
        fresh = msgspec.structs.replace(state, starting=orders.generation, launching=True, saves=0)
        return fresh, [StartWorkers(orders)]
    workers = state.of(orders.generation)
    if state.up < orders.generation and state.starting == orders.generation and len(workers) == state.slots:
        event = WorkersStarted(
            id=UNSENT,
            at=now,
            node=state.node,
            generation=orders.generation,
            pids=tuple(w.pid for w in workers),
            forked=all(w.forked for w in workers),
        )
        return msgspec.structs.replace(state, up=orders.generation), [Tell(event)]
    return state, []


# --- draining --------------------------------------------------------------------------------------------------------


def _drain(state: AgentState, now: Instant) -> Step:
    orders = state.orders
    assert orders is not None
    if orders.drain is None or orders.duty is not Duty.RUN or generation_of(state) == 0:
        return state, []
    if orders.drain.forward and state.forwarded < orders.generation:
        pids = tuple(w.pid for w in state.alive())
        return msgspec.structs.replace(state, forwarded=orders.generation), [Signal(pids, orders.drain.signal)]
    if orders.drain.stop_after is not None and state.stop_after != orders.drain.stop_after:
        return (
            msgspec.structs.replace(state, stop_after=orders.drain.stop_after),
            [StopAfter(orders.drain.stop_after)],
        )
    if state.drain_seen is None:
        state = msgspec.structs.replace(state, drain_seen=now)
    if state.acked_drain < orders.generation and _knows_pace(state, now):
        return msgspec.structs.replace(state, acked_drain=orders.generation), [Tell(_drain_ack(state, orders, now))]
    return state, []


def _knows_pace(state: AgentState, now: Instant) -> bool:
    """Whether an answer would say how fast the steps go: where it is not known yet it is waited for a moment."""
    said = beat(state)
    return not said.tells or said.step_seconds is not None or now - (state.drain_seen or now) >= PACE_SECONDS


def _drain_ack(state: AgentState, orders: Orders, now: Instant) -> DrainAcked:
    said = beat(state)
    return DrainAcked(
        id=UNSENT,
        at=now,
        node=state.node,
        generation=orders.generation,
        tells=said.tells,
        last_step=max(said.steps, default=-1),
        step_seconds=said.step_seconds,
    )
