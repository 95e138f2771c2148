"""What each record of an event log means for the phases of the nodes and for the restarts: the state of the fold.

It makes no sums (`ledger` does), reads no clock and no file. All times are the log's, on control's clock.
"""

from perdure.goodput.phases import Phase, Roster, Track, to_us
from perdure.goodput.restarts import RestartBook
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import (
    Begin,
    Decision,
    Drain,
    Finish,
    GiveUp,
    Grow,
    Hold,
    ReplaceNode,
    Requeue,
    RestartInProcess,
    RestartWorkers,
    RetryStep,
    Shrink,
)
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import EventId, GenerationNumber, NodeId, Rank
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Seconds

_CHANGES = (RetryStep, RestartInProcess, RestartWorkers, ReplaceNode, Shrink, Grow, Begin, Hold)
_ENDINGS = (GiveUp, Finish, Drain, Requeue)
_PRODUCTIVE = frozenset({Phase.TRAINING, Phase.REDONE})
_ANY = frozenset(Phase)
_TELLING = (e.StepsBegun, e.CaughtUp, e.SavePassed, e.WorkerExited, e.WorkerStopped, e.WorkerStalled)


class Fold:
    """State of the fold over one log."""

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.first: int | None = None
        self.clock = 0
        """Control's, in microseconds: the latest time seen."""
        self.job: JobSpec | None = None
        self.exit_code: int | None = None
        self.ended = False
        self.stopping = False
        self.held = False
        self.roster = Roster()
        self.book = RestartBook()
        self.faults: dict[EventId, tuple[int, int]] = {}
        """When each fault began, and when its event came."""
        self.assignment: Assignment | None = None
        self.members: frozenset[NodeId] = frozenset()
        """Of the assignment."""
        self.generation_at = 0
        self.current = False
        """The assignment is in force: no decision has ended it."""
        self.begun: set[NodeId] = set()
        self.caught: set[NodeId] = set()
        self.finished: set[Rank] = set()
        self.is_first = True
        self.redo_until: int | None = None
        self.highest: int | None = None

    # --- one record ---------------------------------------------------------------------------------------------------

    def take(self, record: LogRecord) -> None:
        at = to_us(record.at)
        if self.first is None:
            self.first = self.clock = at
        self.clock = max(self.clock, at)
        known_after = _known_after(record)
        if known_after is not None and not isinstance(record, Decision):
            self.faults[record.id] = (at - to_us(max(known_after, 0.0)), at)
        if isinstance(record, _TELLING):
            self.highest = _higher(self.highest, record.step)
        self._take_job(record)
        self._take_node(record)
        self._take_generation(record, at)

    def _take_job(self, record: LogRecord) -> None:
        match record:
            case e.JobSubmitted():
                self.job = record.spec
            case e.StopRequested():
                self._stop(self.clock)
            case e.JobEnded():
                self.exit_code, self.ended = record.exit_code, True
            case Decision():
                self._decided(record)
            case _:
                pass

    def _take_node(self, record: LogRecord) -> None:
        match record:
            case e.NodeJoined():
                self.roster.join(record.node.id, self.clock, self._phase_for(record.node.id))
            case e.NodeLost():
                for track in self.roster.among([record.node]):
                    track.repaint(self.clock - to_us(record.silent_for), self.clock, Phase.DETECTION, _ANY)
                self.roster.leave(record.node, self.clock)
            case e.NodeLeft():
                self.roster.leave(record.node, self.clock)
            case _:
                pass

    def _take_generation(self, record: LogRecord, at: int) -> None:
        match record:
            case e.GenerationBegan():
                self._began(record.assignment)
            case e.GenerationRunning():
                self._running(record.generation)
            case e.NodeGathered():
                self.redo_until = _higher(self.redo_until, record.last_step)
            case e.StepsBegun():
                self._steps_begun(record, at)
            case e.CaughtUp():
                self._caught_up(record, at)
            case e.WorkerExited(exit_code=0, signal=None):
                self._finished(record, at)
            case _:
                pass

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _phase_for(self, node: NodeId) -> Phase:
        """Of a node that comes now."""
        if self.held:
            return Phase.HELD
        if self.assignment is None:
            return Phase.SHUTDOWN if self.stopping else Phase.START_UP
        if node not in self.members:
            return Phase.IDLE_SPARE
        return Phase.SHUTDOWN if self.stopping else Phase.RECOVERY

    def _members(self) -> list[Track]:
        """Present nodes of the assignment; all present nodes where there is none yet."""
        return self.roster.among(self.roster.present if self.assignment is None else self.assignment.nodes)

    # --- generations --------------------------------------------------------------------------------------------------

    def _began(self, assignment: Assignment) -> None:
        if self.stopping:
            return
        self.is_first = self.assignment is None
        self.redo_until = _higher(self.redo_until, self.highest)
        self.assignment, self.generation_at, self.current, self.held = assignment, self.clock, True, False
        self.members = frozenset(assignment.nodes)
        self.begun, self.caught, self.finished = set(), set(), set()
        self.book.began(assignment.number, self.clock)
        phase = Phase.START_UP if self.is_first else Phase.RECOVERY
        for node, track in self.roster.present.items():
            track.switch(self.clock, phase if node in self.members else Phase.IDLE_SPARE)

    def _is_current(self, number: GenerationNumber) -> bool:
        return self.current and not self.stopping and self.assignment is not None and self.assignment.number == number

    def _running(self, number: GenerationNumber) -> None:
        if not self._is_current(number):
            return
        self.book.running(self.clock)
        if not self.tells:
            for track in self._members():
                track.switch(self.clock, Phase.TRAINING)
            self.book.first_step(self.clock)

    def _steps_begun(self, record: e.StepsBegun, at: int) -> None:
        if not self._is_current(record.generation):
            return
        redoes = not self.is_first and self.redo_until is not None and record.step <= self.redo_until
        self._step(record.node, at, redoes=redoes and record.node not in self.caught)

    def _caught_up(self, record: e.CaughtUp, at: int) -> None:
        if self._is_current(record.generation):
            self.caught.add(record.node)
            self._step(record.node, at, redoes=False)

    def _step(self, node: NodeId, at: int, *, redoes: bool) -> None:
        """A member has made a step of the current generation."""
        if node not in self.members:
            return
        at = max(at, self.generation_at)
        for track in self.roster.among([node]):
            track.switch(at, Phase.REDONE if redoes else Phase.TRAINING)
        self.begun.add(node)
        if len(self.begun) == len(self.members):
            self.book.first_step(at)
        if redoes:
            self.book.redoing(at)
        elif node in self.caught:
            self.book.caught_up(at)

    def _finished(self, record: e.WorkerExited, at: int) -> None:
        if self._is_current(record.generation) and self.assignment is not None:
            self.finished.add(record.rank)
            if len(self.finished) >= self.assignment.world_size:
                self._stop(max(at, self.generation_at))

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decided(self, decision: Decision) -> None:
        changes = any(isinstance(action, _CHANGES) for action in decision.actions)
        ends = any(isinstance(action, _ENDINGS) for action in decision.actions)
        if self.stopping or not (changes or ends):
            return
        began, at = self.faults.get(decision.answers, (self.clock, self.clock))
        at = max(at, self.generation_at)
        for track in self._members():
            track.repaint(max(began, self.generation_at), at, Phase.DETECTION, _PRODUCTIVE)
        if ends:
            self._stop(at)
        else:
            self._change(decision, began, at)

    def _change(self, decision: Decision, began: int, at: int) -> None:
        """The current generation, or the attempt to make one, is over."""
        if self.assignment is not None and not (self.held and decision.diagnosis is None):
            self.book.opened(decision, began, at)
        if self.assignment is not None and not self.held:
            for track in self._members():
                track.switch(at, Phase.RECOVERY)
        self.book.decided(decision)
        self.current = False
        if any(isinstance(action, Hold) for action in decision.actions):
            self.held = True
            for track in self.roster.present.values():
                track.switch(self.clock, Phase.HELD)
        if self.held:
            self.book.held(self.clock)

    def _stop(self, at: int) -> None:
        if self.stopping:
            return
        self.stopping, self.held = True, False
        self.book.over(at)
        for track in self._members():
            track.switch(at, Phase.SHUTDOWN)


def _known_after(record: LogRecord) -> Seconds | None:
    """How long a fault had lasted when its event came; None: the record is no fault."""
    match record:
        case e.NodeLost() | e.NodeFenced() | e.WorkerStalled():
            return record.silent_for
        case e.WorkerStopped():
            return record.stopped_for
        case e.WorkerUnkillable():
            return record.waited
        case e.WorkerExited() if (record.exit_code, record.signal) != (0, None):
            return 0.0
        case e.StoreLost() | e.StartFailed() | e.NodeLeft():
            return 0.0
        case _:
            return None


def _higher(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
