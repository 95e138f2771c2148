"""Virtual time: what happens when. What is planned for one moment happens in the order in which it was planned."""

import heapq
from collections.abc import Callable
from itertools import count

from perdure.vocab.units import Instant, Seconds

AT_ONCE = 50_000
"""Things at one moment after which somebody must be going in a circle."""
START: Instant = 1_000_000.0
"""When a simulation begins."""


class Agenda:
    """A queue of things to do; `run` jumps from one to the next."""

    def __init__(self) -> None:
        self.now: Instant = START
        self.done = 0
        self.goes_round = False
        """Time stood still: the same moment had too much to do."""
        self._heap: list[tuple[Instant, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: Instant, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), do))

    def after(self, seconds: Seconds, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def run(self, until: Instant, stop: Callable[[], bool]) -> None:
        """Do one thing after the other until `until`, until `stop()`, or until there is nothing left."""
        at_once = 0
        while self._heap and not stop() and not self.goes_round:
            when, _, do = self._heap[0]
            at_once = at_once + 1 if when <= self.now else 0
            self.goes_round = at_once > AT_ONCE
            if when > until:
                self.now = until
                return
            heapq.heappop(self._heap)
            self.now = when
            self.done += 1
            do()


class Alarm:
    """One thing that is planned at most once; setting it anew replaces it."""

    def __init__(self, agenda: Agenda, do: Callable[[], None]) -> None:
        self._agenda, self._do = agenda, do
        self._number = 0
        self.when: Instant | None = None

    def set(self, when: Instant | None) -> None:
        """Plan it for `when`; None: not at all."""
        if when == self.when and when is not None and when > self._agenda.now:
            return
        self._number += 1
        self.when = when
        if when is not None:
            number = self._number
            self._agenda.at(when, lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number == self._number:
            self.when = None
            self._do()
