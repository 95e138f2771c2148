"""What must hold in every event log, of a simulation and of real processes alike. Pure; it knows records only."""

from collections.abc import Iterable

import msgspec

from perdure.goodput import account
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import (
    Begin,
    Decision,
    GiveUp,
    Grow,
    Hold,
    Quarantine,
    ReplaceNode,
    RestartWorkers,
    Shrink,
)
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import EventId, GenerationNumber, Incarnation, NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Instant

_CHANGES = RestartWorkers | ReplaceNode | Shrink | Grow | Begin
_FAULTS = (
    e.WorkerExited
    | e.WorkerStopped
    | e.WorkerStalled
    | e.WorkerUnkillable
    | e.StoreLost
    | e.StartFailed
    | e.NodeLost
    | e.NodeLeft
)
_PLAIN = e.StopRequested | e.DrainAcked | e.NodeJoined | e.NodeReady | e.SavePassed | e.StepsBegun | e.TimePassed
"""What may be answered without a diagnosis: a user, nodes that come, a moment to grow, a deadline."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that did not hold."""

    rule: str
    what: str
    at: Instant
    record: int = 0
    """Number of the record, from 1; 0: it is not about one."""


def check_records(records: Iterable[LogRecord]) -> tuple[Violation, ...]:
    """Every rule that `records`, a whole log or its beginning, violate."""
    known = tuple(records)
    checker = RecordChecker()
    for record in known:
        checker.take(record)
    return (*checker.violations, *check_ledger(known))


def check_ledger(records: tuple[LogRecord, ...]) -> tuple[Violation, ...]:
    """Every node-second is in exactly one phase."""
    if not records:
        return ()
    ledger = account(records)
    phases = sum(ledger.by_phase.values())
    presence = sum(_presence(records))
    if abs(phases - presence) <= 1e-3 + 1e-9 * presence and abs(ledger.node_seconds - phases) <= 1e-3 + 1e-9 * presence:
        return ()
    what = f"the phases add up to {phases:.6f} node-seconds, the nodes were there for {presence:.6f}"
    return (Violation(rule="the ledger adds up", what=what, at=ledger.end),)


def _presence(records: tuple[LogRecord, ...]) -> Iterable[float]:
    """The length of each node's presence, on a clock that never goes back."""
    since: dict[NodeId, Instant] = {}
    clock = 0.0
    for record in records:
        clock = max(clock, record.at)
        match record:
            case e.NodeJoined():
                since.setdefault(record.node.id, clock)
            case e.NodeLost() | e.NodeLeft() if record.node in since:
                yield clock - since.pop(record.node)
            case e.JobEnded():
                break
            case _:
                pass
    yield from (clock - begin for begin in since.values())


