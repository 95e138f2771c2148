"""A clock that never goes back, whatever is done to the wall clock while the process lives."""

import time

from perdure.vocab.units import Instant


class SteadyClock:
    """Satisfies `ports.Clock`: the wall clock's time at the start, carried on by the monotonic clock.

    `not_before` is the newest time in the log of an earlier process: time in one log never goes back either.
    """

    def __init__(self, not_before: Instant = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> Instant:
        return time.monotonic() + self._offset
