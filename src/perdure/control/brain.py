"""Control's decisions: `step` takes what has happened and gives the new state and the records to append. Pure.

Decisions are made from the state (level-triggered), never from the arrival of a message, so a control that has
replayed its log goes on where the one before it stopped. It knows no sockets, no leases and no clock but `now`.
"""

from collections.abc import Iterator, Sequence

from perdure.control.draining import acks_until, drain
from perdure.control.ending import end, wait, wait_until
from perdure.control.fold import SAVE_ROUND, fold
from perdure.control.state import FaultEvent, GenerationState, NodeState, State
from perdure.playbook.diagnose import diagnose, is_lost_peer
from perdure.playbook.parse import Catalogue
from perdure.policy import placement
from perdure.policy.recovery import recover, without_nodes
from perdure.ports import LogRecord
from perdure.vocab.decision import AnyAction, Begin, Decision, Finish, GiveUp, Grow, Quarantine
from perdure.vocab.event import (
    AnyEvent,
    GenerationBegan,
    GenerationRunning,
    TimePassed,
    WorkerExited,
    WorkerStalled,
    WorkerUnkillable,
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
STALL_MARGIN = 1.0
"""Beyond the lease: control's own margin (0.5 s) and the way of the news."""


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


def next_deadline(state: State, now: Instant = 0.0) -> Instant | None:
    """When `step` should be called at the latest although nothing happens; None: no deadline.

    Deadlines up to `now` are left out: `step` has seen them, and what it did not act on needs an event.
    """
    if state.ended is not None or state.spec is None:
        return None
    return min((at for at in _deadlines(state, state.spec) if at > now), default=None)


def _deadlines(state: State, spec: JobSpec) -> Iterator[Instant]:
    """Every moment at which `_decide` may decide something else than before."""
    generation = state.generation
    if state.ending is not None:
        yield wait_until(state, state.ending)
    elif state.draining is not None:
        request = state.draining.request
        yield request.at + request.grace
        yield acks_until(request)
    elif generation is None and state.hold is None:
        yield _join_deadline(state)
        for known in state.nodes.values():
            yield known.ready_at + PREFER_MEMBERS_SECONDS
            yield known.ready_at + spec.rules.last_call
    elif state.hold is not None:
        yield state.hold.until
    elif generation is not None:
        for event in state.unanswered:
            yield _due(state, event)
        yield generation.began_at + GROW_UNTOLD_SECONDS
        if generation.saved_at is not None:
            yield generation.saved_at + SAVE_ROUND


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
    if state.ending is not None:
        return wait(state, now)
    if state.draining is not None:
        return drain(state, now)
    outside = _quarantine_outsider(state, now, catalogue)
    if outside:
        return outside
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
    enough = len(wanted) >= spec.max_nodes
    if not enough and len(ready) >= spec.max_nodes:
        enough = now >= sorted(k.ready_at for k in ready)[spec.max_nodes - 1] + PREFER_MEMBERS_SECONDS
    if not enough and len(ready) >= spec.min_nodes:
        enough = now >= max(k.ready_at for k in ready) + spec.rules.last_call
    if enough:
        chosen = ready[: spec.max_nodes]
        because = f"{len(chosen)} nodes are ready ({spec.min_nodes} to {spec.max_nodes} were asked for)"
        return _begin(state, spec, [k.node.id for k in chosen], now, _newest(chosen).came, because)
    if now >= _join_deadline(state):
        present = len(state.fit)
        warm = f", {len(ready)} of them ready to work" if len(ready) < present else ""
        reason = (
            f"{present} of at least {spec.min_nodes} nodes joined within {show_duration(spec.rules.join_timeout)}{warm}"
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
        answers = _newest([state.nodes[node] for node in nodes]).came
        return _begin(state, spec, nodes, now, answers, f"{len(nodes)} nodes are there again")
    if now >= state.hold.until:
        lacking = spec.min_nodes - len(nodes)
        reason = (
            f"the job was held for {show_duration(spec.rules.hold)} (--hold), and {lacking} node(s) are still missing"
        )
        return _end_by_deadline(state, now, "hold", reason)
    return ()


def _begin(
    state: State, spec: JobSpec, nodes: Sequence[NodeId], now: Instant, answers: EventId, because: str
) -> tuple[LogRecord, ...]:
    number = GenerationNumber(state.number + 1)
    before = state.previous
    if before is not None:
        assignment = placement.with_nodes(number, before, nodes, spec.workers_per_node)
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


def _newest(nodes: Sequence[NodeState]) -> NodeState:
    """The one that became usable last: what a decision about nodes answers."""
    return max(nodes, key=lambda k: k.came_version)


def _finish(state: State, generation: GenerationState, now: Instant) -> tuple[LogRecord, ...]:
    world = generation.assignment.world_size
    if generation.phase is not Phase.RUNNING or len(generation.finished) < world:
        return ()
    answers = generation.finished_by
    finish = Finish(id=ActionId(f"1-{generation.number}-done"))
    because = f"all {world} ranks have ended with exit code 0"
    decision = Decision(at=now, answers=answers, because=because, actions=(finish,))
    return decision, *end(state, now, 0, because)


# --- faults ----------------------------------------------------------------------------------------------------------


def _answer(state: State, spec: JobSpec, now: Instant, catalogue: Catalogue) -> tuple[LogRecord, ...]:
    due = sorted((event for event in state.unanswered if _due(state, event) <= now), key=lambda event: event.at)
    diagnosis = min(diagnose(due, catalogue), key=_first_to_answer, default=None)
    if diagnosis is None:
        return ()
    answer = without_nodes if diagnosis.fault.scope is Scope.NODE else recover
    decision = answer(state.view(), diagnosis, now, spec.rules)
    for action in decision.actions:
        if isinstance(action, GiveUp):
            return decision, *end(state, now, action.exit_code, action.reason)
    return _with_generation(decision, decision.actions[0])


def _quarantine_outsider(state: State, now: Instant, catalogue: Catalogue) -> tuple[LogRecord, ...]:
    """A node outside the current world keeps a worker that cannot be killed: set it aside, and disturb nobody."""
    members = state.generation.assignment.nodes if state.generation is not None else ()
    for event in state.unanswered:
        if isinstance(event, WorkerUnkillable) and event.node not in members:
            (diagnosis,) = diagnose([event], catalogue)
            action = Quarantine(
                id=ActionId(f"1-{state.number}-{event.id}-quarantine"), node=event.node, reason=diagnosis.what
            )
            because = f"{diagnosis.fault.title.lower()}; {event.node} has no part in the current world and gets none"
            decision = Decision(at=now, answers=event.id, because=because, actions=(action,), diagnosis=diagnosis)
            return (decision,)
    return ()


def _first_to_answer(diagnosis: Diagnosis) -> tuple[bool, bool]:
    """A lost node explains what the others say; a lost peer explains nothing. Else the first that happened."""
    return diagnosis.fault.scope is not Scope.NODE, diagnosis.fault.id == "worker.peer-lost"


def _due(state: State, event: FaultEvent) -> Instant:
    """When a fault is answered: at once, unless it may be the echo of another that has not been reported yet."""
    if isinstance(event, WorkerStalled):
        return _stall_due(state, event)
    if not isinstance(event, WorkerExited) or (event.signal == 9 and event.error is None):
        return event.at
    assert state.spec is not None and state.previous is not None
    away = [state.nodes[n].disconnected_at for n in state.previous.nodes if n in state.nodes and state.nodes[n].present]
    gone = [at for at in away if at is not None]
    if gone:
        return max(event.at, max(gone) + state.spec.rules.reconnect_grace + 0.1)
    return event.at + ECHO_SECONDS if _is_echo(event) else event.at


def _stall_due(state: State, event: WorkerStalled) -> Instant:
    """Not before a lease has passed: a silent node stalls all others, and its loss explains them and takes no budget.

    The ladder of limits is lease < stall limit, but a learned limit may be as short as 2 s.
    """
    assert state.spec is not None
    one_step = event.limit / state.spec.stalls.factor
    return max(event.at, event.at - event.silent_for + one_step + state.spec.rules.lease + STALL_MARGIN)


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
    members = generation.assignment.nodes
    lacking = spec.max_nodes - len(members)
    if lacking <= 0 or generation.phase is not Phase.RUNNING or generation.finished or state.unanswered:
        return ()
    if any(state.nodes[m].disconnected_at is not None or m not in state.fit for m in members):
        return ()  # it will be lost or be back in a moment: one change at a time
    joining = [k for s in state.spares() if (k := state.nodes[s]).ready][:lacking]
    if not joining:
        return ()
    records, answers, moment = _moment_to_grow(state, generation, joining, now)
    if not answers:
        return ()
    number = GenerationNumber(state.number + 1)
    joined = tuple(k.node.id for k in joining)
    assignment = placement.resize(number, generation.assignment, [*members, *joined], spec.workers_per_node)
    action = Grow(id=ActionId(f"1-{number}-{answers}"), assignment=assignment, joined=joined)
    because = f"{', '.join(joined)} can take part, and {moment}"
    decision = Decision(at=now, answers=answers, because=because, actions=(action,))
    return *records, *_with_generation(decision, action)


def _moment_to_grow(
    state: State, generation: GenerationState, joining: Sequence[NodeState], now: Instant
) -> tuple[tuple[LogRecord, ...], EventId, str]:
    """What makes this the moment: records to add first, the event that is answered (empty: not now), and why."""
    if state.tells_saves:
        saved = generation.saved_at
        is_fresh = saved is not None and saved >= max(k.ready_at for k in joining) and now >= saved + SAVE_ROUND
        return (), generation.saved_by if is_fresh else EventId(""), "a checkpoint has just been saved"
    newest = _newest(joining)
    if set(generation.assignment.nodes) <= generation.begun:
        came_last = newest.came_version > generation.begun_version
        answers = newest.came if came_last else generation.begun_by
        return (), answers, "the script tells of no checkpoints to wait for"
    if now < generation.began_at + GROW_UNTOLD_SECONDS:
        return (), EventId(""), ""  # a generation that has not done its first step is left alone
    passed = TimePassed(id=EventId(f"control//grow-{state.version}"), at=now, deadline="grow")
    return (passed,), passed.id, f"no step was told within {show_duration(GROW_UNTOLD_SECONDS)}"


def _end_by_deadline(state: State, now: Instant, deadline: str, reason: str) -> tuple[LogRecord, ...]:
    passed = TimePassed(id=EventId(f"control//{deadline}-{state.version}"), at=now, deadline=deadline)
    give_up = GiveUp(id=ActionId(f"1-{state.number}-{deadline}"), exit_code=1, reason=reason)
    decision = Decision(at=now, answers=passed.id, because=reason, actions=(give_up,))
    return passed, decision, *end(state, now, 1, reason)
