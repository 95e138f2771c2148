"""A requested stop: ask where the workers stand, name the step to end at or forward the signal, end. Pure."""

from perdure.control.ending import end
from perdure.control.state import GenerationState, State
from perdure.policy.draining import stop_after
from perdure.ports import LogRecord
from perdure.vocab.decision import Decision, Drain
from perdure.vocab.event import NodeLeft, NodeLost, StopRequested, TimePassed, WorkerExited
from perdure.vocab.generation import Phase
from perdure.vocab.ids import ActionId, EventId
from perdure.vocab.units import Instant, show_duration

EXIT_INCOMPLETE = 3


def drain(state: State, now: Instant) -> tuple[LogRecord, ...]:
    """Ask where the workers stand, name the step to stop at (or forward the signal), end when all have ended."""
    assert state.draining is not None
    request, order, generation = state.draining.request, state.draining.order, state.generation
    until = request.at + request.grace
    if generation is None or generation.phase is not Phase.RUNNING or request.grace <= 0:
        # No worker runs that has something to save.
        return end(state, now, EXIT_INCOMPLETE, f"stopped by {request.by}", until)
    done = _ended_ranks(state, generation)
    if len(done) >= generation.assignment.world_size or now >= until:
        how = (
            "all workers have ended"
            if now < until
            else f"{show_duration(request.grace)} were over (--shutdown-timeout)"
        )
        return end(state, now, EXIT_INCOMPLETE, f"stopped by {request.by}; {how}", until)
    if order is None:
        ask = Drain(id=ActionId(f"1-{generation.number}-drain"), until=until, signal=request.signal)
        return (Decision(at=now, answers=request.id, because=f"{request.by}: save and end", actions=(ask,)),)
    if order.stop_after is None and not order.forward:
        return _name_stop(state, generation, request, until, now)
    return ()


def acks_until(request: StopRequested) -> Instant:
    """How long the nodes' answers to a stop are waited for."""
    return request.at + min(1.0, request.grace / 2)


def _name_stop(
    state: State, generation: GenerationState, request: StopRequested, until: Instant, now: Instant
) -> tuple[LogRecord, ...]:
    acks = {ack.node: ack for ack in generation.acks}
    silent = set(generation.assignment.nodes) - set(acks)
    if silent and now < acks_until(request):
        return ()
    records: tuple[LogRecord, ...] = ()
    if silent:
        answers = EventId(f"control//acks-{state.version}")
        records = (TimePassed(id=answers, at=now, deadline="acks"),)
    else:
        answers = generation.acks[-1].id
    identity = ActionId(f"1-{generation.number}-drain-2")
    if not silent and all(ack.tells for ack in acks.values()):
        last = stop_after([a.last_step for a in acks.values()], [a.step_seconds for a in acks.values()])
        order = Drain(id=identity, until=until, signal=request.signal, stop_after=last)
        because = f"all ranks tell their steps, so all end after step {last}"
    else:
        order = Drain(id=identity, until=until, signal=request.signal, forward=True)
        why = f"{', '.join(sorted(silent))} has not answered" if silent else "the script does not tell its steps"
        because = f"{why}, so the signal goes to the workers"
    return *records, Decision(at=now, answers=answers, because=because, actions=(order,))


def _ended_ranks(state: State, generation: GenerationState) -> set[int]:
    gone = {e.rank for e in state.unanswered if isinstance(e, WorkerExited)}
    lost = {e.node for e in state.unanswered if isinstance(e, NodeLost | NodeLeft)}
    ranks = {r for m in generation.assignment.members if m.node in lost for r in m.ranks}
    return set(generation.finished) | gone | ranks
