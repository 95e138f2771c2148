"""The phases of a node's time; `Track`, one presence as phases that can be corrected backwards; `Roster`, all nodes.

It knows nothing of events. Times are whole microseconds, so that sums are exact: a double holds an Instant of this
century to about 0.2 us, and differences of doubles would not add up.
"""

from collections.abc import Container, Iterable, Iterator
from enum import StrEnum

import msgspec

from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant, Seconds


class Phase(StrEnum):
    """What a node's second was spent on. Every second of a node that is present is in exactly one."""

    TRAINING = "training"
    """Steps that nobody had done before."""
    REDONE = "redone steps"
    """Steps that an earlier generation had done, and that were not saved."""
    DETECTION = "detection"
    """A fault had begun, and nobody knew yet."""
    RECOVERY = "recovery"
    """From the fault's event, or a planned change, to the first finished step of the next generation."""
    HELD = "held"
    """Too few nodes to go on: waiting for one."""
    START_UP = "start-up"
    """From joining to the first finished step of the first generation; waiting for other nodes is in it."""
    SHUTDOWN = "shutdown"
    """From the request to stop, giving up, or the last worker's finish, to the job's end."""
    IDLE_SPARE = "idle spare"
    """Present, and not in the current generation."""


class Interval(msgspec.Struct, frozen=True):
    """One node in one phase, without a break."""

    node: NodeId
    phase: Phase
    begin: Instant
    end: Instant


def to_us(instant: Instant) -> int:
    """Whole microseconds since the epoch."""
    return round(instant * 1_000_000)


def to_seconds(us: int) -> Seconds:
    return us / 1_000_000


Piece = tuple[int, int, Phase]
"""Begin, end (microseconds), phase."""


class Track:
    """One presence of one node. Built by one fold and seen by nobody else, so it is allowed to change."""

    def __init__(self, node: NodeId, begin: int, phase: Phase) -> None:
        self.node = node
        self.begin = begin
        self._changes: list[tuple[int, Phase]] = [(begin, phase)]

    @property
    def phase(self) -> Phase:
        """The present one."""
        return self._changes[-1][1]

    def switch(self, at: int, phase: Phase) -> None:
        """From `at` on the node is in `phase`; what was thought of the time after `at` is forgotten."""
        at = max(at, self.begin)
        while self._changes and self._changes[-1][0] >= at:
            self._changes.pop()
        if not self._changes or self._changes[-1][1] is not phase:
            self._changes.append((at, phase))

    def repaint(self, begin: int, end: int, phase: Phase, over: Container[Phase]) -> None:
        """What lies in [begin, end) and is in one of `over` becomes `phase`; the rest, also after `end`, stays."""
        begin = max(begin, self.begin)
        if end <= begin:
            return
        first = len(self._changes) - 1
        while self._changes[first][0] > begin:
            first -= 1
        tail = self._changes[first:]
        del self._changes[first:]
        stops: list[int | None] = [*(start for start, _ in tail[1:]), None]
        for (start, old), stop in zip(tail, stops, strict=True):
            if old not in over or start >= end or (stop is not None and stop <= begin):
                self.switch(start, old)
                continue
            self.switch(start, old)
            self.switch(max(start, begin), phase)
            if stop is None or end < stop:
                self.switch(end, old)

    def pieces(self, end: int) -> Iterator[Piece]:
        """The phases up to `end`, in order, without gaps, none empty, neighbours different."""
        stops = [begin for begin, _ in self._changes[1:]] + [end]
        for (begin, phase), stop in zip(self._changes, stops, strict=True):
            stop = min(stop, end)
            if begin < stop:
                yield begin, stop, phase


class Roster:
    """Which nodes are present, and what became of those that were. Changes like `Track`."""

    def __init__(self) -> None:
        self.present: dict[NodeId, Track] = {}
        self.order: dict[NodeId, int] = {}
        """Of the first joining."""
        self._closed: list[Interval] = []

    def join(self, node: NodeId, at: int, phase: Phase) -> None:
        if node not in self.present:
            self.order.setdefault(node, len(self.order))
            self.present[node] = Track(node, at, phase)

    def leave(self, node: NodeId, at: int) -> None:
        track = self.present.pop(node, None)
        if track is not None:
            self._closed += _intervals(track, at)

    def among(self, nodes: Iterable[NodeId]) -> list[Track]:
        """The present ones of `nodes`."""
        return [self.present[node] for node in nodes if node in self.present]

    def intervals(self, end: int) -> tuple[Interval, ...]:
        """All, up to `end`, by node in the order of joining and then by time."""
        running = [interval for track in self.present.values() for interval in _intervals(track, end)]
        return tuple(sorted(self._closed + running, key=lambda i: (self.order[i.node], i.begin)))


def _intervals(track: Track, end: int) -> Iterator[Interval]:
    for begin, stop, phase in track.pieces(end):
        yield Interval(track.node, phase, to_seconds(begin), to_seconds(stop))
