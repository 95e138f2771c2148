"""What the demo sees of its job: the event log, read by number, and rank 0's record of losses. It changes nothing."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from perdure.errors import EventLogError
from perdure.ports import LogRecord
from perdure.store.eventlog import open_reader
from perdure.vocab.event import (
    CheckpointChosen,
    CheckpointCommitted,
    GenerationBegan,
    NodeJoined,
    NodeReady,
    StepsBegun,
    WorkersStarted,
)
from perdure.vocab.generation import Assignment

T = TypeVar("T")
LOOK_EVERY = 0.05  # seconds


class Loss(NamedTuple):
    time: float
    step: int
    loss: float
    generation: int


class JobOverError(Exception):
    """The job ended while something was awaited."""


class Watch:
    """One job, seen from outside."""

    def __init__(self, home: Path, out: Path, is_over: Callable[[], bool]) -> None:
        self._home, self._losses, self._is_over = home, out / "losses.jsonl", is_over
        self.records: list[LogRecord] = []

    @property
    def log(self) -> Path | None:
        """The job's event log; None until it exists."""
        return next(iter(sorted(self._home.glob("jobs/*/events.db"))), None)

    def look(self) -> None:
        """Read what is new in the log."""
        if self.log is None:
            return
        try:
            reader = open_reader(str(self.log))
        except EventLogError:
            return  # being made at this moment
        try:
            self.records.extend(record for _, record in reader.read(after=len(self.records)))
        finally:
            reader.close()

    def until(self, what: str, found: Callable[[], T | None], within: float) -> T:
        """What `found` gives once it is not None. Raises TimeoutError or JobOverError, which name `what`."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            over = self._is_over()  # before the look: the last records count
            self.look()
            if (value := found()) is not None:
                return value
            if over:
                raise JobOverError(f"the job ended while waiting for {what}")
            time.sleep(LOOK_EVERY)
        raise TimeoutError(f"waited {within:.0f} s in vain for {what}")

    def losses(self) -> list[Loss]:
        """Every line that rank 0 wrote so far, in that order."""
        if not self._losses.exists():
            return []
        lines = self._losses.read_text().splitlines(keepends=True)
        return [Loss(**json.loads(line)) for line in lines if line.endswith("\n")]

    def last_step(self) -> int:
        """The step that was finished last; -1: none."""
        losses = self.losses()
        return losses[-1].step if losses else -1

    def assignment(self) -> Assignment | None:
        """Of the newest generation."""
        return next((r.assignment for r in reversed(self.records) if isinstance(r, GenerationBegan)), None)

    def nodes_ready(self) -> int:
        return len({r.node for r in self.records if isinstance(r, NodeReady)})

    def has_saved(self, generation: int) -> bool:
        """A checkpoint of `generation` is complete, with every rank's copy in another node's memory, too."""
        return any(found.checkpoint.generation == generation for found in self.committed())

    def committed(self) -> list[CheckpointCommitted]:
        """Every checkpoint that has become complete, in that order."""
        return [record for record in self.records if isinstance(record, CheckpointCommitted)]

    def chosen(self, generation: int) -> CheckpointChosen | None:
        """What the ranks of `generation` restored; None: they have not been told yet."""
        told = (r for r in self.records if isinstance(r, CheckpointChosen) and r.generation == generation)
        return next(told, None)

    def has_stepped(self, generation: int) -> bool:
        """All ranks have finished a step in `generation`."""
        assignment = self.assignment()
        if assignment is None or assignment.number != generation:
            return False
        told = {r.node for r in self.records if isinstance(r, StepsBegun) and r.generation == generation}
        return told >= set(assignment.nodes)

    def workers(self) -> dict[int, int]:
        """Pids of the newest generation's workers, by rank."""
        assignment = self.assignment()
        pids: dict[int, int] = {}
        for record in self.records:
            if assignment is None or not isinstance(record, WorkersStarted) or record.generation != assignment.number:
                continue
            member = assignment.member(record.node)
            if member is not None:
                pids.update(zip(member.ranks, record.pids, strict=False))
        return pids

    def agent(self, node: str) -> int:
        """Pid of the agent that `node` has now."""
        joined = (r.node for r in reversed(self.records) if isinstance(r, NodeJoined))
        return next(known.incarnation.pid for known in joined if known.id == node)
