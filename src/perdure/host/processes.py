"""The processes that the agent answers for: starts and signals them, tells when they end, leaves no descendant.

Every process is held by a pidfd, so that a pid that the kernel has given to someone else is never signalled. Knows
nothing of ranks, generations or why a process should end.
"""

import asyncio
import ctypes
import errno
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from perdure.errors import HostError
from perdure.host.proc import children_of, descendants_of, read_stat, read_state

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_IGNORABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_ORPHANS_EVERY = 1.0
_NOT_YET_OURS_RETRY, _NOT_YET_OURS_TRIES = 0.01, 100


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A process ended. Neither code nor signal: it was not ours to wait for, and is gone."""

    pid: int
    tag: Any
    exit_code: int | None
    signal: int | None


def set_subreaper() -> None:
    """Make orphans below this process its children: forked workers, and what dead workers leave behind."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise HostError(f"the kernel refused to make the agent a child subreaper: {os.strerror(ctypes.get_errno())}")


def start_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None = None,
    stdout_fd: int | None = None,
    stderr_fd: int | None = None,
    pass_fds: Sequence[int] = (),
    cpus: Sequence[int] = (),
    *,
    death_signal: int = signal.SIGKILL,
) -> int:
    """Start `argv` in a session of its own and give its pid; the kernel kills it when this process dies.

    `death_signal`: what the kernel sends it then instead, where it must still clean up. None for a stream: the agent's
    own; its input is empty. Must be called in the main thread: the kernel takes the end of the thread that forked for
    the death of the parent. The caller waits for the process. Raises HostError.
    """
    if unusable := set(cpus) - os.sched_getaffinity(0):
        raise HostError(f"{argv[0]} cannot be bound to processors {sorted(unusable)}: this process may not use them")
    if cwd is not None and not os.path.isdir(cwd):
        raise HostError(f"{argv[0]} cannot be started: its working directory {cwd} does not exist here")
    try:
        child = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=stderr_fd,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=_before_exec(os.getpid(), cpus, death_signal),  # noqa: PLW1509 - it takes no lock; nothing else sets PDEATHSIG
        )
    except OSError as error:
        raise HostError(_why_not_started(argv[0], error)) from error
    except subprocess.SubprocessError as error:
        raise HostError(f"{argv[0]} cannot be started: its process could not be prepared ({error})") from error
    child.returncode = 0  # else Popen would reap it when it is collected, and its exit code were lost
    return child.pid


