"""What the benchmarks read of processes in /proc, and how they end those that they started. Nothing about launchers."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _fields(pid: int) -> list[str]:
    """Fields 3, 4, 5 … of /proc/PID/stat; the name (field 2) may contain anything, so what follows it is taken."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    return int(_fields(pid)[1])


def cpu_seconds(pid: int) -> float:
    """User and system time that `pid` has used so far, its ended children left out."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    return int(_fields(pid)[21]) * _PAGE


def cpu_share(pids: Iterable[int], seconds: float) -> dict[int, float]:
    """Percent of one core that each of `pids` uses over `seconds` from now."""
    before = {pid: cpu_seconds(pid) for pid in pids}
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return {pid: 100 * (cpu_seconds(pid) - used) / elapsed for pid, used in before.items()}


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """`pid` and everything below it, parents first."""
    parents = {}
    for other in all_pids():
        try:
            parents[other] = parent_of(other)
        except (OSError, IndexError):
            continue  # ended meanwhile
    family = [pid]
    for member in family:  # grows while it is walked
        family.extend(child for child, parent in parents.items() if parent == member)
    return family


def marked(marker: str) -> list[int]:
    """Live processes whose environment contains `marker`, wherever they have been re-parented to."""
    found = []
    for pid in all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            alive = _fields(pid)[0] not in ("Z", "X")
        except (OSError, IndexError):
            continue
        if alive and marker.encode() in environment and pid != os.getpid():
            found.append(pid)
    return found


def kill(pids: Iterable[int], by: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, by)
        except ProcessLookupError:
            continue


def kill_marked(marker: str, within: float = 5.0) -> list[int]:
    """Kill everything that carries `marker`; what is still there after `within` seconds is returned."""
    deadline = time.monotonic() + within
    while (left := marked(marker)) and time.monotonic() < deadline:
        kill(left)
        time.sleep(0.02)
    return left
