"""A made-up life of an agent: what `agent.loop` and `agent.link` do with processes and sockets, done in virtual time.

It drives the real `agent.state` and `agent.decide`; processes, peers and the way to control belong to the world.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from perdure.agent import decide
from perdure.agent import state as facts
from perdure.agent.progress import Progress, limit_of, seen
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
from perdure.sim.agenda import Agenda, Alarm
from perdure.sim.scenario import Pace, Span
from perdure.sim.training import Training, Worker
from perdure.vocab.event import AnyEvent, MemoryEvidence, NodeGathered, NodeReady, StoreLost, WorkerError
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Incarnation, NodeId
from perdure.vocab.node import Node
from perdure.vocab.units import Instant, Seconds
from perdure.wire.messages import Observed, Orders, Reply

A_MOMENT = 0.002
"""Added to deadlines that `decide` compares with `>`, and what a process or a file takes."""
POLL = 0.05
BEATS_PER_LEASE = 0.3
REPLY_TIMEOUT = 1.0
STREAM_LAG = 1.0


Actor = Callable[[AgentState, Instant], tuple[AgentState, tuple[AgentAction, ...]]]
"""`decide.act`, or a broken one that the checks must catch."""


class Surroundings(Protocol):
    """What an agent reaches of the world. Everything that goes to control may be lost; answers come by method calls."""

    agenda: Agenda
    rng: random.Random
    pace: Pace
    decide: Actor

    def send_join(self, agent: "AgentLife", node: Node) -> None: ...

    def send_report(self, agent: "AgentLife", observed: tuple[Observed, ...]) -> None: ...

    def send_leave(self, agent: "AgentLife", reason: str) -> None: ...

    def open_stream(self, agent: "AgentLife") -> None: ...

    def steady(self, node: NodeId) -> bool: ...

    def links_changed(self) -> None: ...

    def start_worker(self, agent: "AgentLife", orders: Orders, local_rank: int) -> Worker: ...

    def signal(self, worker: Worker, number: int) -> None: ...

    def training(self, generation: GenerationNumber) -> Training | None: ...

    def pid(self) -> int: ...

    def ask_peers(self, agent: "AgentLife", asked_at: Instant) -> None: ...

    def agent_ended(self, agent: "AgentLife", code: int) -> None: ...


class AgentLife:
    """One incarnation of one node's agent."""

    def __init__(self, world: Surroundings, node: Node) -> None:
        now = world.agenda.now
        self._world = world
        self.node, self.id, self.life = node, node.id, node.incarnation
        self.state = AgentState(node=node.id, slots=node.slots, contact=now)
        self.workers: dict[int, Worker] = {}
        self.is_alive = True
        self.stream: int | None = None
        """The stream of orders that it listens to."""
        self.is_behind = False
        """Its stream has lost orders; only a beat, answered by control, will tell it so."""
        self.joined = False
        self.restart_after: Seconds | None = None
        """Somebody ended it on purpose, and starts it again after that."""
        self._answered_at: Instant = now
        """Send time of the last simulated message that control has answered; beats between are not simulated."""
        self._outbox: list[tuple[int, AnyEvent]] = []
        self._seq = 0
        self._reporting_until: Instant = 0.0
        self._behind_since: Instant | None = None
        self._wake = Alarm(world.agenda, self.act)
        self._beat = Alarm(world.agenda, self._report_or_join)
        world.agenda.after(self._draw(world.pace.fork_server), self._warm)
        self._beat.set(now)

    def _draw(self, span: Span) -> Seconds:
        return self._world.rng.uniform(*span)

    def _later(self, seconds: Seconds, do: Callable[[], None]) -> None:
        """`do` after `seconds`, if this life still lasts."""
        self._world.agenda.after(seconds, lambda: do() if self.is_alive else None)

    # --- the line to control -----------------------------------------------------------------------------------------

    def tell(self, event: AnyEvent) -> None:
        self._seq += 1
        self._outbox.append((self._seq, event))
        when = max(self._world.agenda.now + A_MOMENT / 4, self._reporting_until)
        if self.joined and (self._beat.when is None or self._beat.when > when):
            self._beat.set(when)

    def keep_beating(self) -> None:
        """Have the next beat planned wherever beats are not taken for granted."""
        if self.is_alive and self._beat.when is None and (self._outbox or not self._world.steady(self.id)):
            self._beat.set(self._world.agenda.now + self._world.rng.uniform(0.01, self._interval()))

    def _interval(self) -> Seconds:
        orders = self.state.orders
        return BEATS_PER_LEASE * orders.rules.lease if orders is not None else 0.5

    def _report_or_join(self) -> None:
        if not self.is_alive:
            return
        now = self._world.agenda.now
        if not self.joined or self.stream is None:
            self._world.send_join(self, self.node)
            self._beat.set(now + self._world.rng.uniform(0.05, 0.5))
            if not self.joined:
                return
        if not self._outbox and self._world.steady(self.id):
            self._beat.set(None)
            return
        observed = tuple(
            Observed(seq=seq, age=max(0.0, now - event.at), event=event) for seq, event in self._outbox[:200]
        )
        self._reporting_until = now + REPLY_TIMEOUT
        self._world.send_report(self, observed)
        if self.stream is not None:
            self._beat.set(now + (REPLY_TIMEOUT if self._outbox else self._interval()))

    def answered_join(self, reply: Reply, sent_at: Instant) -> None:
        if not self.is_alive:
            return
        if reply.fenced:
            self.fence("control has declared this node lost in the meantime")
            return
        self.joined = True
        self._acknowledge(reply)
        self._hear(sent_at)
        if reply.orders is not None:
            self.take_orders(reply.orders)
        if self.stream is None:
            self._world.open_stream(self)

    def answered_report(self, reply: Reply, sent_at: Instant) -> None:
        if not self.is_alive:
            return
        if reply.fenced:
            self.fence("control has declared this node lost in the meantime")
            return
        self._reporting_until = 0.0
        self._acknowledge(reply)
        self._hear(sent_at)
        self._check_stream(reply.pushed)
        if self._outbox:
            self._beat.set(self._world.agenda.now + A_MOMENT / 4)
        self.act()

    def _hear(self, sent_at: Instant) -> None:
        self._answered_at = max(self._answered_at, sent_at)
        self.state = facts.answered(self.state, sent_at)

    def beats_ended(self, last: Instant) -> None:
        """Beats do not come through any more; the last that was answered had been sent at `last`."""
        self.state = msgspec.structs.replace(self.state, contact=max(self._answered_at, last))

    def _acknowledge(self, reply: Reply) -> None:
        self._outbox = [(seq, event) for seq, event in self._outbox if seq > reply.acked]

    def _check_stream(self, pushed: int) -> None:
        now = self._world.agenda.now
        version = self.state.orders.version if self.state.orders is not None else 0
        if pushed <= version:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
            self._beat.set(now + STREAM_LAG + 0.1)
        elif now - self._behind_since > STREAM_LAG:
            self._behind_since = None
            self.stream_broke()

    def stream_broke(self) -> None:
        """The stream of orders has ended, here at least: join again."""
        if self.is_alive and self.stream is not None:
            self.stream = None
            self._world.links_changed()
            self._beat.set(self._world.agenda.now + self._world.rng.uniform(0.01, 0.3))

    def took_stream(self, stream: int, orders: Orders) -> None:
        """Orders have come down a stream."""
        if self.is_alive and self.stream == stream:
            self._behind_since = None
            self.take_orders(orders)

    # --- facts -------------------------------------------------------------------------------------------------------

    def take_orders(self, orders: Orders) -> None:
        self.state = facts.ordered(self.state, orders)
        self.act()

    def fence(self, reason: str) -> None:
        if self.is_alive:
            self.state = facts.fence(self.state, reason)
            self.act()

    def _warm(self) -> None:
        if self.is_alive:
            now = self._world.agenda.now
            self.state = facts.warmed(self.state)
            self.tell(NodeReady(id=facts.UNSENT, at=now, node=self.id, warm=True, seconds=1.0))
            self.act()

    def _read(self) -> None:
        """Read the heartbeat page and the processes, as the agent does all the time."""
        now = self._world.agenda.now
        for known in self.state.alive():
            worker = self.workers[known.pid]
            training = self._world.training(known.generation)
            if training is not None:
                progress = seen(known.progress, training.read(worker), worker.letter, now)
                self.state = facts.changed(self.state, known, progress=progress, state_letter=worker.letter)

    def worker_ended(
        self, worker: Worker, code: int | None, number: int | None, error: WorkerError | None, oom: bool
    ) -> None:
        """The kernel says so."""
        if not self.is_alive:
            return
        memory = None
        if oom and number == facts.SIGKILL:
            memory = MemoryEvidence(by="cgroup", limit=2**30, usage=2**30, rss=2**29, line="oom_kill 1")
        self._read()  # the slot outlives the worker
        self.state, actions = decide.worker_ended(
            self.state,
            worker.pid,
            exit_code=code,
            signal=number,
            error=error,
            memory=memory,
            log_tail="",
            now=self._world.agenda.now,
        )
        self._do_all(actions)
        self.act()

    @property
    def has_store(self) -> bool:
        return self.is_alive and self.state.store is not None and self.state.store.pid is not None

    def store_killed(self) -> None:
        """Somebody has ended the store."""
        store = self.state.store
        if not self.is_alive or store is None or store.pid is None:
            return
        if not store.ending and self.state.fenced is None:
            now = self._world.agenda.now
            generation = store.generation
            self.tell(StoreLost(id=facts.UNSENT, at=now, node=self.id, generation=generation, exit_code=None, signal=9))
        self.state = facts.store_ended(self.state, store.pid)
        self.act()

    # --- actions -----------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do what follows, until nothing does; then wait for the next deadline."""
        for _ in range(20):
            if not self.is_alive:
                return
            now = self._world.agenda.now
            if self._world.steady(self.id):
                self.state = facts.answered(self.state, now - A_MOMENT)
            self._read()
            self.state, actions = self._world.decide(self.state, now)
            if not actions:
                break
            self._do_all(actions)
        if self.is_alive:
            self._wake.set(self._next())

    def _do_all(self, actions: Sequence[AgentAction]) -> None:
        for action in actions:
            if self.is_alive:
                self._do(action)

    def _do(self, action: AgentAction) -> None:
        match action:
            case Tell(event=NodeGathered()):
                self._later(self._world.rng.uniform(0.001, 0.03), lambda: self.tell(action.event))
            case Tell():
                self.tell(action.event)
            case AskPeers():
                self._world.ask_peers(self, self._world.agenda.now)
            case Exit():
                self.end(action.code, says_goodbye=True)
            case _:
                self._do_to_processes(action)

    def _do_to_processes(self, action: Signal | StartStore | EndStore | StartWorkers | StopAfter) -> None:
        world = self._world
        match action:
            case Signal():
                for pid in action.pids:
                    world.signal(self.workers[pid], action.number)
            case StartStore():
                self._later(self._draw(world.pace.store), lambda: self._store_listens(action.generation))
            case EndStore():
                self._later(A_MOMENT, self.store_killed)
            case StartWorkers():
                self._later(self._draw(world.pace.fork), lambda: self._start_workers(action.orders))
            case StopAfter():
                training = world.training(facts.generation_of(self.state))
                if training is not None:
                    training.stop_after = action.step
                    training.update()

    def _store_listens(self, generation: GenerationNumber) -> None:
        address = Address("10.0.0.1", 29500)
        self.state = facts.store_listens(self.state, generation, self._world.pid(), address)
        self.act()

    def _start_workers(self, orders: Orders) -> None:
        for local_rank in range(self.node.slots):
            worker = self._world.start_worker(self, orders, local_rank)
            self.workers[worker.pid] = worker
            progress = Progress(since=self._world.agenda.now)
            self.state = facts.started(
                self.state,
                WorkerState(
                    pid=worker.pid,
                    local_rank=local_rank,
                    rank=worker.rank,
                    generation=worker.generation,
                    progress=progress,
                ),
            )
        self.state = facts.launched(self.state)
        self.act()

    def _next(self) -> Instant | None:
        """When `act` must be called although nothing happens. Real agents look every 50 ms instead."""
        state, orders = self.state, self.state.orders
        if orders is None:
            return None
        lease = orders.rules.lease
        times: list[Instant] = []
        if not self._world.steady(self.id) and state.fenced is None:
            times.append(max(state.contact, state.peers_ok) + lease)
            times.append(max(state.contact + lease / 2, state.peers_asked + lease / 5))
        times.append(facts.bound_until(state))
        for worker in state.alive():
            times.extend(self._limits(worker, orders))
        now = self._world.agenda.now
        return min((at + A_MOMENT for at in times if at + A_MOMENT > now), default=None)

    def _limits(self, worker: WorkerState, orders: Orders) -> list[Instant]:
        times: list[Instant] = []
        progress = worker.progress
        if worker.killed_at is not None:
            return [worker.killed_at + orders.stalls.unkillable_after]
        if worker.asked_at is not None:
            times.append(worker.asked_at + facts.STOP_GRACE)
        if progress.stopped_since is not None:
            times.append(progress.stopped_since + orders.stalls.stopped_after)
        training = self._world.training(worker.generation)
        limit = limit_of(progress, orders.stalls)
        if limit is not None and (training is None or not training.flows):
            times.append(progress.since + limit.quiet)
        return times

    # --- peers -------------------------------------------------------------------------------------------------------

    def vouches_for(self, asker: NodeId) -> bool:
        now = self._world.agenda.now
        if self._world.steady(self.id):
            self.state = facts.answered(self.state, now - A_MOMENT)
        self.state, yes = facts.vouch(self.state, asker, now)
        self._wake.set(self._next())
        return yes

    def peers_answered(self, reachable: int, members: int, asked_at: Instant) -> None:
        if self.is_alive:
            self.state = facts.peers_answered(self.state, reachable, members, asked_at)
            self.act()

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, code: int, *, says_goodbye: bool = False) -> None:
        """The process is gone, and everything below it with it."""
        if not self.is_alive:
            return
        if says_goodbye:
            self._world.send_leave(self, "its agent has ended")
        self.is_alive = False
        self._wake.set(None)
        self._beat.set(None)
        self._world.agent_ended(self, code)


def incarnation(pid: int, ticks: int, boot: int) -> Incarnation:
    return Incarnation(pid=pid, started_ticks=ticks, boot_id=f"boot-{boot:04d}")
