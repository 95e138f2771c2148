"""What was set aside is marked in storage too, for the jobs to come. Blocking, for threads."""

from collections.abc import Iterable, Sequence

from perdure.store.marks import mark
from perdure.vocab.checkpoint import Aside, Stored


def unmarked(stored: Iterable[Stored], asides: Sequence[Aside]) -> tuple[tuple[Stored, Aside], ...]:
    """Which of those in storage lack a mark, and what it is to say."""
    return tuple(
        (each, next(aside for aside in asides if aside.covers(each.checkpoint)))
        for each in stored
        if each.aside is None and any(aside.covers(each.checkpoint) for aside in asides)
    )


def mark_all(url: str, wanted: Iterable[tuple[Stored, Aside]]) -> None:
    """Twice is harmless. Raises HostError, ConfigError."""
    for stored, aside in wanted:
        mark(url, stored.path, aside)
