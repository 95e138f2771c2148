"""This machine as a place where Perdure's own programs run: started, watched, started again when they die.

It knows programs and processes, not jobs: what a program's end means is told by its exit code (`Program.final_codes`).
"""

import os
import signal
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec

from perdure.host.processes import Children, start_process

FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0
"""Seconds before a program that died is started again; doubled each time while it dies young."""
YOUNG = 10.0
SWEEP_TRIES, SWEEP_WAIT = 100, 0.02


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One of Perdure's own programs."""

    name: str
    argv: tuple[str, ...]
    """`{fd}` in it is replaced by the number of the descriptor from which the program reads its configuration."""
    config: bytes
    final_codes: frozenset[int]
    """Exit codes after which it is not started again."""
    death_signal: int = signal.SIGKILL
    """What the kernel sends it when this process dies: SIGTERM for one that must end what it has started."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """How one life of a program ended."""

    program: Program
    pid: int
    exit_code: int | None
    signal: int | None
    seconds: float


class LocalMachine:
    """Keeps programs alive. When this process dies the kernel ends them (`Program.death_signal`)."""

    def __init__(
        self,
        children: Children,
        env: Mapping[str, str],
        *,
        stdout_fd: int | None = None,
        stderr_fd: int | None = None,
        on_end: Callable[[Life], Program | None],
    ) -> None:
        """`on_end` is asked after each life: the program to start next in its place, None for no more."""
        self._children, self._env, self._on_end = children, env, on_end
        self._stdout_fd, self._stderr_fd = stdout_fd, stderr_fd
        self._running: dict[int, tuple[Program, float]] = {}
        self._delays: dict[str, float] = {}
        self._closing = False
        self.changed = anyio.Event()

    @property
    def running(self) -> Mapping[str, int]:
        """Pid by name."""
        return {program.name: pid for pid, (program, _) in self._running.items()}

    def start(self, program: Program) -> int:
        """Start `program` now; gives its pid. Raises HostError."""
        fd = os.memfd_create(f"perdure-{program.name}", 0)
        try:
            os.write(fd, program.config)
            os.lseek(fd, 0, os.SEEK_SET)
            argv = [part.replace("{fd}", str(fd)) for part in program.argv]
            pid = start_process(
                argv,
                self._env,
                None,
                self._stdout_fd,
                self._stderr_fd,
                (fd,),
                death_signal=program.death_signal,
            )
        finally:
            os.close(fd)
        self._running[pid] = (program, time.monotonic())
        self._children.adopt(pid, program.name)
        return pid

    async def watch(self) -> None:
        """Take in ends and start again, until cancelled."""
        async with anyio.create_task_group() as group:
            async for ended in self._children.exits:
                if ended.pid not in self._running:
                    continue
                program, began = self._running.pop(ended.pid)
                life = Life(
                    program=program,
                    pid=ended.pid,
                    exit_code=ended.exit_code,
                    signal=ended.signal,
                    seconds=time.monotonic() - began,
                )
                self._wake()
                group.start_soon(self._next_life, life)

    async def _next_life(self, life: Life) -> None:
        await self._sweep()
        following = self._on_end(life)
        self._wake()
        if following is None or self._closing:
            return
        name = following.name
        delay = FIRST_DELAY if life.seconds > YOUNG else self._delays.get(name, FIRST_DELAY)
        self._delays[name] = min(delay * 2, LONGEST_DELAY)
        await anyio.sleep(delay)
        if not self._closing:
            self.start(following)
            self._wake()

    async def _sweep(self) -> None:
        """End what a dead program has left: as its children's subreaper we have inherited them."""
        for _ in range(SWEEP_TRIES):
            if not self._children.sweep(set(self._running)):
                return
            await anyio.sleep(SWEEP_WAIT)

    def signal(self, name: str, number: int) -> None:
        pid = self.running.get(name)
        if pid is not None:
            self._children.signal(pid, number)

    def stop_restarting(self) -> None:
        """From now on whatever ends stays ended."""
        self._closing = True

    async def close(self, kill: int, seconds: float) -> None:
        """End everything: signal `kill`, and SIGKILL for what is left after `seconds`."""
        self._closing = True
        for name in self.running:
            self.signal(name, kill)
        with anyio.move_on_after(seconds):
            while self._running:
                changed = self.changed
                await changed.wait()
        await self._sweep_all()

    async def _sweep_all(self) -> None:
        for _ in range(SWEEP_TRIES):
            if not self._children.sweep(set()):
                return
            await anyio.sleep(SWEEP_WAIT)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()
