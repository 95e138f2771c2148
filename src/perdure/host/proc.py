"""Processes, as /proc shows them: state, age, work done, children. Knows nothing of what they are for."""

import os
from collections.abc import Set
from functools import cache

import msgspec

from perdure.errors import HostError
from perdure.vocab.ids import Incarnation
from perdure.vocab.units import Bytes, Seconds

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


class ProcessReading(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment."""

    state: str
    """Letter of /proc: R, S, D, T (stopped), t (traced), Z …"""
    started_ticks: int
    parent: int
    cpu: Seconds
    """User and system time of all its threads, without its children."""
    minor_faults: int
    major_faults: int
    io: Bytes | None
    """Read from and written to storage; None where /proc does not let us read it."""
    rss: Bytes
    children: int


class Stat(msgspec.Struct, frozen=True):
    """What /proc/PID/stat says of a process."""

    state: str
    parent: int
    minor_faults: int
    major_faults: int
    cpu: Seconds
    started_ticks: int
    rss: Bytes


def parse_stat(text: bytes) -> Stat:
    """Read one line of /proc/PID/stat. The name in parentheses may itself contain spaces and parentheses."""
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        cpu=(int(fields[11]) + int(fields[12])) / _TICKS,
        started_ticks=int(fields[19]),
        rss=int(fields[21]) * _PAGE,
    )


def read_stat(pid: int) -> Stat | None:
    """None when the process is gone."""
    text = _read(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def read_state(pid: int) -> str | None:
    """The state letter alone; None when the process is gone. About 10 us, for 20 reads a second of every worker."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    at = text.rindex(b")") + 2
    return chr(text[at])


def read_process(pid: int) -> ProcessReading | None:
    """None when the process is gone. About 0.1 ms; a few ms where the kernel does not list children."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return ProcessReading(
        state=stat.state,
        started_ticks=stat.started_ticks,
        parent=stat.parent,
        cpu=stat.cpu,
        minor_faults=stat.minor_faults,
        major_faults=stat.major_faults,
        io=parse_io(_read(f"/proc/{pid}/io")),
        rss=stat.rss,
        children=len(children_of(pid)),
    )


def parse_io(text: bytes) -> int | None:
    """Bytes read from and written to storage, of /proc/PID/io; None for an empty text."""
    fields = dict(line.split(b": ") for line in text.splitlines() if b": " in line)
    if b"read_bytes" not in fields:
        return None
    return int(fields[b"read_bytes"]) + int(fields[b"write_bytes"])


@cache
def boot_id() -> str:
    """Different after every boot of this machine."""
    return _read("/proc/sys/kernel/random/boot_id").decode().strip()


def incarnation(pid: int) -> Incarnation:
    """The life that `pid` is in now. Raises HostError when there is no such process."""
    stat = read_stat(pid)
    if stat is None:
        raise HostError(f"process {pid} is gone, so its start time cannot be read")
    return Incarnation(pid=pid, started_ticks=stat.started_ticks, boot_id=boot_id())


def children_of(pid: int) -> tuple[int, ...]:
    """The children of all threads of `pid`, zombies included; empty when it is gone."""
    if not _has_children_file():
        return tuple(_children_by_parent().get(pid, ()))
    return _listed_children(pid)


def descendants_of(pid: int, spare: Set[int] = frozenset()) -> dict[int, Stat]:
    """Every process below `pid`, with its reading. Processes in `spare`, and what is below them, are left out."""
    table = None if _has_children_file() else _children_by_parent()
    found: dict[int, Stat] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child in _listed_children(parent) if table is None else table.get(parent, ()):
            stat = None if child in spare or child in found else read_stat(child)
            if stat is not None:
                found[child] = stat
                todo.append(child)
    return found


@cache
def _has_children_file() -> bool:
    """False on a kernel without CONFIG_PROC_CHILDREN, where all of /proc must be searched instead."""
    me = os.getpid()
    return os.path.exists(f"/proc/{me}/task/{me}/children")


def _listed_children(pid: int) -> tuple[int, ...]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return ()
    return tuple(int(child) for t in threads for child in _read(f"/proc/{pid}/task/{t}/children").split())


def _children_by_parent() -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        stat = read_stat(int(name)) if name.isdecimal() else None
        if stat is not None:
            table.setdefault(stat.parent, []).append(int(name))
    return table


def _read(path: str) -> bytes:
    """The file's bytes; empty when the process has gone or the file may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:  # ESRCH: it ended between open and read
        return b""
    finally:
        os.close(fd)
