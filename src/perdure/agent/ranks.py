"""Starting this node's ranks and stores: from the fork server where there is a warm one, else spawned.

One door for `loop`; it knows how a process is started and where its output goes, not when or why.
"""

import os
from collections.abc import Mapping
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from perdure.agent.config import AgentConfig
from perdure.agent.launch import base_env, launch_for, spawn_argv, worker_env
from perdure.agent.output import Outputs, WorkerOutput
from perdure.agent.standby import ForkServer, spawn_store
from perdure.errors import HostError, WireError
from perdure.host.interfaces import interface_of
from perdure.host.memory import OomWatch
from perdure.host.numa import cpus_for
from perdure.host.processes import Children
from perdure.vocab.event import MemoryEvidence, WorkerError
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Rank
from perdure.wire.messages import Entry, ForkRequest, Orders
from perdure.wire.page import HeartbeatPage
from perdure.wire.tcp import connect

T = TypeVar("T")
DRAIN_SECONDS = 0.2
"""How long the last output of a worker that failed by itself is waited for before its end is reported."""


class RankTag(msgspec.Struct, frozen=True):
    """What `Children` says with the end of a worker."""

    generation: GenerationNumber
    local_rank: int
    rank: Rank
    forked: bool = False


class StoreTag(msgspec.Struct, frozen=True):
    generation: GenerationNumber


class Ranks:
    """The processes of one node."""

    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        page: HeartbeatPage,
        children: Children,
        group: TaskGroup,
        memory_door: str,
    ) -> None:
        self._config, self._page, self._children = config, page, children
        self._memory_door = memory_door
        self._environ = environ
        interface = interface_of(config.address)
        # Nothing for one machine; and an interface named lo that holds a routed address has 127.0.0.1 first.
        self._env = base_env(config, environ, None if interface == "lo" else interface)
        self._outputs = Outputs(config, group)
        self._open: dict[int, WorkerOutput] = {}
        self._oom = OomWatch.here()
        self.fork_server: ForkServer | None = None
        """The warm one; None: spawn."""
        self.store_pid = 0

    async def start_fork_server(self) -> ForkServer:
        """A new fork server, not yet warm. Raises HostError."""
        server = ForkServer()
        await server.start(self._config, self._env)
        return server

    async def start_rank(self, orders: Orders, local_rank: int) -> tuple[int, RankTag]:
        """(pid, tag) of one worker, watched from now on. Raises HostError."""
        assert orders.assignment is not None
        member = orders.assignment.member(self._config.node)
        assert member is not None
        tag = RankTag(orders.generation, local_rank, Rank(member.first_rank + local_rank))
        output = self._outputs.open(orders.restarts, orders.generation, local_rank, tag.rank)
        self._page.clear(local_rank)
        env = worker_env(self._config, orders, local_rank, output.error_file, self._environ)
        env["PERDURE_MEMORY"] = self._memory_door
        try:
            pid = await self._fork(tag, env, output)
            if pid is None:
                pid = await self._spawn(tag, env, output)
            else:
                tag = msgspec.structs.replace(tag, forked=True)
        except BaseException:
            await output.finish(0.0)
            raise
        output.close_child_ends()
        self._open[pid] = output
        self._children.adopt(pid, tag)
        return pid, tag

    async def _fork(self, tag: RankTag, env: dict[str, str], output: WorkerOutput) -> int | None:
        """The pid of a forked worker; None: there is no fork server, or it has just died."""
        server = self.fork_server
        if server is None or not server.is_alive():
            return None
        request = ForkRequest(
            id=0,
            launch=launch_for(self._config, tag.local_rank),
            env=env,
            slot=tag.local_rank,
            generation=tag.generation,
            cpus=self._cpus(tag.local_rank),
        )
        try:
            return await server.fork(request, (output.stdout_fd, output.stderr_fd, self._page.fd))
        except HostError:
            if server.is_alive():
                raise
            return None

    async def _spawn(self, tag: RankTag, env: dict[str, str], output: WorkerOutput) -> int:
        config, cpus = self._config, self._cpus(tag.local_rank)
        argv = spawn_argv(config, tag.local_rank, tag.generation, self._page.fd)
        fds = () if config.launch.entry is Entry.PROGRAM else (self._page.fd,)
        return await self._children.spawn(
            argv, {**self._env, **env}, None, output.stdout_fd, output.stderr_fd, fds, cpus
        )

    def _cpus(self, local_rank: int) -> tuple[int, ...]:
        if self._config.numa_binding is None:
            return ()
        visible = self._environ.get("CUDA_VISIBLE_DEVICES")
        return cpus_for(self._config.numa_binding, local_rank, self._config.slots, visible)

    async def start_store(self, generation: GenerationNumber) -> tuple[int, Address]:
        """(pid, address) of a store that listens, watched from now on. Raises HostError."""
        host, port = self._config.address, self._config.master_port
        bound = await self._fork_store(host, port) or await spawn_store(self._config, self._env, host, port)
        pid, port = bound
        self._children.adopt(pid, StoreTag(generation))
        self.store_pid = pid
        return pid, Address(self._config.master_addr or host, port)

    async def _fork_store(self, host: str, port: int) -> tuple[int, int] | None:
        server = self.fork_server
        if server is None or not server.is_alive():
            return None
        try:
            return await server.start_store(host, port)
        except HostError:
            if server.is_alive():
                raise
            return None

    async def reach_store(self, store: Address, seconds: float) -> None:
        """Raises HostError where the store cannot be connected to: its clients would try for half an hour."""
        try:
            with anyio.fail_after(seconds):
                await anyio.aclose_forcefully(await connect(store, None))
        except (TimeoutError, WireError) as problem:
            why = f"no answer within {seconds:g} s" if isinstance(problem, TimeoutError) else str(problem)
            raise HostError(
                f"the generation's store at {store} cannot be reached from {self._config.node} ({why});"
                " open all ports between the nodes"
            ) from None

    async def end_output(self, pid: int, *, wait: bool) -> tuple[str, WorkerError | None]:
        """(last lines of stderr, exception) of a worker that has ended."""
        output = self._open.pop(pid, None)
        if output is None:
            return "", None
        await output.finish(DRAIN_SECONDS if wait else 0.0)
        return output.tail(), read_error(output.error_file)

    def memory_evidence(self, pid: int, rss: int | None) -> MemoryEvidence | None:
        """Why a SIGKILL was the kernel's, if it was."""
        return self._oom.evidence(pid, rss)

    def forget_memory_events(self) -> None:
        """Call when new workers start: what killed the last ones is history."""
        self._oom.snapshot()

    def sweep(self) -> set[int]:
        """Kill whatever dead workers have left behind (data loader children that left their group); gives the dying."""
        server = self.fork_server
        spare = {self.store_pid} | self._children.pids
        if server is not None:
            spare |= {server.pid} | server.parked
        return self._children.sweep(spare)

    async def close(self) -> None:
        if self.fork_server is not None:
            await self.fork_server.close()
        await self._outputs.close()
        self._oom.close()


