"""What the event log is told of checkpoints: the difference between two states of `control.saves`. Pure.

The reports themselves are not logged (decision 0012); this is for those who read what happened.
"""

from collections.abc import Iterator

from perdure.control.memories import SavesState, attachments, copies_needed, present, stored
from perdure.vocab.checkpoint import CheckpointId, Level
from perdure.vocab.event import (
    AnyEvent,
    CheckpointChosen,
    CheckpointCommitted,
    CheckpointRestored,
    CheckpointSetAside,
    CheckpointSkipped,
    CheckpointStored,
    CheckpointTrouble,
)
from perdure.vocab.ids import EventId
from perdure.vocab.units import Instant
from perdure.wire.memory import HasRestored


def told(before: SavesState, state: SavesState, now: Instant) -> tuple[AnyEvent, ...]:
    """What has happened between the two, each thing once. A control that begins anew finds out again what was set
    aside: the event has the same id then."""
    return (
        *_trouble(before, state, now),
        *_set_aside(before, state, now),
        *_chosen(before, state, now),
        *_restored(before, state, now),
        *_skipped(before, state, now),
        *_committed(before, state, now),
        *_stored(before, state, now),
    )


def _name(what: str, checkpoint: CheckpointId) -> EventId:
    return EventId(f"control//{what}-{'-'.join(map(str, checkpoint.line))}-{checkpoint.step}")


def _committed(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    newest = state.committed
    if newest is None or (before.committed is not None and newest <= before.committed):
        return
    if newest.line != state.line:
        return  # a control that has begun anew finds an earlier generation's: that is no news
    parts = {held.rank: held.nbytes for helds in state.copies.get(newest, {}).values() for held in helds}
    level = Level.REPLICATED if copies_needed(state) > 1 else Level.SEALED
    reports = present(state).values()
    yield CheckpointCommitted(
        id=_name("committed", newest),
        at=now,
        checkpoint=newest,
        level=level,
        nbytes=sum(parts.values()),
        store=next((report.store for report in reports if report.store), ""),
        stall=max((each.stall_seconds for each in reports if each.stall_seconds is not None), default=None),
        seconds=None if newest not in before.seen_at else now - before.seen_at[newest],
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
            id=_name("stored", newest),
            at=now,
            checkpoint=newest,
            path=found.path,
            nbytes=found.nbytes,
            seconds=now - before.drain.since,
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
        rebuilt=answer.rebuilt,
        missing=answer.missing,
    )


def _restored(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    known, ranks = _all_have(before), _all_have(state)
    if not ranks or (known and known[0].checkpoint == ranks[0].checkpoint and before.line == state.line):
        return
    sources: dict[str, dict[int, int]] = {}
    for rank, restored in ranks.items():
        for source, nbytes in restored.sources.items():
            sources.setdefault(source, {})[rank] = nbytes
    yield CheckpointRestored(
        id=EventId(f"control//restored-{state.attempt}-{state.generation}-{state.version}"),
        at=now,
        generation=state.generation,
        checkpoint=ranks[0].checkpoint,
        seconds=max(restored.seconds for restored in ranks.values()),
        sources=sources,
    )


def _all_have(state: SavesState) -> dict[int, HasRestored]:
    """What each rank of the generation has restored, where all have, and the same."""
    found = {rank: each.restored for rank, each in sorted(attachments(state).items()) if each.restored is not None}
    is_whole = state.world_size > 0 and len(found) == state.world_size
    return found if is_whole and len({each.checkpoint for each in found.values()}) == 1 else {}


def _set_aside(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    known = {each.act for each in before.asides}
    for aside in state.asides:
        if aside.act not in known:
            name = EventId(f"{_name('aside', aside.checkpoint)}-{'-'.join(map(str, aside.line))}")
            yield CheckpointSetAside(id=name, at=now, checkpoint=aside.checkpoint, reason=aside.reason)


def _trouble(before: SavesState, state: SavesState, now: Instant) -> Iterator[AnyEvent]:
    for node, report in state.reports.items():
        known = before.reports.get(node)
        for what in report.trouble:
            if known is None or what not in known.trouble:
                number = f"{node}-{report.incarnation}-{report.number}-{report.trouble.index(what)}"
                yield CheckpointTrouble(id=EventId(f"control//trouble-{number}"), at=now, node=node, what=what)
