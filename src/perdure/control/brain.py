"""Control's decisions: `step` takes what has happened and gives the new state and the records to append. Pure.

Decisions are made from the state (level-triggered), never from the arrival of a message, so a control that has
replayed its log goes on where the one before it stopped. It knows no sockets, no leases and no clock but `now`.
"""

from collections.abc import Sequence

from perdure.control.state import FaultEvent, GenerationState, State, fold
from perdure.playbook.diagnose import diagnose, is_lost_peer
from perdure.playbook.parse import Catalogue
from perdure.policy import placement
from perdure.policy.draining import stop_after
from perdure.policy.recovery import recover, without_nodes
from perdure.ports import LogRecord
from perdure.vocab.decision import AnyAction, Begin, Decision, Drain, Finish, GiveUp, Grow
from perdure.vocab.event import (
    AnyEvent,
    GenerationBegan,
    GenerationRunning,
    JobEnded,
    NodeLeft,
    NodeLost,
    StopRequested,
    TimePassed,
    WorkerExited,
)
from perdure.vocab.fault import Diagnosis, Scope
from perdure.vocab.generation import Phase
from perdure.vocab.ids import ActionId, EventId, GenerationNumber, NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Instant, show_duration

ECHO_SECONDS = 0.3
"""How long a lost-peer error waits for its cause: measured, the cause's own exit is reported within 0.1 s."""
PREFER_MEMBERS_SECONDS = 2.0
"""How long the start waits for nodes that were not started as spares, when spares could already take their place."""
GROW_UNTOLD_SECONDS = 30.0
"""How long a generation that tells no steps runs before it is interrupted to take more nodes in."""
EXIT_INCOMPLETE = 3


def step(
    state: State, events: Sequence[AnyEvent], now: Instant, catalogue: Catalogue
) -> tuple[State, tuple[LogRecord, ...]]:
    """The state after `events` and after every decision that they, or the time, call for; and all records to append.

    Events that the state has acknowledged already are dropped, so repeating a message is harmless.
    """
    records: list[LogRecord] = []
    for event in events:
        if not _is_repeated(state, event):
            state = fold(state, event)
            records.append(event)
    while True:
        made = _decide(state, now, catalogue)
        if not made:
            return state, tuple(records)
        for record in made:
            state = fold(state, record)
        records.extend(made)


def next_deadline(state: State) -> Instant | None:
    """When `step` should be called at the latest although nothing happens; None: no deadline."""
    if state.ended is not None or state.spec is None:
        return None
    rules = state.spec.rules
    times: list[Instant] = []
    if state.generation is None and state.hold is None:
        times.append(_join_deadline(state))
        times.append(state.began_at + rules.last_call)
        times.extend(k.joined_at + PREFER_MEMBERS_SECONDS for k in state.nodes.values() if k.is_fit)
        times.extend(k.joined_at + rules.last_call for k in state.nodes.values() if k.is_fit)
    if state.hold is not None:
        times.append(state.hold.until)
    if state.unanswered:
        times.append(min(_due(state, event) for event in state.unanswered))
    if state.draining is not None and state.draining.order is not None:
        times.append(state.draining.order.until)
    return min(times, default=None)


def _is_repeated(state: State, event: AnyEvent) -> bool:
    node, _, rest = event.id.partition("/")
    incarnation, _, seq = rest.rpartition("/")
    known = state.nodes.get(NodeId(node))
    if known is None or not seq.isdigit():
        return False
    return str(known.node.incarnation) == incarnation and int(seq) <= known.acked


# --- one round of decisions: the first that applies -------------------------------------------------------------------


def _decide(state: State, now: Instant, catalogue: Catalogue) -> tuple[LogRecord, ...]:
    if state.ended is not None or state.spec is None:
        return ()
    if state.draining is not None:
        return _drain(state, state.spec, now)
    if state.generation is None:
        return _hold(state, state.spec, now) if state.hold is not None else _assemble(state, state.spec, now)
    return (
        _finish(state, state.generation, now)
        or _answer(state, state.spec, now, catalogue)
        or _running(state.generation, now)
        or _grow(state, state.spec, state.generation, now)
    )


def _assemble(state: State, spec: JobSpec, now: Instant) -> tuple[LogRecord, ...]:
    """The first generation: as soon as the wanted nodes are warm, after the last call with what is there."""
    ready = [k for k in state.nodes.values() if k.is_fit and k.ready and k.disconnected_at is None]
    ready.sort(key=lambda k: (k.node.standby, k.node.order, k.node.id))
    wanted = [k for k in ready if not k.node.standby]
    first = min((k.joined_at for k in ready), default=now)
    enough = len(wanted) >= spec.max_nodes or (
        len(ready) >= spec.max_nodes and now - first >= PREFER_MEMBERS_SECONDS
    )
    if not enough and len(ready) >= spec.min_nodes:
        newest = max(k.joined_at for k in ready)
        enough = now - newest >= spec.rules.last_call
    if enough:
        nodes = [k.node.id for k in ready][: spec.max_nodes]
        because = f"{len(nodes)} nodes are ready ({spec.min_nodes} to {spec.max_nodes} were asked for)"
        return _begin(state, spec, nodes, now, _cause(state), because)
    if now >= _join_deadline(state):
        present = sum(k.is_fit for k in state.nodes.values())
        reason = (
            f"{present} of at least {spec.min_nodes} nodes joined within {show_duration(spec.rules.join_timeout)}"
            " (--rdzv-conf join_timeout)"
        )
        return _end_by_deadline(state, now, "join", reason)
    return ()


