"""Whether a process that died of SIGKILL was killed for lack of memory: the kernel's log, and counters of its cgroup.

The parsers are pure; `OomWatch` does the reading. Knows nothing of workers or of what follows from an OOM kill.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from perdure.vocab.event import MemoryEvidence
from perdure.vocab.units import Bytes

_KILLED = re.compile(r"(?:(Memory cgroup o|O)ut of memory(?: \(oom_kill_allocating_task\))?: )?Killed process (\d+)")
_CHOSEN = re.compile(r"(Memory cgroup o|O)ut of memory: Kill process \d+")
_PART = re.compile(r"(?:anon|file|shmem)-rss:(\d+)kB")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h
_UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with the largest number of pages."""
_RECORD = 8192
"""Longest record of /dev/kmsg (PRINTKRB_RECORD_MAX and CONSOLE_EXT_LOG_MAX are below)."""


class OomKill(msgspec.Struct, frozen=True):
    """One "Killed process" line of the kernel."""

    pid: int
    """As the initial pid namespace counts."""
    by: str
    """`kernel` (the machine is out of memory) or `cgroup` (a limit was reached)."""
    rss: Bytes | None
    line: str


class MemoryGroup(msgspec.Struct, frozen=True):
    """A memory cgroup: its folder, the root of its hierarchy, and the version of its files."""

    path: str
    root: str
    version: int


class GroupReading(msgspec.Struct, frozen=True):
    """A memory cgroup at one moment."""

    kills: int
    limit: Bytes | None
    """The smallest of its own and its ancestors'."""
    usage: Bytes | None
    """The highest so far in the group that has this limit."""


def parse_kills(lines: Iterable[str]) -> list[OomKill]:
    """The OOM kills in lines of a kernel log, with or without time stamps.

    Kernels before 5.0 say on the line before whose memory is out ("Memory cgroup out of memory: Kill process ...").
    """
    kills, group = [], False
    for line in lines:
        if chosen := _CHOSEN.search(line):
            group = chosen[1].startswith("M")
        elif killed := _KILLED.search(line):
            group = killed[1].startswith("M") if killed[1] else group
            parts = _PART.findall(line)
            rss = 1024 * sum(map(int, parts)) if parts else None
            kills.append(OomKill(int(killed[2]), "cgroup" if group else "kernel", rss, line[killed.start() :].strip()))
    return kills


def parse_kmsg_record(record: bytes) -> str:
    """The message of one record of /dev/kmsg, `priority,sequence,time,flags;message` and lines of `KEY=value`."""
    head, _, message = record.decode(errors="replace").partition(";")
    return message.split("\n", 1)[0] if message else head


def find_memory_group(cgroups: str, mounts: str) -> MemoryGroup | None:
    """The memory cgroup in /proc/PID/cgroup, by the mounts of /proc/self/mountinfo. v1 wins where it has the memory."""
    paths = {names: path for _, names, path in (line.split(":", 2) for line in cgroups.splitlines() if line)}
    legacy = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
    version, wanted = (2, paths.get("")) if legacy is None else (1, legacy)
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        mounted, point = left.split()[3:5]
        is_it = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if is_it and wanted is not None:
            inside = wanted.removeprefix(mounted) if mounted != "/" else wanted
            return MemoryGroup(os.path.normpath(f"{point}/{inside}"), point, version)
    return None


def parse_counters(text: str) -> dict[str, int]:
    """`name number` lines, as in memory.events and memory.oom_control."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def memory_group_of(pid: int) -> MemoryGroup | None:
    """The memory cgroup of a living process; the hierarchy's root where the folder is not visible from here."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        found = find_memory_group(Path(f"/proc/{pid}/cgroup").read_text(), mounts)
    except OSError:
        return None
    if found is None or os.path.isdir(found.path):
        return found
    return msgspec.structs.replace(found, path=found.root)


