"""At which step a running job can be stopped so that no rank waits for another that has stopped already."""

from collections.abc import Sequence

AHEAD_SECONDS = 1.0
"""The order must reach every rank before the first one gets to the step; an agent reads orders in milliseconds."""


def stop_after(last_steps: Sequence[int], step_seconds: Sequence[float | None]) -> int:
    """The step after which all ranks end: far enough ahead of the one that is furthest."""
    known = [seconds for seconds in step_seconds if seconds]
    ahead = max(2, int(AHEAD_SECONDS / min(known)) + 1) if known else 2
    return max(last_steps, default=0) + ahead
