"""Names of things, and `Incarnation`: one life of a process."""

from typing import NewType

import msgspec

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
EventId = NewType("EventId", str)
ActionId = NewType("ActionId", str)
Rank = NewType("Rank", int)
"""Global rank, 0 … world size - 1."""
GenerationNumber = NewType("GenerationNumber", int)
"""1 for the first agreement of an attempt; 0 means: none yet."""


class Incarnation(msgspec.Struct, frozen=True, order=True):
    """One life of a worker or agent process. Two lives are never equal, also when the kernel reuses the pid."""

    pid: int
    started_ticks: int
    """Start time in clock ticks since boot (`/proc/PID/stat`, field 22)."""
    boot_id: str
    """`/proc/sys/kernel/random/boot_id`."""

    def __str__(self) -> str:
        return f"{self.boot_id[:8]}.{self.pid}.{self.started_ticks}"
