"""The event log, folded into control's `State`. Pure; the same log gives the same state, so a replay is a recovery.

Every record changes the state in exactly one place here; what follows from a state is `control.brain`'s.
"""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from perdure.control.ending import kept_after
from perdure.control.state import Draining, FaultEvent, GenerationState, NodeState, State
from perdure.ports import LogRecord
from perdure.vocab.decision import (
    Begin,
    Decision,
    Drain,
    Grow,
    Hold,
    Quarantine,
    ReplaceNode,
    RestartWorkers,
    Shrink,
)
from perdure.vocab.event import (
    CaughtUp,
    CheckpointChosen,
    CheckpointCommitted,
    CheckpointRestored,
    CheckpointSetAside,
    CheckpointSkipped,
    CheckpointStored,
    CheckpointTrouble,
    ControlStarted,
    DrainAcked,
    EndDecided,
    ForkServerLost,
    GenerationBegan,
    GenerationRunning,
    JobEnded,
    JobSubmitted,
    NodeDisconnected,
    NodeFenced,
    NodeGathered,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeRefused,
    SavePassed,
    StartFailed,
    StepsBegun,
    StopRequested,
    StoreLost,
    TimePassed,
    WorkerExited,
    WorkersStarted,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from perdure.vocab.generation import Assignment, Move, Phase, move
from perdure.vocab.ids import EventId, Incarnation, NodeId
from perdure.vocab.node import NodeCondition
from perdure.vocab.view import PastFault

SAVE_ROUND = 1.0
"""Seconds in which the nodes tell of one and the same checkpoint: they end it together, their reports come apart."""
PAST_KEPT = 64
"""Faults that the ladder remembers; a budget of restarts is far smaller."""


def replay(records: Iterable[LogRecord]) -> State:
    """The state after `records`."""
    state = State()
    for record in records:
        state = fold(state, record)
    return state


def fold(state: State, record: LogRecord) -> State:
    """The state after one more record."""
    state = msgspec.structs.replace(state, version=state.version + 1)
    if isinstance(record, Decision):
        return _fold_decision(state, record)
    return _acknowledge(_fold_event(state, record), record.id)


def event_id(node: NodeId, incarnation: Incarnation, seq: int) -> EventId:
    """Name of the event with number `seq` of an agent's life."""
    return EventId(f"{node}/{incarnation}/{seq}")


def _acknowledge(state: State, event: EventId) -> State:
    node, _, rest = event.partition("/")
    incarnation, _, seq = rest.rpartition("/")
    known = state.nodes.get(NodeId(node))
    if known is None or not seq.isdigit() or str(known.node.incarnation) != incarnation or int(seq) <= known.acked:
        return state
    return _with_node(state, known, acked=int(seq))


def _fold_event(state: State, event: LogRecord) -> State:
    match event:
        case JobSubmitted():
            return msgspec.structs.replace(state, spec=event.spec, began_at=event.at)
        case NodeJoined() | NodeLost() | NodeLeft() | NodeDisconnected() | NodeReady():
            return _fold_node(state, event)
        case StopRequested():
            order = state.draining.order if state.draining is not None else None
            return msgspec.structs.replace(state, draining=Draining(request=event, order=order))
        case JobEnded():
            ended = msgspec.structs.replace(state, ended=event, hold=None, unanswered=())
            return _move_generation(ended, Move.FINISHED)
        case EndDecided():
            ending = msgspec.structs.replace(state, ending=event, hold=None, unanswered=())
            return _move_generation(ending, Move.FINISHED)
        case CheckpointCommitted() | CheckpointStored() | CheckpointChosen() | CheckpointSetAside():
            return msgspec.structs.replace(state, kept=kept_after(state.kept, event))
        case GenerationBegan() | ControlStarted() | NodeRefused() | TimePassed() | NodeFenced() | ForkServerLost():
            return state
        case CheckpointSkipped() | CheckpointTrouble() | CheckpointRestored():
            return state  # for readers
        case (
            NodeGathered()
            | WorkersStarted()
            | GenerationRunning()
            | StepsBegun()
            | CaughtUp()
            | SavePassed()
            | WorkerExited()
            | WorkerStopped()
            | WorkerStalled()
            | WorkerUnkillable()
            | StoreLost()
            | StartFailed()
            | DrainAcked()
        ):
            return _fold_generation(state, event)
        case _:
            raise AssertionError(f"unknown record {event!r}")


# --- nodes -----------------------------------------------------------------------------------------------------------


def _with_node(state: State, known: NodeState, **changes: object) -> State:
    changed = msgspec.structs.replace(known, **changes)
    return msgspec.structs.replace(state, nodes={**state.nodes, known.node.id: changed})


def _fold_node(state: State, event: NodeJoined | NodeLost | NodeLeft | NodeDisconnected | NodeReady) -> State:
    if isinstance(event, NodeJoined):
        known = state.nodes.get(event.node.id)
        if known is not None and known.present and known.node.incarnation == event.node.incarnation:
            return _with_node(
                state, known, node=event.node, disconnected_at=None, came=event.id, came_version=state.version
            )
        condition = known.condition if known is not None else NodeCondition.HEALTHY
        joined = NodeState(
            node=event.node,
            present=True,
            joined_at=event.at,
            condition=condition,
            came=event.id,
            came_version=state.version,
        )
        return msgspec.structs.replace(state, nodes={**state.nodes, event.node.id: joined})
    known = state.nodes.get(event.node)
    if known is None:
        return state
    match event:
        case NodeReady():
            return _with_node(state, known, ready=True, ready_at=event.at, came=event.id, came_version=state.version)
        case NodeDisconnected() if known.node.incarnation == event.incarnation:
            return _with_node(state, known, disconnected_at=event.at)
        case NodeLost() | NodeLeft() if known.node.incarnation == event.incarnation and known.present:
            state = _gone(_with_node(state, known, present=False, ready=False, disconnected_at=None), event.node)
            state = _cleared(state, event.node)
            return _ask(state, event) if _is_needed(state, event.node) else state
        case _:
            return state


def _is_needed(state: State, node: NodeId) -> bool:
    """Whether the loss of `node` has to be answered: it is a member whose ranks have not all ended well."""
    generation = state.generation
    if generation is None or generation.phase is Phase.ENDED:
        return False
    member = generation.assignment.member(node)
    return member is not None and not set(member.ranks) <= generation.finished


def _gone(state: State, node: NodeId) -> State:
    """Note that a member is gone. It matters where no new generation follows: its ranks have finished, or all drain."""
    generation = state.generation
    if generation is None or generation.phase is Phase.ENDED or generation.assignment.member(node) is None:
        return state
    changed = msgspec.structs.replace(generation, gone=generation.gone | {node})
    return msgspec.structs.replace(state, generation=changed)


def _ask(state: State, event: FaultEvent) -> State:
    return msgspec.structs.replace(state, unanswered=(*state.unanswered, event))


# --- the generation --------------------------------------------------------------------------------------------------

GenerationEvent = (
    NodeGathered
    | WorkersStarted
    | GenerationRunning
    | StepsBegun
    | CaughtUp
    | SavePassed
    | WorkerExited
    | WorkerStopped
    | WorkerStalled
    | WorkerUnkillable
    | StoreLost
    | StartFailed
    | DrainAcked
)


MemberEvent = NodeGathered | WorkersStarted | StepsBegun | CaughtUp | SavePassed | WorkerExited | DrainAcked


def _fold_generation(state: State, event: GenerationEvent) -> State:
    state = _raise_high_step(state, event)
    generation = state.generation
    if isinstance(event, WorkerUnkillable):  # it says something of the node, whatever that does now
        return _ask(state, event) if state.ended is None and event.node in state.fit else state
    if generation is None or event.generation != generation.number or generation.phase is Phase.ENDED:
        return state  # fencing: what an earlier generation still says is history
    if isinstance(event, GenerationRunning):
        return _move_generation(state, Move.STARTED)
    if generation.assignment.member(event.node) is None:
        return _cleared(state, event.node) if isinstance(event, NodeGathered) else state
    if isinstance(event, StoreLost) and generation.finished:
        return state  # the end is near; who still needs the store will fail, and that is answered
    if isinstance(event, WorkerExited) and event.exit_code != 0:
        return _ask(state, event)
    if isinstance(event, WorkerStopped | WorkerStalled | StoreLost | StartFailed):
        return _ask(state, event)
    if isinstance(event, NodeGathered):
        generation = msgspec.structs.replace(generation, redo_until=state.high_step)
    if isinstance(event, SavePassed):
        state = msgspec.structs.replace(state, tells_saves=True)
    return _advance(msgspec.structs.replace(state, generation=_told(generation, event, state.version)))


def _told(generation: GenerationState, event: MemberEvent, version: int) -> GenerationState:
    """The generation after what a member said of its course."""
    replace = msgspec.structs.replace
    match event:
        case NodeGathered():
            gathered = generation.gathered | {event.node}
            return replace(generation, gathered=gathered, store=event.store or generation.store)
        case WorkersStarted():
            return replace(generation, started=generation.started | {event.node})
        case StepsBegun():
            begun = generation.begun | {event.node}
            return replace(generation, begun=begun, begun_by=event.id, begun_version=version)
        case SavePassed():
            if generation.saved_at is None or event.at - generation.saved_at >= SAVE_ROUND:
                return replace(generation, saved_at=event.at, saved_by=event.id)
            return generation
        case WorkerExited():
            return replace(generation, finished=generation.finished | {event.rank}, finished_by=event.id)
        case DrainAcked():
            return replace(generation, acks=(*generation.acks, event))
        case CaughtUp():
            return generation
        case _:
            assert_never(event)


def _advance(state: State) -> State:
    """INTERRUPTING → GATHERING → AGREED as far as the members, and those that were left out, have come."""
    generation = state.generation
    if generation is None:
        return state
    phase = generation.phase
    all_gathered = set(generation.assignment.nodes) <= generation.gathered
    if phase is Phase.INTERRUPTING and all_gathered and not state.uncleared:
        phase = move(phase, Move.CLEARED)
    if phase is Phase.GATHERING and generation.store is not None:
        phase = move(phase, Move.GATHERED)
    if phase is generation.phase:
        return state
    return msgspec.structs.replace(state, generation=msgspec.structs.replace(generation, phase=phase))


def _cleared(state: State, node: NodeId) -> State:
    """Nothing of an earlier generation runs on `node` any more, or it is gone with all that ran there."""
    return _advance(msgspec.structs.replace(state, uncleared=state.uncleared - {node}))


def _raise_high_step(state: State, event: GenerationEvent) -> State:
    match event:
        case NodeGathered():
            step = event.last_step
        case CaughtUp() | SavePassed():
            step = event.step
        case _:
            step = None
    if step is None or step < 0 or (state.high_step is not None and step <= state.high_step):
        return state
    return msgspec.structs.replace(state, high_step=step)


def _move_generation(state: State, by: Move) -> State:
    generation = state.generation
    if generation is None or generation.phase is Phase.ENDED:
        return state
    return msgspec.structs.replace(
        state, generation=msgspec.structs.replace(generation, phase=move(generation.phase, by))
    )


# --- decisions -------------------------------------------------------------------------------------------------------


def _fold_decision(state: State, decision: Decision) -> State:
    diagnosis = decision.diagnosis
    if diagnosis is not None:
        past = PastFault(
            fault=diagnosis.fault.id,
            fingerprint=diagnosis.fingerprint,
            at=decision.at,
            rank=diagnosis.rank,
            step=diagnosis.step,
        )
        state = msgspec.structs.replace(state, past=(*state.past, past)[-PAST_KEPT:])
        if diagnosis.counts_as_restart:
            state = msgspec.structs.replace(state, restarts=(*state.restarts, decision.at)[-PAST_KEPT:])
    state = msgspec.structs.replace(state, unanswered=tuple(e for e in state.unanswered if e.id != decision.answers))
    for action in decision.actions:
        if isinstance(action, ReplaceNode):
            state = _suspect(state, action)
        match action:
            case RestartWorkers() | ReplaceNode() | Shrink() | Grow() | Begin():
                state = _begin(state, action.assignment, decision)
            case Hold():
                state = msgspec.structs.replace(
                    _move_generation(state, Move.FAULT), generation=None, hold=action, unanswered=_outliving(state)
                )
            case Quarantine():
                known = state.nodes.get(action.node)
                if known is not None:
                    state = _with_node(state, known, condition=NodeCondition.QUARANTINED)
            case Drain():
                assert state.draining is not None
                state = msgspec.structs.replace(state, draining=msgspec.structs.replace(state.draining, order=action))
            case _:
                pass  # GiveUp and Finish are followed by JobEnded; the others leave no trace here
    return state


def _suspect(state: State, action: ReplaceNode) -> State:
    """Who is replaced while it lives was not lost: its ranks have failed there again and again."""
    gone = state.generation.gone if state.generation is not None else frozenset()
    for node in action.lost:
        known = state.nodes[node]
        if known.present and node not in gone and known.condition is NodeCondition.HEALTHY:
            state = _with_node(state, known, condition=NodeCondition.SUSPECT)
    return state


def _begin(state: State, assignment: Assignment, decision: Decision) -> State:
    return msgspec.structs.replace(
        state,
        generation=GenerationState(
            assignment=assignment,
            phase=Phase.INTERRUPTING,
            began_at=decision.at,
            answers=decision.answers,
            redo_until=state.high_step,
        ),
        number=assignment.number,
        previous=assignment,
        uncleared=_left_out(state, assignment),
        hold=None,
        unanswered=_outliving(state),
    )


def _left_out(state: State, assignment: Assignment) -> frozenset[NodeId]:
    """Nodes that may still run workers of an earlier generation, and have no part in `assignment` that would end them.

    Quarantined ones too: what cannot be killed there is given up by its agent, and everything else is waited for.
    """
    before = set(state.previous.nodes) if state.previous is not None else set()
    there = {node for node in before | state.uncleared if state.nodes[node].present}
    return frozenset(there - set(assignment.nodes))


def _outliving(state: State) -> tuple[FaultEvent, ...]:
    """Faults that a new generation does not settle: they are of nodes, and are told once."""
    return tuple(event for event in state.unanswered if isinstance(event, WorkerUnkillable))
