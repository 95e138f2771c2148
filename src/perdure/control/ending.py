"""The end of a job whose newest checkpoint is in memory only: it is brought to storage first, for so long. Pure.

Memory goes with the job. So nothing runs any more, and the memory servers still write: also what they hold of nodes
that are lost. Whether a job ends, and by which code, is decided elsewhere.
"""

import msgspec

from perdure.control.state import Kept, State
from perdure.ports import LogRecord
from perdure.vocab.event import (
    CheckpointChosen,
    CheckpointCommitted,
    CheckpointSetAside,
    CheckpointStored,
    EndDecided,
    JobEnded,
)
from perdure.vocab.ids import EventId
from perdure.vocab.units import Instant, show_duration


def end(state: State, now: Instant, exit_code: int, reason: str, until: Instant | None = None) -> tuple[LogRecord, ...]:
    """The job's end, or the wait for its newest checkpoint: up to `until`, or as long as the rules allow."""
    assert state.spec is not None
    until = now + state.spec.rules.flush if until is None else until
    if now < until and state.kept.is_owed and _is_anybody_there(state):
        event = EventId(f"control//ending-{state.version}")
        return (EndDecided(id=event, at=now, exit_code=exit_code, reason=reason, until=until),)
    return _ended(state, now, exit_code, reason)


def wait(state: State, now: Instant) -> tuple[LogRecord, ...]:
    """The end at last, when the checkpoint is in storage, when it cannot be, or when the time is over."""
    ending = state.ending
    assert ending is not None
    if state.kept.is_owed and _is_anybody_there(state) and now < wait_until(state, ending):
        return ()
    return _ended(state, now, ending.exit_code, ending.reason)


def wait_until(state: State, ending: EndDecided) -> Instant:
    """A stop that is asked for meanwhile may leave less time than was allowed, and none where it is to be at once."""
    request = state.draining.request if state.draining is not None else None
    return ending.until if request is None else min(ending.until, request.at + request.grace)


def kept_after(
    kept: Kept, event: CheckpointCommitted | CheckpointStored | CheckpointChosen | CheckpointSetAside
) -> Kept:
    """Where checkpoints are after one more event."""
    if isinstance(event, CheckpointSetAside):
        return msgspec.structs.replace(kept, asides=kept.asides | {event.id})
    if isinstance(event, CheckpointCommitted):
        return msgspec.structs.replace(kept, newest=event.checkpoint, store=event.store or kept.store)
    if isinstance(event, CheckpointStored):
        return msgspec.structs.replace(kept, durable=event.checkpoint)
    if event.checkpoint is None:
        return kept
    durable = kept.durable if event.from_memory else event.checkpoint
    return msgspec.structs.replace(kept, newest=event.checkpoint, durable=durable)


def _is_anybody_there(state: State) -> bool:
    return any(known.present for known in state.nodes.values())


def _ended(state: State, now: Instant, exit_code: int, reason: str) -> tuple[LogRecord, ...]:
    return (JobEnded(id=EventId("control//end"), at=now, exit_code=exit_code, reason=f"{reason}{_fate(state, now)}"),)


def _fate(state: State, now: Instant) -> str:
    """What has become of the newest checkpoint, where there is one that anybody could miss."""
    kept = state.kept
    if kept.newest is None or not kept.store:
        return ""
    if not kept.is_owed:
        return f"; {kept.durable} is in storage"
    waited = "" if state.ending is None else f" within {show_duration(max(0.0, now - state.ending.at))}"
    instead = f"{kept.durable} is the newest there" if kept.durable is not None else "there is none"
    return f"; {kept.newest} has not reached storage{waited}, {instead}"