class RecordChecker:
    """Takes one record after the other."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._count = 0
        self._at: Instant = 0.0
        self._spec: JobSpec | None = None
        self._events: dict[EventId, e.AnyEvent] = {}
        self._answered: set[EventId] = set()
        self._present: dict[NodeId, Incarnation] = {}
        self._quarantined: set[NodeId] = set()
        self._assignment: Assignment | None = None
        self._promised: Assignment | None = None
        """Of a decision whose GenerationBegan has not come yet."""
        self._holding = False
        self._gathered: set[NodeId] = set()
        self._left_out: set[NodeId] = set()
        """Nodes that worked in an earlier generation, are there still in that life, and have no part in this one."""
        self._running: GenerationNumber | None = None
        self._restarts: list[Instant] = []
        self._ended = False

    def _fail(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule=rule, what=what, at=self._at, record=self._count))

    def take(self, record: LogRecord) -> None:
        """Check one more record."""
        self._count += 1
        self._at = record.at
        if self._count == 1 and not isinstance(record, e.JobSubmitted):
            self._fail("a log begins with its job", f"the first record is {type(record).__name__}")
        if self._promised is not None and not isinstance(record, e.GenerationBegan):
            self._fail("a decision's generation begins at once", f"{type(record).__name__} came between")
            self._promised = None
        if isinstance(record, Decision):
            self._decision(record)
            return
        self._events[record.id] = record
        match record:
            case e.JobSubmitted():
                self._spec = record.spec
            case e.NodeJoined() | e.NodeLost() | e.NodeLeft():
                self._node(record)
            case e.GenerationBegan():
                self._began(record)
            case e.NodeGathered() | e.WorkersStarted() | e.GenerationRunning():
                self._progress(record)
            case e.JobEnded():
                self._end(record)
            case _:
                pass

    def _node(self, record: e.NodeJoined | e.NodeLost | e.NodeLeft) -> None:
        if isinstance(record, e.NodeJoined):
            before = self._present.get(record.node.id)
            if before is not None and before != record.node.incarnation:
                self._fail("a node has one life at a time", f"{record.node.id} joined again before it was lost")
            self._present[record.node.id] = record.node.incarnation
        else:
            self._left_out.discard(record.node)
            if self._present.pop(record.node, None) != record.incarnation:
                self._fail("only who is there can go", f"{record.node} went in a life that was not there")

    # --- generations -------------------------------------------------------------------------------------------------

    def _began(self, record: e.GenerationBegan) -> None:
        if record.assignment != self._promised:
            self._fail("a generation is decided", f"generation {record.assignment.number} began without its decision")
        self._promised = None
        before, now = self._assignment, record.assignment
        if now.number != (before.number + 1 if before is not None else 1):
            self._fail("generation numbers rise by one", f"{now.number} follows {before.number if before else 'none'}")
        if len(set(now.nodes)) != len(now.nodes):
            self._fail("a node has one part", f"generation {now.number} names a node twice")
        if now.store_host not in now.nodes:
            self._fail("the store's host is a member", f"{now.store_host} in generation {now.number}")
        for node in now.nodes:
            if node in self._quarantined:
                self._fail("no work on a quarantined node", f"{node} in generation {now.number}")
            if node not in self._present:
                self._fail("members are there", f"{node} in generation {now.number} is not present")
        if self._spec is not None and not self._spec.min_nodes <= len(now.nodes) <= self._spec.max_nodes:
            self._fail("a world has the size that was asked for", f"generation {now.number}: {len(now.nodes)} nodes")
        if before is not None and before.world_size == now.world_size:
            self._stable(before, now)
        earlier = self._left_out | (set(before.nodes) if before is not None else set())
        self._left_out = {node for node in earlier - set(now.nodes) if node in self._present}
        self._assignment, self._gathered, self._running, self._holding = now, set(), None, False

    def _stable(self, before: Assignment, now: Assignment) -> None:
        for member in now.members:
            was = before.member(member.node)
            if was is not None and was.first_rank != member.first_rank:
                what = f"{member.node} had {was.first_rank} and has {member.first_rank} in generation {now.number}"
                self._fail("ranks are stable while the world keeps its size", what)

    def _progress(self, record: e.NodeGathered | e.WorkersStarted | e.GenerationRunning) -> None:
        now = self._assignment
        if now is None or record.generation != now.number:
            if isinstance(record, e.GenerationRunning):
                self._fail("one live generation", f"{record.generation} is said to run, and is not the newest")
            return
        match record:
            case e.NodeGathered():
                self._gathered.add(record.node)
                self._left_out.discard(record.node)
            case e.WorkersStarted():
                if not set(now.nodes) <= self._gathered:
                    what = f"{record.node} started generation {now.number} before all had gathered"
                    self._fail("nobody starts before all have gathered", what)
                if self._left_out:
                    names = ", ".join(sorted(self._left_out))
                    what = f"{record.node} started generation {now.number} while {names} had not cleared"
                    self._fail("nobody starts before those that were left out have cleared", what)
                if record.node not in now.nodes:
                    self._fail("only members work", f"{record.node} started in generation {now.number}")
            case e.GenerationRunning():
                if self._running is not None or self._holding:
                    self._fail("one live generation", f"{record.generation} began to run twice, or in a hold")
                self._running = record.generation

    def _end(self, record: e.JobEnded) -> None:
        if self._ended:
            self._fail("a job ends once", record.reason)
        if not record.reason:
            self._fail("everything has a reason", "the job's end has none")
        self._ended = True

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _decision(self, decision: Decision) -> None:
        if self._ended:
            self._fail("nothing is decided after the end", decision.because)
        if decision.answers in self._answered:
            self._fail("an event is answered once", f"{decision.answers}: {decision.because}")
        self._answered.add(decision.answers)
        if not decision.because or not decision.actions:
            self._fail("everything has a reason", f"the decision on {decision.answers} has no reason, or no action")
        self._cause(decision)
        for action in decision.actions:
            match action:
                case RestartWorkers() | ReplaceNode() | Shrink() | Grow() | Begin():
                    self._promised = action.assignment
                    self._budget(decision)
                case Hold():
                    self._holding, self._running = True, None
                case Quarantine():
                    self._quarantined.add(action.node)
                case GiveUp() if not action.reason:
                    self._fail("everything has a reason", "the job is given up without one")
                case _:
                    pass

    def _cause(self, decision: Decision) -> None:
        event = self._events.get(decision.answers)
        if event is None:
            self._fail("a decision answers an event in the log", f"{decision.answers}: {decision.because}")
            return
        if isinstance(event, e.WorkerExited) and event.exit_code == 0:
            if decision.diagnosis is not None:
                self._fail("a finished rank is no fault", f"rank {event.rank}: {decision.because}")
        elif decision.diagnosis is not None:
            if not isinstance(event, _FAULTS) or decision.diagnosis.evidence[0] != event.id:
                self._fail("a diagnosis rests on its event", f"{decision.answers}: {decision.because}")
        elif not isinstance(event, _PLAIN):
            self._fail("a decision has a cause", f"{type(event).__name__}: {decision.because}")
        generation = getattr(event, "generation", None)
        is_late = generation is not None and self._assignment is not None and generation != self._assignment.number
        if is_late and not isinstance(event, e.WorkerUnkillable):
            self._fail("what an earlier generation says is history", f"{decision.answers}: {decision.because}")

    def _budget(self, decision: Decision) -> None:
        if self._spec is None or decision.diagnosis is None or not decision.diagnosis.counts_as_restart:
            return
        rules = self._spec.rules
        self._restarts = [at for at in self._restarts if decision.at - at < rules.restart_window]
        self._restarts.append(decision.at)
        if len(self._restarts) > rules.max_restarts:
            what = f"{len(self._restarts)} in {rules.restart_window:g} s, {rules.max_restarts} are allowed"
            self._fail("restarts stay within their budget", what)
