"""Who owns a folder of slots: a lock held for life, what it says of its owner, and what dead owners have left.

The kernel frees the lock with the process, however it ends; the text in it tells whether its job can still come back.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from perdure.errors import HostError
from perdure.host.proc import boot_id, read_stat
from perdure.vocab.ids import Incarnation, JobId

NAME = "lock"
_TRIES, _WAIT = 100, 0.02
"""A cleaner of another job holds the lock for the moment in which it looks."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What a lock file says."""

    job: JobId
    server: Incarnation
    owners: tuple[Incarnation, ...] = ()
    """The job is not over while one of them lives."""


def take_lock(folder: str, owner: Owner) -> int:
    """Make `folder` ours; gives the descriptor that holds the lock. Raises HostError where somebody else has it."""
    path = os.path.join(folder, NAME)
    for _ in range(_TRIES):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = _lock(path, os.O_CREAT)
        if fd is not None:
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(owner), 0)
            return fd
        time.sleep(_WAIT)
    holder = _read_owner(path)
    who = "another process" if holder is None else f"process {holder.server.pid}"
    raise HostError(f"{who} is the memory server of {folder} already; end it, or give this node another name")


def remove_dead(base: str, spare: str) -> tuple[str, ...]:
    """Remove the folders BASE/JOB/NODE of runs that cannot come back, but never `spare`; gives what was removed.

    One is dead when nobody holds its lock, and neither its server nor any of its owners is alive in this boot.
    """
    gone = []
    for folder in _folders(base):
        if os.path.realpath(folder) == os.path.realpath(spare):
            continue
        with _locked(os.path.join(folder, NAME)) as free:
            if free and _is_over(_read_owner(os.path.join(folder, NAME))):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
        try:
            os.rmdir(os.path.dirname(folder))
        except OSError:
            continue  # other nodes of that job are still in it
    return tuple(gone)


def _is_over(owner: Owner | None) -> bool:
    return owner is not None and not any(is_alive(process) for process in (owner.server, *owner.owners))


def is_alive(process: Incarnation) -> bool:
    """Whether this very life goes on, on this machine and in this boot."""
    stat = read_stat(process.pid) if process.boot_id == boot_id() else None
    return stat is not None and stat.started_ticks == process.started_ticks and stat.state not in ("Z", "X")


def _folders(base: str) -> list[str]:
    found = []
    for job in _folders_in(base):
        found += [folder for folder in _folders_in(job) if os.path.isfile(os.path.join(folder, NAME))]
    return found


def _folders_in(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


@contextmanager
def _locked(path: str) -> Iterator[bool]:
    fd = _lock(path, 0)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _lock(path: str, flags: int) -> int | None:
    """None: somebody has it, or the file was removed between opening and locking."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if flags:
            raise HostError(f"{path} cannot be opened: {os.strerror(exc.errno or 0).lower()}") from exc
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = os.stat(path)
        if (here.st_dev, here.st_ino) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _read_owner(path: str) -> Owner | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(65536), type=Owner)
    except (OSError, msgspec.DecodeError):
        return None