class Children:
    """The registry of processes that are waited for. Needs a running event loop; `close()` when done.

    Children of this process that nobody adopts are reaped too, but only once they have been dead for `orphan_age`
    seconds: a forked worker that dies at once must still be there when it is adopted.
    """

    def __init__(self, orphan_age: float = 5.0) -> None:
        send, receive = anyio.create_memory_object_stream[Ended](math.inf)
        self.exits: MemoryObjectReceiveStream[Ended] = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, tuple[int, Any]] = {}  # pid -> (pidfd, tag)
        self._orphan_age = orphan_age
        self._dead_since: dict[int, float] = {}
        self._timer = self._loop.call_later(_ORPHANS_EVERY, self._reap_orphans)

    @property
    def pids(self) -> frozenset[int]:
        """Of processes whose end has not been told yet."""
        return frozenset(self._held)

    def adopt(self, pid: int, tag: Any) -> None:
        """Watch a child (or one that is about to become one); its end arrives in `exits` with `tag`."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._send.send_nowait(Ended(pid=pid, tag=tag, exit_code=None, signal=None))
            return
        except OSError as error:
            raise HostError(f"process {pid} cannot be watched: {error.strerror}; raise `ulimit -n`") from error
        self._held[pid] = (pidfd, tag)
        self._loop.add_reader(pidfd, self._ended, pid, 0)

    async def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        stdout_fd: int | None,
        stderr_fd: int | None,
        pass_fds: Sequence[int] = (),
        cpus: Sequence[int] = (),
    ) -> int:
        """As `start_process`; adopt the pid next."""
        return start_process(argv, env, cwd, stdout_fd, stderr_fd, pass_fds, cpus)

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to an adopted process and its process group. False when it has ended already."""
        held = self._held.get(pid)
        if held is None:
            return False
        # Its end has not been collected, so neither its pid nor its group's number can belong to anyone else. Each
        # process gets the signal once: many programs take the second SIGTERM for "at once".
        leads = _group_of(pid) == pid
        reached = leads or _send_by_pidfd(held[0], number)
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):  # nobody is (left) in a group of its number
            return reached and not leads
        return reached

    def sweep(self, spare: Set[int]) -> set[int]:
        """SIGKILL every descendant that is neither in `spare` nor below one of those; gives the pids still dying.

        Those that have left their process group or session are found too. When it gives an empty set, none is left.
        """
        killed: set[int] = set()
        while True:  # ends: whoever has been sent SIGKILL cannot fork any more
            below = descendants_of(os.getpid(), spare)
            found = {pid: stat.started_ticks for pid, stat in below.items() if pid not in killed}
            if not found:
                return {pid for pid in killed if read_state(pid) not in (None, "Z", "X")}
            for pid, started_ticks in found.items():
                kill_process(pid, started_ticks)
            killed |= found.keys()

    def close(self) -> None:
        """Stop watching. Ends nobody; ends that have not been received from `exits` are forgotten."""
        self._timer.cancel()
        for pidfd, _ in self._held.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._held.clear()
        self._send.close()
        self.exits.close()

    def _ended(self, pid: int, tries: int) -> None:
        if pid not in self._held:
            return
        pidfd, tag = self._held[pid]
        self._loop.remove_reader(pidfd)
        ending = wait_for(pidfd)
        if ending is None and read_state(pid) is not None and tries < _NOT_YET_OURS_TRIES:
            # The fork server's helper between us has not ended yet; then the dead worker becomes our child.
            self._loop.call_later(_NOT_YET_OURS_RETRY, self._ended, pid, tries + 1)
            return
        del self._held[pid]
        os.close(pidfd)
        exit_code, number = ending or (None, None)
        self._send.send_nowait(Ended(pid=pid, tag=tag, exit_code=exit_code, signal=number))

    def _reap_orphans(self) -> None:
        self._timer = self._loop.call_later(_ORPHANS_EVERY, self._reap_orphans)
        if not _has_dead_child():
            self._dead_since.clear()
            return
        now = time.monotonic()
        dead = {pid for pid in children_of(os.getpid()) if pid not in self._held and read_state(pid) == "Z"}
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        for pid, since in self._dead_since.items():
            if now - since >= self._orphan_age:
                os.waitpid(pid, os.WNOHANG)


def wait_for(pidfd: int) -> tuple[int | None, int | None] | None:
    """(exit code, signal) of a child that has ended, which is then gone; None when it is not our child."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return (result.si_status, None) if result.si_code == os.CLD_EXITED else (None, result.si_status)


def kill_process(pid: int, started_ticks: int | None = None) -> None:
    """SIGKILL `pid` if it is still the process that started then; nothing when it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        stat = read_stat(pid)
        if stat is not None and started_ticks in (None, stat.started_ticks):
            _send_by_pidfd(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _before_exec(parent: int, cpus: Sequence[int], death_signal: int) -> Callable[[], None]:
    """What the child does before exec; it must neither import nor lock."""
    set_parent_death_signal, number = _LIBC.prctl, int(death_signal)

    def prepare() -> None:
        set_parent_death_signal(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        for ignorable in _IGNORABLE:  # "ignored" would outlive exec
            signal.signal(ignorable, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare


def _why_not_started(program: str, error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return f"{program} cannot be started: there is no such program here; check its path, or PATH"
        case PermissionError():
            return f"{program} cannot be started: permission denied; make it executable (chmod +x)"
        case OSError(errno=errno.ENOEXEC):
            return f"{program} cannot be started: it is no program; a script needs a first line like #!/bin/sh"
        case _:
            return f"{program} cannot be started: {error.strerror or error}"


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _send_by_pidfd(pidfd: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def _has_dead_child() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
