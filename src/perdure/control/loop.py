"""Control's loop: receive → step → append → publish. No decisions; `brain` makes them.

One instance serves one job. Steady state does not need it: agents go on without it and bring their events later.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import NoReturn

import anyio
import msgspec

from perdure.control.brain import next_deadline, step
from perdure.control.chronicle import told
from perdure.control.fold import event_id, fold
from perdure.control.hearing import is_over, resumed, telling
from perdure.control.leases import Contacts, adopt, closed, connected, heard, next_loss, overdue
from perdure.control.memory_door import MemoryDoor
from perdure.control.orders import basis, meaning, orders_for
from perdure.control.saves import SavesState, asked_to_save, began, gone, hurried, noticed
from perdure.control.state import State
from perdure.errors import EventLogError
from perdure.playbook.parse import Catalogue
from perdure.ports import Clock, EventLog, LogRecord
from perdure.vocab.event import (
    AnyEvent,
    ControlStarted,
    JobSubmitted,
    NodeDisconnected,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    StopRequested,
)
from perdure.vocab.ids import EventId, Incarnation, NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.node import Node
from perdure.vocab.units import show_duration
from perdure.wire.channel import RefusedError, Request, Response, Streamed
from perdure.wire.memory import MemoryReport
from perdure.wire.messages import Beat, Join, Leave, Orders, Pong, Progress, Records, Reply, Report, Stop

RECORDS_AT_ONCE = 500
LONGEST_TICK = 1.0
"""Seconds; also how often a log that refused is tried again."""
NAMESAKE_MARGIN = 0.2
"""Seconds: a report that comes so long after a node of the same name wanted to join is not one left in a buffer."""
LINGER = 10.0
"""Seconds after the job's end that a control without a launcher stays, so that all nodes hear of it."""


