"""A made-up life of control: what `control.loop` does with sockets and time, done with messages and virtual time.

It drives the real `control.brain`, `leases`, `hearing` and `orders`; which messages come is the world's business.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from perdure.control import leases
from perdure.control.brain import next_deadline
from perdure.control.fold import event_id, replay
from perdure.control.hearing import resumed, telling
from perdure.control.orders import basis, orders_for
from perdure.control.state import State
from perdure.ports import LogRecord
from perdure.sim.agenda import Agenda, Alarm
from perdure.vocab.event import (
    AnyEvent,
    ControlStarted,
    JobSubmitted,
    NodeDisconnected,
    NodeJoined,
    NodeLeft,
    NodeLost,
    StopRequested,
)
from perdure.vocab.ids import EventId, Incarnation, NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.node import Node
from perdure.vocab.units import Instant, Seconds
from perdure.wire.messages import Observed, Orders, Reply

LONGEST_TICK = 1.0
Stepper = Callable[[State, tuple[AnyEvent, ...], Instant], tuple[State, tuple[LogRecord, ...]]]
"""`brain.step` with its catalogue, or a broken one that the checks must catch."""


class Surroundings(Protocol):
    """What control reaches of the world."""

    agenda: Agenda
    log: list[LogRecord]

    def logged(self, life: "ControlLife", before: State, records: tuple[LogRecord, ...]) -> None:
        """Records have been appended; raises nothing, may end this life of control."""
        ...

    def push(self, node: NodeId, stream: int, orders: Orders) -> None: ...

    def steady(self, node: NodeId) -> bool:
        """Whether beats of the node come through all the time, so that none needs to be simulated."""
        ...


class ControlLife:
    """From start to crash."""

    def __init__(self, world: Surroundings, spec: JobSpec, step: Stepper, number: int) -> None:
        self._world, self._step, self.number = world, step, number
        self.is_alive = True
        self.state = replay(world.log)
        self.contacts = leases.adopt(self.state, world.agenda.now)
        self.streams: dict[NodeId, int] = {}
        self._sent: dict[NodeId, Orders] = {}
        self._pushed: dict[NodeId, int] = {}
        self._published: object = None
        self._alarm = Alarm(world.agenda, self._tick)

    def start(self, spec: JobSpec) -> None:
        now = self._world.agenda.now
        if self.state.spec is None:
            self.advance(JobSubmitted(id=EventId("control//job"), at=now, spec=spec))
        me = Incarnation(pid=1, started_ticks=self.number, boot_id="control")
        identity = EventId(f"control//start-{self.state.version}")
        self.advance(ControlStarted(id=identity, at=now, incarnation=me, version="sim"))

    def advance(self, *events: AnyEvent) -> None:
        """Step, append, publish."""
        if not self.is_alive:
            return
        before = self.state
        self.state, records = self._step(before, events, self._world.agenda.now)
        if records:
            self._world.log.extend(records)
            self._world.logged(self, before, records)
        if self.is_alive:
            self._publish()
            self.set_alarm()

    def set_alarm(self) -> None:
        """Plan the next deadline; while silence is not counted that may count later, look every second."""
        state, now = self.state, self._world.agenda.now
        counting = self._counting()
        times = [next_deadline(state, now), leases.next_loss(counting, state)]
        if any(n not in counting and k.present and not self._world.steady(n) for n, k in state.nodes.items()):
            times.append(now + LONGEST_TICK)
        self._alarm.set(min((t for t in times if t is not None), default=None))

    def _fresh(self) -> leases.Contacts:
        """The contacts, with the beats that are taken for granted."""
        now, steady = self._world.agenda.now, self._world.steady
        return {node: leases.Contact(heard_at=now) if steady(node) else c for node, c in self.contacts.items()}

    def _counting(self) -> leases.Contacts:
        """The contacts of those that may have to be called lost."""
        counting = telling(self._fresh(), self.state, self._world.agenda.now)
        return {node: contact for node, contact in counting.items() if not self._world.steady(node)}

    def _tick(self) -> None:
        self.advance(*leases.overdue(self._counting(), self.state, self._world.agenda.now))

    def _hear(self, node: NodeId) -> None:
        now = self._world.agenda.now
        self.contacts = leases.heard(resumed(self._fresh(), self.state, now), node, now)

    def end(self) -> None:
        self.is_alive = False
        self._alarm.set(None)

    # --- the door: as in control.loop -------------------------------------------------------------------------------

    def knows(self, node: NodeId, life: Incarnation) -> bool:
        known = self.state.nodes.get(node)
        return known is not None and known.present and known.node.incarnation == life

    def join(self, node: Node) -> Reply:
        now = self._world.agenda.now
        known = self.state.nodes.get(node.id)
        events: list[AnyEvent] = []
        if known is not None and _is_earlier(node.incarnation, known.node.incarnation):
            return Reply(fenced=True)  # a message that an earlier life sent
        if known is not None and known.present and known.node.incarnation != node.incarnation:
            events.append(
                NodeLost(
                    id=EventId(f"lost/{node.id}/{known.node.incarnation}"),
                    at=now,
                    node=node.id,
                    incarnation=known.node.incarnation,
                    silent_for=max(0.0, now - self.contacts[node.id].heard_at) if node.id in self.contacts else 0.0,
                    connection_closed=True,
                )
            )
        if known is not None and not known.present and known.node.incarnation == node.incarnation:
            return Reply(fenced=True)
        if known is None or not known.present or events:
            events.append(NodeJoined(id=EventId(f"join/{node.id}/{node.incarnation}"), at=now, node=node))
        elif known.disconnected_at is not None:
            again = EventId(f"join/{node.id}/{node.incarnation}/{self.state.version}")
            events.append(NodeJoined(id=again, at=now, node=node))
        self._hear(node.id)
        self.advance(*events)
        return Reply(acked=self.state.nodes[node.id].acked, orders=orders_for(self.state, node.id, now))

    def report(self, node: NodeId, life: Incarnation, observed: Iterable[Observed]) -> Reply:
        if not self.knows(node, life):
            return Reply(fenced=True)
        now = self._world.agenda.now
        self._hear(node)
        events = [
            msgspec.structs.replace(seen.event, id=event_id(node, life, seen.seq), at=max(0.0, now - seen.age))
            for seen in observed
        ]
        self.advance(*events)
        # Without a stream nothing reaches the node: it must notice that the one it listens to is dead.
        pushed = self._pushed.get(node, 0) if node in self.streams else self.state.version
        return Reply(acked=self.state.nodes[node].acked, pushed=pushed)

    def leave(self, node: NodeId, life: Incarnation, reason: str) -> None:
        if self.knows(node, life):
            now = self._world.agenda.now
            self.advance(
                NodeLeft(id=EventId(f"left/{node}/{life}"), at=now, node=node, incarnation=life, reason=reason)
            )

    def stop(self, by: str, signal: int, grace: Seconds) -> None:
        identity = EventId(f"stop//{self.state.version}")
        self.advance(StopRequested(id=identity, at=self._world.agenda.now, by=by, signal=signal, grace=grace))

    def open_stream(self, node: NodeId, life: Incarnation, stream: int) -> None:
        """The node listens to its orders from now on."""
        if not self.knows(node, life):
            return
        self.streams[node] = stream
        self.contacts = leases.connected(self.contacts, node, self._world.agenda.now)
        self._sent.pop(node, None)
        self._published = None
        self._publish()
        self.set_alarm()

    def close_stream(self, node: NodeId, life: Incarnation, stream: int) -> None:
        if self.streams.get(node) != stream:
            return
        del self.streams[node]
        if self.knows(node, life):
            now = self._world.agenda.now
            self.contacts = leases.closed(self.contacts, node, now)
            gone = EventId(f"gone/{node}/{self.state.version}")
            self.advance(NodeDisconnected(id=gone, at=now, node=node, incarnation=life))

    # --- orders ------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Push to each stream what has changed for its node."""
        state = self.state
        key = basis(state)
        if key == self._published:
            return
        self._published = key
        for node, stream in list(self.streams.items()):
            orders = orders_for(state, node, self._world.agenda.now)
            sent = self._sent.get(node)
            if sent is None or _meaning(orders) != _meaning(sent):
                self._sent[node] = orders
                self._pushed[node] = orders.version
                self._world.push(node, stream, orders)


def _is_earlier(life: Incarnation, other: Incarnation) -> bool:
    return life.boot_id == other.boot_id and life.started_ticks < other.started_ticks


def _meaning(orders: Orders) -> Orders:
    """As in control.loop: `orders` without what changes although nothing has to be done differently."""
    drain = None if orders.drain is None else msgspec.structs.replace(orders.drain, grace=0.0)
    return msgspec.structs.replace(orders, version=0, drain=drain, redo_until=None)