def _join_deadline(state: State) -> Instant:
    assert state.spec is not None
    return state.began_at + state.spec.rules.join_timeout


def _hold(state: State, spec: JobSpec, now: Instant) -> tuple[LogRecord, ...]:
    """Begin again as soon as enough nodes are there; give up at the deadline."""
    assert state.hold is not None and state.previous is not None
    back = [node for node in state.previous.nodes if node in state.fit and state.nodes[node].disconnected_at is None]
    nodes = [*back, *state.spares()][: spec.max_nodes]
    if len(nodes) >= spec.min_nodes:
        return _begin(state, spec, nodes, now, _cause(state), f"{len(nodes)} nodes are there again")
    if now >= state.hold.until:
        reason = (
            f"the job was held for {show_duration(spec.rules.hold)} (--hold), and {state.hold.lacking} node(s) are still missing"
        )
        return _end_by_deadline(state, now, "hold", reason)
    return ()


def _begin(
    state: State, spec: JobSpec, nodes: Sequence[NodeId], now: Instant, answers: EventId, because: str
) -> tuple[LogRecord, ...]:
    number = GenerationNumber(state.number + 1)
    before = state.previous
    if before is not None:
        assignment = placement.resize(number, before, nodes, spec.workers_per_node)
    else:
        assignment = placement.assign(number, nodes, spec.workers_per_node)
    action = Begin(id=ActionId(f"1-{number}-{answers}"), assignment=assignment)
    return _with_generation(Decision(at=now, answers=answers, because=because, actions=(action,)), action)


def _with_generation(decision: Decision, action: AnyAction) -> tuple[LogRecord, ...]:
    """A decision that makes a generation, and the event that it began."""
    assignment = getattr(action, "assignment", None)
    if assignment is None:
        return (decision,)
    began = GenerationBegan(
        id=EventId(f"control//g{assignment.number}"), at=decision.at, assignment=assignment, because=decision.because
    )
    return decision, began


def _cause(state: State) -> EventId:
    """What a decision about nodes answers: the newest that joined."""
    newest = max(state.nodes.values(), key=lambda k: k.joined_at)
    return EventId(f"join/{newest.node.id}/{newest.node.incarnation}")


def _finish(state: State, generation: GenerationState, now: Instant) -> tuple[LogRecord, ...]:
    world = generation.assignment.world_size
    if generation.phase is not Phase.RUNNING or len(generation.finished) < world:
        return ()
    answers = EventId(f"control//g{generation.number}-done")
    finish = Finish(id=ActionId(f"1-{generation.number}-done"))
    because = f"all {world} ranks have ended with exit code 0"
    decision = Decision(at=now, answers=answers, because=because, actions=(finish,))
    return decision, JobEnded(id=EventId("control//end"), at=now, exit_code=0, reason=because)


# --- faults ----------------------------------------------------------------------------------------------------------


def _answer(state: State, spec: JobSpec, now: Instant, catalogue: Catalogue) -> tuple[LogRecord, ...]:
    due = [event for event in state.unanswered if _due(state, event) <= now]
    if not due:
        return ()
    diagnosis = min(diagnose(due, catalogue), key=_first_to_answer, default=None)
    if diagnosis is None:
        return ()
    answer = without_nodes if diagnosis.fault.scope is Scope.NODE else recover
    decision = answer(state.view(), diagnosis, now, spec.rules)
    for action in decision.actions:
        if isinstance(action, GiveUp):
            ended = JobEnded(id=EventId("control//end"), at=now, exit_code=action.exit_code, reason=action.reason)
            return decision, ended
    return _with_generation(decision, decision.actions[0])


def _first_to_answer(diagnosis: Diagnosis) -> tuple[bool, bool]:
    """A lost node explains what the others say; a lost peer explains nothing. Else the first that came (min is stable)."""
    return diagnosis.fault.scope is not Scope.NODE, diagnosis.fault.id == "worker.peer-lost"


def _due(state: State, event: FaultEvent) -> Instant:
    """When a fault is answered: at once, unless it may be the echo of another that has not been reported yet."""
    if not isinstance(event, WorkerExited) or (event.signal == 9 and event.error is None):
        return event.at
    assert state.spec is not None and state.previous is not None
    away = [state.nodes[n].disconnected_at for n in state.previous.nodes if n in state.nodes and state.nodes[n].present]
    gone = [at for at in away if at is not None]
    if gone:
        return max(event.at, max(gone) + state.spec.rules.reconnect_grace + 0.1)
    return event.at + ECHO_SECONDS if _is_echo(event) else event.at


def _is_echo(event: WorkerExited) -> bool:
    # SIGABRT: gloo's std::terminate and NCCL's watchdog end a process so when a peer goes away.
    return event.signal == 6 or is_lost_peer(event)