class _ErrorFile(msgspec.Struct, frozen=True):
    """Our own part of an error file; see `trainer.failure`."""

    type: str
    message: str
    where: str
    traceback: str


class _TorchExtra(msgspec.Struct, frozen=True):
    py_callstack: str = ""


class _TorchMessage(msgspec.Struct, frozen=True):
    message: str = ""
    extraInfo: _TorchExtra = _TorchExtra()  # noqa: N815 - torchrun's name


class _TorchFile(msgspec.Struct, frozen=True):
    message: _TorchMessage | str = ""


def read_error(path: str) -> WorkerError | None:
    """The exception in an error file and the one beside it that Perdure writes; None where there is none."""
    if not path:
        return None
    ours = _read(f"{path}.perdure", _ErrorFile)
    if ours is not None:
        return WorkerError(type=ours.type, message=ours.message, where=ours.where, traceback=ours.traceback)
    torch = _read(path, _TorchFile)
    if torch is None:
        return None
    if isinstance(torch.message, str):
        return WorkerError(type="unknown", message=torch.message, where="unknown", traceback="")
    kind, _, text = torch.message.message.partition(": ")
    return WorkerError(type=kind, message=text, where="unknown", traceback=torch.message.extraInfo.py_callstack)


def _read(path: str, kind: type[T]) -> T | None:
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None  # the worker died while it wrote: what is known of its end has to do
