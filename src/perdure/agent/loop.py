"""The agent's loop: readings and orders in, `decide.act`, actions out. No decisions.

One process per node. It holds the heartbeat page, the workers' pidfds and their output; it never imports torch.
"""

import os
import signal
import ssl
import sys
import time
from collections.abc import Mapping
from urllib.parse import quote

import anyio
import msgspec
from anyio.abc import TaskGroup

from perdure.agent import decide
from perdure.agent import state as facts
from perdure.agent.config import AgentConfig
from perdure.agent.link import ControlLink, JoinRefusedError
from perdure.agent.progress import Progress, Work, seen, wants_evidence, worked
from perdure.agent.ranks import Ranks, RankTag, StoreTag
from perdure.agent.standby import ForkServer
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
from perdure.errors import AccessDeniedError, ConfigError, HostError, UntrustedError, WireError
from perdure.host.proc import ProcessReading, incarnation, read_process, read_stat
from perdure.host.processes import Children, Ended, set_subreaper
from perdure.vocab.event import ForkServerLost, NodeGathered, NodeReady, StartFailed, StoreLost
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.vocab.node import Node
from perdure.wire.channel import Channel, RefusedError, Request, Response, Streamed, listen, serve
from perdure.wire.messages import Duty, Entry, Orders, Pong
from perdure.wire.page import HeartbeatPage
from perdure.wire.tokens import peer_token