def _running(generation: GenerationState, now: Instant) -> tuple[LogRecord, ...]:
    if generation.phase is not Phase.AGREED or not set(generation.assignment.nodes) <= generation.started:
        return ()
    number = generation.number
    return (GenerationRunning(id=EventId(f"control//g{number}-running"), at=now, generation=number),)


# --- growing, draining, ending ----------------------------------------------------------------------------------------


def _grow(state: State, spec: JobSpec, generation: GenerationState, now: Instant) -> tuple[LogRecord, ...]:
    """Take more nodes in, at a checkpoint boundary; at once where the script tells of no checkpoints."""
    lacking = spec.max_nodes - len(generation.assignment.nodes)
    if lacking <= 0 or generation.phase is not Phase.RUNNING or generation.finished or state.unanswered:
        return ()
    joining = tuple(s for s in state.spares() if state.nodes[s].ready)[:lacking]
    if not joining:
        return ()
    members = set(generation.assignment.nodes)
    tells = state.tells_saves
    latest = max(state.nodes[s].joined_at for s in joining)
    if tells and (generation.saved_at or 0.0) < latest:
        return ()
    if not tells and not members <= generation.begun and now - generation.began_at < GROW_UNTOLD_SECONDS:
        return ()  # a generation that has not done its first step is left alone
    number = GenerationNumber(state.number + 1)
    answers = _cause(state)
    action = Grow(
        id=ActionId(f"1-{number}-{answers}"),
        assignment=placement.resize(
            number, generation.assignment, [*generation.assignment.nodes, *joining], spec.workers_per_node
        ),
        joined=joining,
    )
    moment = "a checkpoint has just been saved" if tells else "the script tells of no checkpoints to wait for"
    because = f"{', '.join(joining)} can take part, and {moment}"
    return _with_generation(Decision(at=now, answers=answers, because=because, actions=(action,)), action)


def _drain(state: State, spec: JobSpec, now: Instant) -> tuple[LogRecord, ...]:
    """Ask where the workers stand, name the step to stop at (or forward the signal), end when all have ended."""
    assert state.draining is not None
    request, order, generation = state.draining.request, state.draining.order, state.generation
    until = request.at + request.grace
    if generation is None or request.grace <= 0:
        return _end_stopped(state, now, f"stopped by {request.by}")
    done = _ended_ranks(state, generation)
    if len(done) >= generation.assignment.world_size or now >= until:
        how = "all workers have ended" if now < until else f"{show_duration(request.grace)} were over (--shutdown-timeout)"
        return _end_stopped(state, now, f"stopped by {request.by}; {how}")
    if order is None:
        ask = Drain(id=ActionId(f"1-{generation.number}-drain"), until=until, signal=request.signal)
        return (Decision(at=now, answers=request.id, because=f"{request.by}: save and end", actions=(ask,)),)
    if order.stop_after is None and not order.forward:
        return _name_stop(generation, request, until, now)
    return ()


def _name_stop(
    generation: GenerationState, request: StopRequested, until: Instant, now: Instant
) -> tuple[LogRecord, ...]:
    acks = {ack.node: ack for ack in generation.acks}
    silent = set(generation.assignment.nodes) - set(acks)
    if silent and now < request.at + min(1.0, request.grace / 2):
        return ()
    identity = ActionId(f"1-{generation.number}-drain-2")
    if not silent and all(ack.tells for ack in acks.values()):
        last = stop_after([a.last_step for a in acks.values()], [a.step_seconds for a in acks.values()])
        order = Drain(id=identity, until=until, signal=request.signal, stop_after=last)
        because = f"all ranks tell their steps, so all end after step {last}"
    else:
        order = Drain(id=identity, until=until, signal=request.signal, forward=True)
        because = "the script does not tell its steps, so the signal goes to the workers"
    return (Decision(at=now, answers=request.id, because=because, actions=(order,)),)


def _ended_ranks(state: State, generation: GenerationState) -> set[int]:
    gone = {e.rank for e in state.unanswered if isinstance(e, WorkerExited)}
    lost = {e.node for e in state.unanswered if isinstance(e, NodeLost | NodeLeft)}
    ranks = {r for m in generation.assignment.members if m.node in lost for r in m.ranks}
    return set(generation.finished) | gone | ranks


def _end_stopped(state: State, now: Instant, reason: str) -> tuple[LogRecord, ...]:
    return (JobEnded(id=EventId("control//end"), at=now, exit_code=EXIT_INCOMPLETE, reason=reason),)


def _end_by_deadline(state: State, now: Instant, deadline: str, reason: str) -> tuple[LogRecord, ...]:
    passed = TimePassed(id=EventId(f"control//{deadline}-{state.version}"), at=now, deadline=deadline)
    give_up = GiveUp(id=ActionId(f"1-{state.number}-{deadline}"), exit_code=1, reason=reason)
    decision = Decision(at=now, answers=passed.id, because=reason, actions=(give_up,))
    return passed, decision, JobEnded(id=EventId("control//end"), at=now, exit_code=1, reason=reason)