class Control:
    """One job's control: `handle` is its door, `run` its time."""

    def __init__(
        self,
        spec: JobSpec,
        log: EventLog,
        clock: Clock,
        catalogue: Catalogue,
        *,
        version: str,
        incarnation: Incarnation,
        warn: Callable[[str], None],
    ) -> None:
        self._log, self._clock, self._catalogue, self._warn = log, clock, catalogue, warn
        self._version = version
        self._records: list[LogRecord] = [record for _, record in log.read()]
        self._unwritten: list[LogRecord] = []
        self._warned = False
        self._beats: dict[NodeId, Beat] = {}
        self._streams: dict[NodeId, int] = {}
        self._pushed: dict[NodeId, int] = {}
        self._stream_ids = count(1)
        self._namesakes: dict[EventId, float] = {}
        """When a node first wanted to join in the place of one that is connected."""
        self._changed = anyio.Event()
        self._reordered = anyio.Event()
        self._shown: tuple[object, ...] = ()
        self.state = State()
        for record in self._records:
            self.state = fold(self.state, record)
        now = clock.now()
        self._contacts: Contacts = adopt(self.state, now)
        self.memory = MemoryDoor(clock, on_change=self._note_memory)
        """Checkpoints; its `run` keeps their deadlines."""
        if self.state.spec is None:
            self._advance(JobSubmitted(id=EventId("control//job"), at=now, spec=spec))
        start = EventId(f"control//start-{self.state.version}")
        self._advance(ControlStarted(id=start, at=now, incarnation=incarnation, version=version))

    # --- time --------------------------------------------------------------------------------------------------------

    async def run(self, *, until_idle: bool) -> None:
        """Keep deadlines and leases. With `until_idle` it returns when the job has ended and its nodes have gone."""
        while True:
            now = self._clock.now()
            times = (next_deadline(self.state, now), next_loss(telling(self._contacts, self.state, now), self.state))
            wait = min((t - now for t in times if t is not None), default=LONGEST_TICK)
            with anyio.move_on_after(min(max(wait, 0.001), LONGEST_TICK)):
                await self._changed.wait()
            now = self._clock.now()
            self._advance(*overdue(telling(self._contacts, self.state, now), self.state, now))
            if until_idle and self._is_idle():
                return

    def _is_idle(self) -> bool:
        ended = self.state.ended
        if ended is None:
            return False
        gone = not any(known.present for known in self.state.nodes.values())
        return gone or self._clock.now() - ended.at > LINGER

    def _advance(self, *events: AnyEvent) -> None:
        before = self.state.version
        self.state, records = step(self.state, events, self._clock.now(), self._catalogue)
        if self.state.version != before:
            self._append(records)
            self._tell_memory(records)
            self._changed.set()
            self._changed = anyio.Event()
            now_shown = basis(self.state)
            if now_shown != self._shown:
                self._shown = now_shown
                self._reordered.set()
                self._reordered = anyio.Event()
        elif self._unwritten:
            self._append(())

    def _append(self, records: Sequence[LogRecord]) -> None:
        """Log first, publish after. A log that refuses does not stop training: it is warned of once and caught up."""
        self._records.extend(records)
        self._unwritten.extend(records)
        try:
            self._log.append(self._unwritten)
        except EventLogError as problem:
            if not self._warned:
                self._warn(f"{problem}; training goes on, the log is caught up when it can be written again")
            self._warned = True
            return
        if self._warned:
            self._warn("the event log can be written again; nothing is missing from it")
        self._warned = False
        self._unwritten.clear()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _tell_memory(self, records: Sequence[LogRecord]) -> None:
        """What the commit protocol has to know of the job: its generation, who is lost, and that all are to save."""
        state, now, saves = self.state, self._clock.now(), self.memory.state
        generation = state.generation
        if generation is not None and generation.number > saves.generation:
            world = generation.assignment
            saves = began(saves, int(state.began_at), world.number, world.nodes, world.world_size, now)
        for record in records:
            if isinstance(record, NodeLost | NodeLeft):
                saves = gone(saves, record.node, now)
        order = state.draining.order if state.draining is not None else None
        if order is not None and order.stop_after is not None and order.stop_after != saves.once:
            saves = asked_to_save(saves, now, step=order.stop_after)
        elif order is not None and order.forward and not saves.stopping:
            saves = asked_to_save(saves, now)
        if state.ending is not None or state.hold is not None:
            saves = hurried(saves, now)
        self.memory.become(saves)

    def _note_memory(self, before: SavesState, after: SavesState) -> None:
        events = [each for each in told(before, after, self._clock.now()) if each.id not in self.state.kept.asides]
        if events:
            self._advance(*events)

    # --- the door ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response | Streamed:
        """Answer one request; see `wire.messages` for what there is."""
        match request.method, request.path:
            case "POST", "/v1/join":
                return Response.of(self._join(request.read(Join)))
            case "POST", "/v1/report":
                return Response.of(self._report(request.read(Report)))
            case "POST", "/v1/leave":
                return Response.of(self._leave(request.read(Leave)))
            case "POST", "/v1/memory" | "/v1/save":
                return await self._about_checkpoints(request)
            case "POST", "/v1/stop":
                return Response.of(self._stop(request.read(Stop)))
            case "GET", "/v1/orders":
                return Streamed(self._orders(self._known(request), next(self._stream_ids)))
            case "GET", "/v1/records":
                return Response.of(await self._read_records(request))
            case "GET", "/v1/progress":
                return Response.of(self._progress())
            case "GET", "/v1/ping":
                return Response.of(self._pong())
        raise RefusedError(404, f"there is nothing at {request.method} {request.path}")

    async def _about_checkpoints(self, request: Request) -> Response:
        if request.path == "/v1/memory":
            return Response.of(await self.memory.answer(request.read(MemoryReport)))
        self.memory.become(noticed(self.memory.state, self._clock.now()))
        return Response.of(Reply())

    def _join(self, join: Join) -> Reply:
        node, now = join.node, self._clock.now()
        self._refuse_stranger(node)
        self._refuse_namesake(node, now)
        known = self.state.nodes.get(node.id)
        if known is not None and is_over(known, node):
            return Reply(fenced=True)
        events: list[AnyEvent] = []
        if known is not None and known.present and known.node.incarnation != node.incarnation:
            silent = now - self._contacts[node.id].heard_at if node.id in self._contacts else 0.0
            gone = NodeLost(
                id=EventId(f"lost/{node.id}/{known.node.incarnation}"),
                at=now,
                node=node.id,
                incarnation=known.node.incarnation,
                silent_for=max(0.0, silent),
                connection_closed=True,
            )
            events.append(gone)
        if known is None or not known.present or events or known.disconnected_at is not None:
            join_id = EventId(f"join/{node.id}/{node.incarnation}/{self.state.version}")
            events.append(NodeJoined(id=join_id, at=now, node=node))
        self._hear(node.id, now)
        self._advance(*events)
        acked = self.state.nodes[node.id].acked
        return Reply(acked=acked, orders=orders_for(self.state, node.id, now))

    def _refuse_stranger(self, node: Node) -> None:
        """Raise RefusedError for a node that cannot be part of this job, with both values."""
        spec = self.state.spec
        assert spec is not None
        if node.version != self._version:
            versions = f"it runs Perdure {node.version}, control runs {self._version}"
            self._refuse(node, f"{versions}: install one version on both")
        if node.world != spec.world:
            self._refuse(node, f"it was started for [{node.world}], the job {spec.id} is [{spec.world}]")

    def _refuse_namesake(self, node: Node, now: float) -> None:
        """Raise RefusedError while the node's earlier life is connected: its end will show, or it is another node.

        Boot id and host name do not tell: containers on one machine may share both.
        """
        known, contact = self.state.nodes.get(node.id), self._contacts.get(node.id)
        attempt = EventId(f"{node.id}/{node.incarnation}")
        if (
            known is None
            or contact is None
            or not known.present
            or known.node.incarnation == node.incarnation
            or node.id not in self._streams
            or contact.closed_at is not None
        ):
            self._namesakes.pop(attempt, None)
            return
        if contact.heard_at > self._namesakes.setdefault(attempt, now) + NAMESAKE_MARGIN:
            where = f"{known.node.host} ({known.node.address}, process {known.node.incarnation.pid})"
            self._refuse(
                node, f"the name {node.id} is in use on {where}: give each node its own by --node-rank or --local-addr"
            )
        raise RefusedError(503, f"{node.id} is still connected in an earlier life; try again")

    def _refuse(self, node: Node, reason: str) -> NoReturn:
        event = NodeRefused(
            id=EventId(f"refused/{node.id}/{node.incarnation}"),
            at=self._clock.now(),
            node=node.id,
            host=node.host,
            reason=reason,
        )
        self._advance(event)
        raise RefusedError(409, f"{node.id} on {node.host} is refused: {reason}")

    def _report(self, report: Report) -> Reply:
        known = self.state.nodes.get(report.node)
        if known is None or not known.present or known.node.incarnation != report.incarnation:
            return Reply(fenced=True)
        now = self._clock.now()
        self._hear(report.node, now)
        self._beats[report.node] = report.beat
        events = [
            msgspec.structs.replace(
                seen.event, id=event_id(report.node, report.incarnation, seen.seq), at=max(0.0, now - seen.age)
            )
            for seen in sorted(report.observed, key=lambda seen: seen.seq)
        ]
        self._advance(*events)
        acked = self.state.nodes[report.node].acked
        # Without a stream in this life of control, whatever the node has heard is old: it must connect again.
        return Reply(acked=acked, pushed=self._pushed.get(report.node, self.state.version))

    def _hear(self, node: NodeId, now: float) -> None:
        self._contacts = heard(resumed(self._contacts, self.state, now), node, now)

    def _leave(self, leave: Leave) -> Reply:
        known = self.state.nodes.get(leave.node)
        if known is not None and known.present and known.node.incarnation == leave.incarnation:
            left = NodeLeft(
                id=EventId(f"left/{leave.node}/{leave.incarnation}"),
                at=self._clock.now(),
                node=leave.node,
                incarnation=leave.incarnation,
                reason=leave.reason,
            )
            self._advance(left)
        return Reply()

    def _stop(self, stop: Stop) -> Reply:
        event = StopRequested(
            id=EventId(f"stop//{self.state.version}"),
            at=self._clock.now(),
            by=stop.by,
            signal=stop.signal,
            grace=stop.grace,
        )
        self._advance(event)
        return Reply()

    # --- orders down -------------------------------------------------------------------------------------------------

    def _known(self, request: Request) -> NodeId:
        node = NodeId(request.query.get("node", ""))
        known = self.state.nodes.get(node)
        if known is None or not known.present or str(known.node.incarnation) != request.query.get("incarnation"):
            raise RefusedError(410, f"{node or 'a node without a name'} is not part of this job any more: join again")
        return node

    async def _orders(self, node: NodeId, stream: int) -> AsyncIterator[bytes]:
        """The orders of `node`, now and whenever they change; its end is noticed."""
        self._streams[node] = stream
        self._contacts = connected(self._contacts, node, self._clock.now())
        incarnation = self.state.nodes[node].node.incarnation
        sent: Orders | None = None
        try:
            while True:
                changed = self._reordered
                orders = orders_for(self.state, node, self._clock.now())
                if sent is None or meaning(orders) != meaning(sent):
                    sent = orders
                    self._pushed[node] = orders.version
                    yield msgspec.json.encode(orders)
                await changed.wait()
        finally:
            if self._streams.get(node) == stream:
                self._closed(node, incarnation)

    def _closed(self, node: NodeId, incarnation: Incarnation) -> None:
        known = self.state.nodes.get(node)
        if known is None or not known.present or known.node.incarnation != incarnation:
            return
        now = self._clock.now()
        self._contacts = closed(self._contacts, node, now)
        gone = EventId(f"gone/{node}/{self.state.version}")
        self._advance(NodeDisconnected(id=gone, at=now, node=node, incarnation=incarnation))

    # --- readers -----------------------------------------------------------------------------------------------------

    async def _read_records(self, request: Request) -> Records:
        try:
            after = int(request.query.get("after", "0"))
            wait = min(float(request.query.get("wait", "0")), 30.0)
        except ValueError:
            raise RefusedError(400, "after and wait must be numbers") from None
        with anyio.move_on_after(wait):
            while len(self._records) <= after:
                await self._changed.wait()
        found = tuple(self._records[after : after + RECORDS_AT_ONCE])
        return Records(last=after + len(found), records=found, now=self._clock.now())

    def _progress(self) -> Progress:
        generation = self.state.generation
        members = generation.assignment.nodes if generation is not None else ()
        beats = [b for n in members if (b := self._beats.get(n)) is not None and b.generation == self.state.number]
        steps = [s for beat in beats for s in beat.steps if s >= 0]
        seconds = [b.step_seconds for b in beats if b.step_seconds is not None]
        return Progress(
            step=min(steps, default=None),
            step_seconds=max(seconds, default=None),
            nodes=len(members),
            spares=len(self.state.spares()),
            generation=self.state.number,
            status=self._status(),
            now=self._clock.now(),
        )

    def _status(self) -> str:
        state = self.state
        if state.ended is not None:
            return f"ended with {state.ended.exit_code}"
        if state.draining is not None:
            return "stopping"
        if state.hold is not None:
            return f"held for a node, {show_duration(max(0.0, state.hold.until - self._clock.now()))} left"
        return "starting" if state.generation is None else str(state.generation.phase)

    def _pong(self) -> Pong:
        assert self.state.spec is not None
        members = self.state.previous.nodes if self.state.previous is not None else ()
        return Pong(node=None, job=self.state.spec.id, generation=self.state.number, members=members)
