"""The doors: every Protocol through which the world comes in. Satisfied by shape; nothing inherits from them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from perdure.vocab.decision import Decision
from perdure.vocab.event import AnyEvent
from perdure.vocab.units import Instant

LogRecord = AnyEvent | Decision
"""What the event log holds."""


class Clock(Protocol):
    def now(self) -> Instant:
        """Seconds since the epoch that never go back while the process lives, whatever happens to the wall clock."""
        ...


class EventLog(Protocol):
    """Append-only; one writer, any number of readers."""

    def append(self, records: Sequence[LogRecord]) -> None:
        """Add `records` at the end, all or none. Raises EventLogError when the medium refuses; the log stays whole."""
        ...

    def read(self, after: int = 0) -> Iterator[tuple[int, LogRecord]]:
        """The records with a number above `after`, with their numbers; numbers begin at 1 and have no gaps."""
        ...

    def close(self) -> None: ...
