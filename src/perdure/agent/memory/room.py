"""Whether the slots fit: what the file system and the memory cgroup have left, and the sum for a reader."""

import os
from pathlib import Path

import msgspec

from perdure.errors import ConfigError
from perdure.host.memory import MemoryGroup, memory_group_of, parse_counters
from perdure.vocab.units import Bytes, show_bytes

REPLICA_FILES = 2
"""Per rank that a partner keeps for us; we keep as many for it."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What is left for slots."""

    file_system: Bytes
    group: Bytes | None
    """None: no memory cgroup has a limit."""

    @property
    def least(self) -> Bytes:
        return self.file_system if self.group is None else min(self.file_system, self.group)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, per rank and in all."""

    file_bytes: Bytes
    slots: int
    """Files that are still to be made for the rank that asks."""
    others: int = 0
    """Ranks of this node that have not attached yet, and will need as much each."""
    slots_each: int = 0
    replicas: int = 0
    """Files that other nodes' replicas will take here."""
    parity: Bytes = 0
    """What the parity of other nodes' slots will take here."""

    @property
    def total(self) -> Bytes:
        return self.file_bytes * (self.slots + self.others * self.slots_each + self.replicas) + self.parity


def room_in(folder: str) -> Room:
    """What can still be allocated below `folder` by this process."""
    of = os.statvfs(folder)
    group = memory_group_of(os.getpid())
    return Room(file_system=of.f_bavail * of.f_frsize, group=None if group is None else _left_in(group))


def check_room(folder: str, need: Need, room: Room | None = None) -> None:
    """Raise ConfigError, with the arithmetic, where the slots cannot fit."""
    room = room_in(folder) if room is None else room
    if need.total > room.least:
        raise ConfigError(explain(folder, need, room))


def explain(folder: str, need: Need, room: Room) -> str:
    """One sentence: what is needed, what is there, what to do."""
    parts = [f"{need.slots} slots of {show_bytes(need.file_bytes)} for this rank"]
    if need.others:
        parts.append(f"{need.slots_each} for each of {need.others} more ranks of this node")
    if need.replicas:
        parts.append(f"{need.replicas} for replicas of other nodes")
    if need.parity:
        parts.append(f"{show_bytes(need.parity)} for parity of other nodes")
    limit = "" if room.group is None else f", and {show_bytes(room.group)} are left below the memory cgroup's limit"
    return (
        f"checkpoints in memory do not fit: {', '.join(parts)} make {show_bytes(need.total)}, but {folder} has"
        f" {show_bytes(room.file_system)} free{limit}; give the machine a larger /dev/shm or limit, or use fewer slots"
    )


def _left_in(group: MemoryGroup) -> Bytes | None:
    """The least that any group from this one up to the root leaves; None without a limit."""
    files = (
        ("memory.max", "memory.current") if group.version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    left: list[int] = []
    path = group.path
    while path.startswith(group.root):
        limit, usage = (_read(f"{path}/{name}").strip() for name in files)
        if limit.isdecimal() and usage.isdecimal() and int(limit) < 1 << 60:  # v1 says "none" with a huge number
            left.append(max(0, int(limit) - int(usage) + _reclaimable(path)))
        path = os.path.dirname(path)
    return min(left, default=None)


def _reclaimable(path: str) -> Bytes:
    """Page cache that the kernel drops before it refuses memory (tmpfs is not in these counters)."""
    counters = parse_counters(_read(f"{path}/memory.stat"))
    return counters.get("inactive_file", 0) + counters.get("active_file", 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