def read_group(group: MemoryGroup) -> GroupReading:
    """The counters now. What cannot be read counts as 0 kills and no limit."""
    events, limit_file, peak_file, usage_file = (
        ("memory.events", "memory.max", "memory.peak", "memory.current")
        if group.version == 2
        else ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes")
    )
    kills = parse_counters(_read(f"{group.path}/{events}")).get("oom_kill", 0)
    limit, tightest, path = _UNLIMITED, group.path, group.path
    while path.startswith(group.root):
        own = _read(f"{path}/{limit_file}").strip()
        if own.isdecimal() and int(own) < limit:
            limit, tightest = int(own), path
        path = os.path.dirname(path)
    usage = _read(f"{tightest}/{peak_file}").strip() or _read(f"{tightest}/{usage_file}").strip()
    return GroupReading(kills, None if limit == _UNLIMITED else limit, int(usage) if usage.isdecimal() else None)


class OomWatch:
    """Watches from its making on. `group`: the cgroup in which the watched processes run."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group
        self._kmsg = _open_kmsg()
        self._pids_compare = _own_pid_namespace() == _INITIAL_PID_NAMESPACE
        self._killed: dict[int, OomKill] = {}
        self._before = 0
        self.snapshot()

    @classmethod
    def here(cls) -> "OomWatch":
        """For children of this process."""
        return cls(memory_group_of(os.getpid()))

    def snapshot(self) -> None:
        """Forget what has happened so far: call it when new processes start."""
        self._drain()
        self._killed.clear()
        self._before = read_group(self._group).kills if self._group else 0

    def evidence(self, pid: int, rss: Bytes | None) -> MemoryEvidence | None:
        """Why the SIGKILL of `pid`, since the snapshot, was an OOM kill; None when nothing says so.

        The kernel's line names the process. Where it cannot be read, the cgroup's counter has to do, less the kills
        that the kernel's log gives to other processes.
        """
        self._drain()
        reading = read_group(self._group) if self._group else GroupReading(0, None, None)
        kill = self._killed.get(pid) if self._pids_compare else None
        if kill is not None:
            limit, usage = (reading.limit, reading.usage) if kill.by == "cgroup" else read_machine()
            return MemoryEvidence(by=kill.by, limit=limit, usage=usage, rss=kill.rss or rss, line=kill.line)
        explained = len(self._killed) if self._pids_compare else 0
        new = reading.kills - self._before
        if self._group is None or new <= explained:
            return None
        line = f"oom_kill of the memory cgroup went from {self._before} to {reading.kills}"
        return MemoryEvidence(by="cgroup", limit=reading.limit, usage=reading.usage, rss=rss, line=line)

    def close(self) -> None:
        if self._kmsg is not None:
            os.close(self._kmsg)
            self._kmsg = None

    def _drain(self) -> None:
        lines = []
        while self._kmsg is not None:
            try:
                lines.append(parse_kmsg_record(os.read(self._kmsg, _RECORD)))
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before we read them; the next read goes on after them
                continue
            except OSError:
                self.close()
        self._killed.update({kill.pid: kill for kill in parse_kills(lines)})


def prefer_in_oom(pid: int, by: int = 500) -> None:
    """Have the kernel kill `pid` before this process when memory runs out, by so many thousandths of the memory.

    Less than this process has is never asked for, so nobody needs a privilege. Where it is refused nothing changes.
    """
    try:
        own = int(_read("/proc/self/oom_score_adj") or 0)
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(min(1000, own + by)))
    except (OSError, ValueError):
        return  # it has ended already, or /proc is not ours to write


def read_machine() -> tuple[Bytes | None, Bytes | None]:
    """(memory, memory in use) of the machine."""
    rows = (line.split() for line in _read("/proc/meminfo").splitlines())
    figures = {row[0]: int(row[1]) * 1024 for row in rows if len(row) >= 2}
    total, free = figures.get("MemTotal:"), figures.get("MemAvailable:")
    return total, None if total is None or free is None else total - free


def _open_kmsg() -> int | None:
    """At its end: only what comes later is of interest. None without permission (dmesg_restrict, containers)."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return None
    return fd


def _own_pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
