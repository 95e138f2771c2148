"""What the event log is told of checkpoints: the difference between two states of `control.saves`. Pure.

The reports themselves are not logged (decision 0012); this is for those who read what happened.
"""

from collections.abc import Iterator

from perdure.control.memories import SavesState, copies_needed, present, stored
from perdure.vocab.checkpoint import CheckpointId, Level
from perdure.vocab.event import (
    AnyEvent,
    CheckpointChosen,
    CheckpointCommitted,
    CheckpointSkipped,
    CheckpointStored,
    CheckpointTrouble,
)
from perdure.vocab.ids import EventId
from perdure.vocab.units import Instant


def told(before: SavesState, state: SavesState, now: Instant) -> tuple[AnyEvent, ...]:
    """What has happened between the two, each thing once."""
    return (
        *_trouble(before, state, now),
        *_chosen(before, state, now),
        *_skipped(before, state, now),
        *_committed(before, state, now),
        *_stored(before, state, now),
    )


def _name(what: str, checkpoint: CheckpointId) -> EventId:
    return EventId(f"control//{what}-{checkpoint.attempt}-{checkpoint.generation}-{checkpoint.step}")


def _committed(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    newest = state.committed
    if newest is None or (before.committed is not None and newest <= before.committed):
        return
    if (newest.attempt, newest.generation) != state.line:
        return  # a control that has begun anew finds an earlier generation's: that is no news
    parts = {held.rank: held.nbytes for helds in state.copies.get(newest, {}).values() for held in helds}
    level = Level.REPLICATED if copies_needed(state) > 1 else Level.SEALED
    yield CheckpointCommitted(
        id=_name("committed", newest), at=now, checkpoint=newest, level=level, nbytes=sum(parts.values())
    )


def _skipped(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    reports = present(state)
    for checkpoint in sorted(state.aborted - before.aborted):
        nodes = tuple(sorted(node for node, report in reports.items() if checkpoint in report.skipped))
        if nodes:
            yield CheckpointSkipped(id=_name("skipped", checkpoint), at=now, checkpoint=checkpoint, nodes=nodes)


def _stored(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    newest = state.durable
    if newest is None or newest == before.durable or before.drain is None or before.drain.checkpoint != newest:
        return
    found = stored(state).get(newest)
    if found is not None:
        yield CheckpointStored(
            id=_name("stored", newest), at=now, checkpoint=newest, path=found.path, nbytes=found.nbytes
        )


def _chosen(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    answer = None if state.choice is None else state.choice.chosen
    if answer is None or (before.choice is not None and before.choice.chosen == answer and before.line == state.line):
        return
    yield CheckpointChosen(
        id=EventId(f"control//chosen-{state.attempt}-{state.generation}-{state.version}"),
        at=now,
        generation=state.generation,
        checkpoint=answer.checkpoint,
        from_memory=len(answer.holders),
        missing=answer.missing,
    )


def _trouble(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    for node, report in state.reports.items():
        known = before.reports.get(node)
        for what in report.trouble:
            if known is None or what not in known.trouble:
                number = f"{node}-{report.incarnation}-{report.number}-{report.trouble.index(what)}"
                yield CheckpointTrouble(id=EventId(f"control//trouble-{number}"), at=now, node=node, what=what)
