"""The agent's loop: readings and orders in, `decide.act`, actions out. No decisions.

One process per node. It holds the heartbeat page, the workers' pidfds and their output; it never imports torch.
"""

import os
import signal
import ssl
import time
from collections.abc import Mapping

import anyio
import msgspec
from anyio.abc import TaskGroup

from perdure.agent import decide
from perdure.agent import state as facts
from perdure.agent.activation import Activation, MemoryTag
from perdure.agent.config import LEAVE_SIGNAL, STAY_SIGNAL, AgentConfig
from perdure.agent.link import ControlLink, JoinRefusedError
from perdure.agent.peers import Peers
from perdure.agent.progress import Progress, Work, seen, wants_evidence, worked
from perdure.agent.ranks import Ranks, RankTag, StoreTag
from perdure.agent.state import (
    AgentAction,
    AgentState,
    AskPeers,
    EndStore,
    Exit,
    Signal,
    StartStore,
    StartWorkers,
    StopAfter,
    Tell,
    WorkerState,
)
from perdure.agent.warm import keep_warm, say
from perdure.errors import AccessDeniedError, ConfigError, HostError, UntrustedError, WireError
from perdure.host.memory import prefer_in_oom
from perdure.host.proc import ProcessReading, incarnation, read_process, read_stat
from perdure.host.processes import Children, Ended, set_subreaper
from perdure.vocab.event import AnyEvent, NodeGathered, StartFailed, StoreLost
from perdure.vocab.ids import GenerationNumber
from perdure.vocab.node import Node
from perdure.wire.channel import Channel, RefusedError, listen, serve
from perdure.wire.messages import Duty, Orders
from perdure.wire.page import HeartbeatPage
from perdure.wire.tokens import peer_token

IDLE_POLL = 0.5
"""Seconds between looks at the clock while no worker runs here."""
SWEEP_TRIES, SWEEP_WAIT = 20, 0.01
MEMORY_GRACE = 4.0
"""Seconds that the memory server has to finish its work when this node ends; scripts wait in `close()` for more."""
LONGEST_END = 10
"""Seconds (SIGALRM) after which an agent that was told to go ends however it stands; its workers then end with it."""
STAY_WITHIN = 2.0
"""Seconds in which a launcher that was sent SIGTERM too has told its agents."""
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h: control was never reached