IDLE_POLL = 0.5
"""Seconds between looks at the clock while no worker runs here."""
PEER_TIMEOUT = 1.0
FORK_SERVER_RETRY = 5.0
SWEEP_TRIES, SWEEP_WAIT = 20, 0.01
LONGEST_END = 10
"""Seconds (SIGALRM) after which an agent that was told to go ends however it stands; its workers then end with it."""
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h: control was never reached."""


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
        self._began = time.monotonic()
        self._ready = anyio.Event()
        self._rss: dict[int, int] = {}

    async def run(self) -> int:
        """Live until the job's end, or until fenced or told to leave; gives the exit code."""
        set_subreaper()
        self._children = Children()
        try:
            async with anyio.create_task_group() as group:
                self._group: TaskGroup = group
                self._ranks = Ranks(self._config, self._environ, self._page, self._children, group)
                listener = await listen(self._config.address, 0)
                self._link = self._make_link(listener.address.port)
                for task in (self._follow_control, self._watch, self._follow_exits, self._keep_fork_server):
                    group.start_soon(task)
                group.start_soon(self._link.run_reports)
                group.start_soon(self._wait_for_signals)
                group.start_soon(lambda: serve(self._answer_peer, listener, token=self._peer_token))
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

    def _take_fence(self, reason: str) -> None:
        self._set(facts.fence(self._state, reason))

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

    async def _follow_exits(self) -> None:
        async for ended in self._children.exits:
            if isinstance(ended.tag, RankTag):
                self._group.start_soon(self._take_exit, ended, ended.tag)
            elif isinstance(ended.tag, StoreTag):
                self._take_store_end(ended, ended.tag)

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

        (A launcher that lives does not signal its agents; it asks control.)
        """
        launcher = os.getppid()
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                signal.alarm(LONGEST_END)
                reason = "its agent was sent SIGTERM" if os.getppid() == launcher else "its launcher has died"
                self._set(facts.fence(self._state, reason))

    # --- the fork server ---------------------------------------------------------------------------------------------

    async def _keep_fork_server(self) -> None:
        """Have a warm one at all times, where that is possible; say how it stands."""
        if not self._config.fork_server or self._config.launch.entry is Entry.PROGRAM:
            self._tell_ready(warm=False, note="workers are spawned, as asked")
            return
        while True:
            server = await self._start_fork_server()
            if server is None:
                return
            await server.closed.wait()
            self._ranks.fork_server = None
            event = ForkServerLost(
                id=facts.UNSENT,
                at=time.monotonic(),
                node=self._config.node,
                exit_code=server.exit_code,
                signal=server.signal,
            )
            self._link.tell(event)

    async def _start_fork_server(self) -> ForkServer | None:
        """A warm server, or None when workers must be spawned for good."""
        while True:
            try:
                server = await self._ranks.start_fork_server()
                ready = await server.wait_ready()
            except HostError as problem:
                self._tell_ready(warm=False, note=str(problem))
                await anyio.sleep(FORK_SERVER_RETRY)
                continue
            if not ready.warm:
                await server.close()
                _say(f"{self._config.node}: {ready.note}; workers are spawned")
                self._tell_ready(warm=False, note=ready.note)
                return None
            self._ranks.fork_server = server
            self._tell_ready(warm=True, note=ready.note)
            return server

    def _tell_ready(self, *, warm: bool, note: str) -> None:
        now = time.monotonic()
        event = NodeReady(
            id=facts.UNSENT, at=now, node=self._config.node, warm=warm, seconds=now - self._began, note=note
        )
        self._ready.set()
        self._link.tell(event)

    # --- actions out -------------------------------------------------------------------------------------------------

    def _do(self, action: AgentAction) -> None:
        match action:
            case Signal():
                for pid in action.pids:
                    self._children.signal(pid, action.number)
            case StartStore():
                self._group.start_soon(self._start_store, action.generation)
            case EndStore():
                self._children.signal(action.pid, signal.SIGKILL)
            case StartWorkers():
                self._group.start_soon(self._start_workers, action.orders)
            case Tell(event=NodeGathered()):
                self._group.start_soon(self._tell_gathered, action)
            case Tell():
                self._link.tell(action.event)
            case AskPeers():
                self._group.start_soon(self._ask_peers)
            case StopAfter():
                self._page.stop_after(action.step)
            case Exit():
                self._end(action)

    async def _tell_gathered(self, tell: Tell) -> None:
        """Only when nothing of the workers is left: what a dead worker leaves behind may hold ports and memory."""
        for _ in range(SWEEP_TRIES):
            if not self._ranks.sweep():
                break
            await anyio.sleep(SWEEP_WAIT)
        self._link.tell(tell.event)

    async def _start_store(self, generation: GenerationNumber) -> None:
        await self._ready.wait()
        try:
            pid, address = await self._ranks.start_store(generation)
        except HostError as problem:
            self._start_failed(generation, str(problem))
            self._set(msgspec.structs.replace(self._state, store=None))
            return
        self._set(facts.store_listens(self._state, generation, pid, address))

    async def _start_workers(self, orders: Orders) -> None:
        await self._ready.wait()
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
        worker = WorkerState(
            pid=pid,
            local_rank=local_rank,
            rank=tag.rank,
            generation=tag.generation,
            progress=Progress(since=time.monotonic()),
        )
        self._set(facts.started(self._state, worker))

    def _start_failed(self, generation: GenerationNumber, reason: str) -> None:
        event = StartFailed(
            id=facts.UNSENT, at=time.monotonic(), node=self._config.node, generation=generation, reason=reason
        )
        self._link.tell(event)

    # --- peers -------------------------------------------------------------------------------------------------------

    async def _answer_peer(self, request: Request) -> Response | Streamed:
        """GET /v1/ping?node=N: what we know of the generation, when that tells N that it has been replaced, or that
        it may go on without control for a lease; else a refusal."""
        orders = self._state.orders
        if (request.method, request.path) != ("GET", "/v1/ping") or orders is None:
            raise RefusedError(404, f"an agent answers GET /v1/ping only, not {request.method} {request.path}")
        asker = NodeId(request.query.get("node", ""))
        members = orders.assignment.nodes if orders.assignment is not None else ()
        self._state, vouched = facts.vouch(self._state, asker, time.monotonic())
        if not vouched and (not members or asker in members):
            raise RefusedError(409, f"{self._config.node} does not vouch for {asker}: control answers here")
        return Response.of(
            Pong(node=self._config.node, job=self._config.job, generation=orders.generation, members=members)
        )

    async def _ask_peers(self) -> None:
        """Which of the other members vouch for this node, and does anyone know that it has been replaced?"""
        asked_at, orders = time.monotonic(), self._state.orders
        if orders is None or not (orders.peers or _is_loopback(self._config.control.host)):
            return  # alone, and control is on another machine, where the network may be to blame
        answers: list[Pong] = []
        async with anyio.create_task_group() as group:
            for peer in orders.peers:
                if peer.address.port:
                    group.start_soon(self._ask_peer, peer.address, answers)
        for pong in answers:
            if pong.generation > orders.generation and pong.members and self._config.node not in pong.members:
                self._take_fence(f"{pong.node} says that generation {pong.generation} goes on without this node")
                return
        vouching = sum(self._config.node in pong.members for pong in answers)
        self._state = facts.peers_answered(self._state, vouching, len(orders.peers) + 1, asked_at)

    async def _ask_peer(self, address: Address, answers: list[Pong]) -> None:
        channel = Channel(address, self._peer_token, timeout=PEER_TIMEOUT)
        try:
            path = f"/v1/ping?node={quote(self._config.node)}"
            answers.append(await channel.call("GET", path, None, Pong))
        except WireError:
            return
        finally:
            await channel.aclose()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, exit: Exit) -> None:
        if not self._ended.is_set():
            self._exit = exit
            self._ended.set()

    async def _clean_up(self) -> None:
        """Nothing of this node's processes is left when it returns (but what outlives SIGKILL)."""
        orders = self._state.orders
        if orders is None or orders.duty is not Duty.STOP:
            _say(f"{self._config.node}: {self._exit.reason}")
        with anyio.move_on_after(5.0, shield=True):
            for pid in self._children.pids:
                self._children.signal(pid, signal.SIGKILL)
            await self._link.flush(1.0 if self._state.fenced is None else 0.2)
            await self._link.leave(self._exit.reason)
            await self._ranks.close()
            for _ in range(SWEEP_TRIES):
                if not self._children.sweep(set()):
                    break
                await anyio.sleep(SWEEP_WAIT)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"perdure: {text}\n")
        sys.stderr.flush()
    except OSError:
        return  # the terminal has gone, with the launcher perhaps: nobody is left to be told


def _work_of(process: ProcessReading) -> Work:
    return Work(
        cpu_seconds=process.cpu, faults=process.major_faults, io_bytes=process.io or 0, children=process.children
    )
