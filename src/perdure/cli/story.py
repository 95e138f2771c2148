"""`FaultStory`: while a job runs, three lines for each fault as soon as it is over: what, what it means, what was done.

It is fed the log's records one by one and keeps only the faults that are not over.
"""

from collections.abc import Iterable

from perdure.cli.words import act, nodes
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import Decision, GiveUp, Grow, Hold
from perdure.vocab.ids import EventId
from perdure.vocab.units import Instant, Seconds, show_duration

Block = tuple[str, str, str]
"""What happened and where; what it means; what was done and how long it took."""


class FaultStory:
    """A fault is over when the generation that answers it runs, when it leads to a hold, or when it ends the job."""

    def __init__(self) -> None:
        self._came: dict[EventId, tuple[Instant, Seconds]] = {}
        """When the events of the current generation came, and how late."""
        self._open: Decision | None = None
        self._held: Decision | None = None

    def tell(self, record: LogRecord) -> tuple[Block, ...]:
        """The blocks that are complete with `record`; mostly none."""
        match record:
            case Decision():
                return self._decided(record)
            case e.GenerationRunning():
                return self._running(record.at)
            case e.NodeLost() | e.WorkerStalled() | e.NodeFenced():
                self._came[record.id] = (record.at, record.silent_for)
            case e.WorkerStopped():
                self._came[record.id] = (record.at, record.stopped_for)
            case e.WorkerUnkillable():
                self._came[record.id] = (record.at, record.waited)
            case e.WorkerExited() | e.NodeLeft() | e.StoreLost() | e.StartFailed():
                self._came[record.id] = (record.at, 0.0)
            case _:
                pass
        return ()

    def _decided(self, decision: Decision) -> tuple[Block, ...]:
        if decision.diagnosis is None and not any(isinstance(a, Grow) for a in decision.actions):
            if self._held is not None:
                self._open = decision
            return ()
        overtaken = self._overtaken(decision.at)
        if any(isinstance(action, GiveUp | Hold) for action in decision.actions):
            if any(isinstance(action, Hold) for action in decision.actions):
                self._held = decision
            return (*overtaken, self._block(decision, ""))
        self._open = decision
        return overtaken

    def _overtaken(self, at: Instant) -> tuple[Block, ...]:
        before, self._open = self._open, None
        if before is None or before.diagnosis is None:
            return ()
        return (self._block(before, f"; overtaken by the next fault {show_duration(at - self._at(before))} later"),)

    def _running(self, at: Instant) -> tuple[Block, ...]:
        decision, held = self._open, self._held
        self._open = self._held = None
        if decision is None:
            self._came.clear()
            return ()
        if held is not None and decision.diagnosis is None:
            block = self._block(decision, f"; the hold took {show_duration(at - held.at)}")
        else:
            block = self._block(decision, f"; {self._took(decision, at)}")
        self._came.clear()
        return (block,)

    def _at(self, decision: Decision) -> Instant:
        return self._came.get(decision.answers, (decision.at, 0.0))[0]

    def _took(self, decision: Decision, at: Instant) -> str:
        came, late = self._came.get(decision.answers, (decision.at, 0.0))
        if not late:
            return f"running again after {show_duration(at - came)}"
        return f"noticed after {show_duration(late)}, running again {show_duration(at - came)} later"

    def _block(self, decision: Decision, how_long: str) -> Block:
        diagnosis = decision.diagnosis
        done = "; ".join(act(action) for action in decision.actions) + how_long
        if diagnosis is None:
            return (f"change  {_change(decision)}", f"means   {decision.because}", f"done    {done}")
        means = f"{diagnosis.fault.meaning} [{diagnosis.fault.id}]"
        return (f"fault   {diagnosis.what}", f"means   {means}", f"done    {done}")


def _change(decision: Decision) -> str:
    joined = next((action.joined for action in decision.actions if isinstance(action, Grow)), None)
    return "the job goes on" if joined is None else f"{nodes(joined)} can take part"


def three_lines(records_of_one_fault: Iterable[LogRecord]) -> Block | None:
    """The last block that these records complete; None: none."""
    story = FaultStory()
    blocks = [block for record in records_of_one_fault for block in story.tell(record)]
    return blocks[-1] if blocks else None