class Agent:
    """One life of one node."""

    def __init__(
        self,
        config: AgentConfig,
        environ: Mapping[str, str],
        *,
        token: str,
        version: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._config, self._environ, self._token, self._version = config, environ, token, version
        self._tls, self._peer_token = tls, peer_token(token)
        self._page = HeartbeatPage(config.slots)
        self._state = AgentState(node=config.node, slots=config.slots)
        self._kick = anyio.Event()
        self._ended = anyio.Event()
        self._exit = Exit(1, "the agent has not run")
        self._peers = Peers(config, self._peer_token, self._read_state, self._write_state)
        self._rss: dict[int, int] = {}
        self._leaving = False
        """Told to go, so no other life of this node follows."""

    async def run(self) -> int:
        """Live until the job's end, or until fenced or told to leave; gives the exit code."""
        set_subreaper()
        self._children = Children()
        try:
            async with anyio.create_task_group() as group:
                self._group: TaskGroup = group
                self._memory = Activation(self._config, self._token, self._environ, self._children, self._attempt)
                self._memory.open()
                door = self._memory.name
                self._ranks = Ranks(self._config, self._environ, self._page, self._children, group, door)
                listener = await listen(self._config.address, 0)
                self._link = self._make_link(listener.address.port)
                for task in (self._follow_control, self._watch, self._follow_exits, self._keep_warm):
                    group.start_soon(task)
                group.start_soon(self._link.run_reports)
                group.start_soon(self._wait_for_signals)
                group.start_soon(lambda: serve(self._peers.answer, listener, token=self._peer_token))
                await self._ended.wait()
                await self._clean_up()
                group.cancel_scope.cancel()
        finally:
            self._children.close()
            self._page.close()
        return self._exit.code

    def _make_link(self, peer_port: int) -> ControlLink:
        config = self._config
        node = Node(
            id=config.node,
            incarnation=incarnation(os.getpid()),
            host=os.uname().nodename,
            address=config.address,
            peer_port=peer_port,
            slots=config.slots,
            version=self._version,
            world=config.world,
            order=config.order,
            standby=config.standby,
        )
        return ControlLink(
            Channel(config.control, self._token, self._tls),
            node,
            config.job,
            on_orders=self._take_orders,
            on_answer=self._take_answer,
            on_fenced=self._take_fence,
            say_beat=lambda: decide.beat(self._state),
        )

    # --- facts in ----------------------------------------------------------------------------------------------------

    def _take_orders(self, orders: Orders) -> None:
        self._link.set_lease(orders.rules.lease)
        self._set(facts.ordered(self._state, orders))

    def _take_answer(self, sent_at: float) -> None:
        self._state = facts.answered(self._state, sent_at)

    async def _ask_peers(self) -> None:
        reason = await self._peers.ask()
        if reason is not None:
            self._take_fence(reason)

    def _take_fence(self, reason: str) -> None:
        self._set(facts.fence(self._state, reason))

    def _attempt(self) -> int:
        return self._state.orders.attempt if self._state.orders is not None else 0

    def _read_state(self) -> AgentState:
        return self._state

    def _write_state(self, state: AgentState) -> None:
        """Take in a fact from which nothing follows before the next tick."""
        self._state = state

    def _set(self, state: AgentState) -> None:
        """Take in a fact and do what follows from it."""
        self._state, actions = decide.act(state, time.monotonic())
        for action in actions:
            self._do(action)
        self._kick.set()

    async def _follow_control(self) -> None:
        try:
            await self._link.run_orders(self._config.join_timeout)
        except AccessDeniedError as problem:
            self._end(Exit(EXIT_USAGE, f"{problem}; every machine of the job must have the same PERDURE_TOKEN"))
        except (JoinRefusedError, RefusedError, UntrustedError) as problem:
            self._end(Exit(EXIT_USAGE, str(problem)))
        except WireError as problem:
            self._end(Exit(EXIT_UNAVAILABLE, str(problem)))

    async def _watch(self) -> None:
        """Read the page and the processes; also the tick by which limits and leases pass."""
        while not self._ended.is_set():
            self._kick = anyio.Event()
            pause = self._config.poll_seconds if self._state.alive() else IDLE_POLL
            with anyio.move_on_after(pause):
                await self._kick.wait()
            self._read_workers(time.monotonic())
            self._set(self._state)

    def _read_workers(self, now: float) -> None:
        for worker in self._state.alive():
            stat = read_stat(worker.pid)
            letter = stat.state if stat is not None else "X"
            if stat is not None:
                self._rss[worker.pid] = stat.rss
            progress = seen(worker.progress, self._page.read(worker.local_rank), letter, now)
            if self._state.orders is not None and wants_evidence(progress, now, self._state.orders.stalls):
                process = read_process(worker.pid)  # costs milliseconds where /proc lists no children (2026-11-30)
                if process is not None:
                    progress = worked(progress, _work_of(process), now)
            self._state = facts.changed(self._state, worker, progress=progress, state_letter=letter)

    async def _keep_warm(self) -> None:
        await keep_warm(self._config, self._ranks, self._link.tell, lambda: self._set(facts.warmed(self._state)))

    async def _follow_exits(self) -> None:
        async for ended in self._children.exits:
            if isinstance(ended.tag, RankTag):
                self._group.start_soon(self._take_exit, ended, ended.tag)
            elif isinstance(ended.tag, StoreTag):
                self._take_store_end(ended, ended.tag)
            elif isinstance(ended.tag, MemoryTag):
                self._memory.ended()

    async def _take_exit(self, ended: Ended, tag: RankTag) -> None:
        worker = self._state.workers.get(ended.pid)
        ours = worker is None or worker.killed_at is not None or worker.asked_at is not None
        memory = None
        if ended.signal == signal.SIGKILL and not ours:
            memory = self._ranks.memory_evidence(ended.pid, self._rss.get(ended.pid))
        failed = ended.signal is None and ended.exit_code != 0 and not ours
        tail, error = await self._ranks.end_output(ended.pid, wait=failed)
        worker = self._state.workers.get(ended.pid)
        if worker is not None and self._page.read(tag.local_rank).pid == ended.pid:
            now = time.monotonic()
            last = seen(worker.progress, self._page.read(tag.local_rank), "X", now)
            self._state = facts.changed(self._state, worker, progress=last)
        self._rss.pop(ended.pid, None)
        state, actions = decide.worker_ended(
            self._state,
            ended.pid,
            exit_code=ended.exit_code,
            signal=ended.signal,
            error=error if failed else None,
            memory=memory,
            log_tail=tail if failed or ended.signal is not None else "",
            now=time.monotonic(),
        )
        for action in actions:
            self._do(action)
        self._set(state)

    def _take_store_end(self, ended: Ended, tag: StoreTag) -> None:
        store = self._state.store
        unexpected = store is not None and store.pid == ended.pid and not store.ending
        self._ranks.store_pid = 0 if self._ranks.store_pid == ended.pid else self._ranks.store_pid
        if unexpected and self._state.fenced is None:
            self._link.tell(
                StoreLost(
                    id=facts.UNSENT,
                    at=time.monotonic(),
                    node=self._config.node,
                    generation=tag.generation,
                    exit_code=ended.exit_code,
                    signal=ended.signal,
                )
            )
        self._set(facts.store_ended(self._state, ended.pid))

    async def _wait_for_signals(self) -> None:
        """SIGTERM to an agent: this node leaves the job. The kernel sends it too when the launcher has died.

        A scheduler sends it to all processes at once: then the launcher, which stops the job in order, says: stay.
        """
        launcher, staying = os.getppid(), anyio.Event()
        with anyio.open_signal_receiver(signal.SIGTERM, LEAVE_SIGNAL, STAY_SIGNAL) as signals:  # type: ignore[arg-type]
            async for number in signals:
                if number == STAY_SIGNAL:
                    staying.set()
                elif os.getppid() != launcher:
                    self._leave("its launcher has died")
                elif number == LEAVE_SIGNAL:
                    self._leave("its launcher was told to end")
                else:
                    self._group.start_soon(self._leave_unless, staying)

    async def _leave_unless(self, staying: anyio.Event) -> None:
        with anyio.move_on_after(STAY_WITHIN):
            await staying.wait()
            return
        self._leave("its agent was sent SIGTERM")

    def _leave(self, reason: str) -> None:
        signal.alarm(LONGEST_END)
        self._leaving = True
        self._set(facts.fence(self._state, reason))

    # --- actions out -------------------------------------------------------------------------------------------------

    def _do(self, action: AgentAction) -> None:
        match action:
            case Signal():
                self._signal(action.pids, action.number)
            case StartStore():
                self._group.start_soon(self._start_store, action.generation)
            case EndStore():
                self._signal((action.pid,), signal.SIGKILL)
            case StartWorkers():
                self._group.start_soon(self._start_workers, action.orders)
            case Tell():
                self._tell(action.event)
            case AskPeers():
                self._group.start_soon(self._ask_peers)
            case StopAfter():
                self._page.stop_after(action.step)
            case Exit():
                self._end(action)

    def _signal(self, pids: tuple[int, ...], number: int) -> None:
        for pid in pids:
            self._children.signal(pid, number)

    def _tell(self, event: AnyEvent) -> None:
        if isinstance(event, NodeGathered):
            self._group.start_soon(self._tell_gathered, event)
        else:
            self._link.tell(event)

    async def _tell_gathered(self, event: NodeGathered) -> None:
        """Only when nothing of the workers is left: what a dead worker leaves behind may hold ports and memory."""
        for _ in range(SWEEP_TRIES):
            if not self._ranks.sweep():
                break
            await anyio.sleep(SWEEP_WAIT)
        self._link.tell(event)

    async def _start_store(self, generation: GenerationNumber) -> None:
        try:
            pid, address = await self._ranks.start_store(generation)
        except HostError as problem:
            self._start_failed(generation, str(problem))
            self._set(msgspec.structs.replace(self._state, store=None))
            return
        self._set(facts.store_listens(self._state, generation, pid, address))

    async def _start_workers(self, orders: Orders) -> None:
        self._page.stop_after(None)
        self._ranks.forget_memory_events()
        try:
            assert orders.store is not None
            await self._ranks.reach_store(orders.store, orders.rules.lease)
            async with anyio.create_task_group() as group:
                for local_rank in range(self._config.slots):
                    group.start_soon(self._start_worker, orders, local_rank)
        except* (HostError, ConfigError, WireError) as problems:
            self._start_failed(orders.generation, str(problems.exceptions[0]))
        self._set(facts.launched(self._state))

    async def _start_worker(self, orders: Orders, local_rank: int) -> None:
        pid, tag = await self._ranks.start_rank(orders, local_rank)
        prefer_in_oom(pid)  # rather than the memory server, which has what all ranks go back to
        worker = WorkerState(
            pid=pid,
            local_rank=local_rank,
            rank=tag.rank,
            generation=tag.generation,
            progress=Progress(since=time.monotonic()),
            forked=tag.forked,
        )
        self._set(facts.started(self._state, worker))

    def _start_failed(self, generation: GenerationNumber, reason: str) -> None:
        event = StartFailed(
            id=facts.UNSENT, at=time.monotonic(), node=self._config.node, generation=generation, reason=reason
        )
        self._link.tell(event)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, way: Exit) -> None:
        if not self._ended.is_set():
            self._exit = way
            self._ended.set()

    async def _clean_up(self) -> None:
        """Nothing of this node's processes is left when it returns (but what outlives SIGKILL)."""
        orders = self._state.orders
        if orders is None or orders.duty is not Duty.STOP:
            say(f"{self._config.node}: {self._exit.reason}")
        leaves = self._state.fenced is not None and not self._leaving
        with anyio.move_on_after(MEMORY_GRACE + 1.0, shield=True):
            # A life that is only fenced is followed by another on this node, which adopts the checkpoints.
            await self._memory.close(0.0 if leaves else MEMORY_GRACE)
        with anyio.move_on_after(4.0, shield=True):
            for pid in self._children.pids:
                self._children.signal(pid, signal.SIGKILL)
            await self._link.flush(1.0 if self._state.fenced is None else 0.2)
            await self._link.leave(self._exit.reason)
            await self._ranks.close()
            for _ in range(SWEEP_TRIES):
                if not self._children.sweep(set()):
                    break
                await anyio.sleep(SWEEP_WAIT)


def _work_of(process: ProcessReading) -> Work:
    return Work(
        cpu_seconds=process.cpu, faults=process.major_faults, io_bytes=process.io or 0, children=process.children
    )
