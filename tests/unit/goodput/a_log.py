"""A builder of event logs as control writes them: `a_log().joined(0, 1).begin(0, 1).stepped(1)`. `after` moves time."""

from typing import Any, Self

from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import (
    AnyAction,
    Begin,
    Decision,
    Finish,
    GiveUp,
    Grow,
    Hold,
    ReplaceNode,
    RestartWorkers,
    Shrink,
)
from perdure.vocab.fault import Blame, Diagnosis, Fault, Remedy, Scope
from perdure.vocab.generation import Assignment, Member
from perdure.vocab.ids import ActionId, EventId, GenerationNumber, Incarnation, JobId, NodeId, Rank
from perdure.vocab.job import JobSpec
from perdure.vocab.node import Node

START = 1_796_000_000.0
SLOTS = 2


def node_id(index: int) -> NodeId:
    return NodeId(f"node-{index}")


def incarnation(index: int) -> Incarnation:
    return Incarnation(pid=1000 + index, started_ticks=7, boot_id="b00710ad")


def assignment(number: int, *nodes: int) -> Assignment:
    members = tuple(Member(node=node_id(n), first_rank=Rank(SLOTS * i), count=SLOTS) for i, n in enumerate(nodes))
    return Assignment(number=GenerationNumber(number), members=members, store_host=members[0].node)


def fault(name: str, *, scope: Scope = Scope.RANK) -> Fault:
    return Fault(
        id=name,
        title=name,
        meaning=f"The meaning of {name}.",
        scope=scope,
        blame=Blame.UNKNOWN,
        remedy=Remedy.RESTART_WORKERS,
        action="Nothing.",
        source="test",
    )


class LogBuilder:
    def __init__(self) -> None:
        self.at = START
        self.records: list[LogRecord] = []
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self.cause = EventId("")
        self.diagnosis: Diagnosis | None = None

    def after(self, seconds: float) -> Self:
        self.at = round(self.at + seconds, 6)
        return self

    def event(self, kind: type[Any], **fields: Any) -> Self:
        self.cause = EventId(f"e:{len(self.records) + 1}")
        self.records.append(kind(id=self.cause, at=fields.pop("at", self.at), **fields))
        return self

    # --- events -------------------------------------------------------------------------------------------------------

    def submitted(self, **fields: Any) -> Self:
        shape: dict[str, Any] = {"min_nodes": 2, "max_nodes": 2, "workers_per_node": SLOTS, "spares": 1} | fields
        spec = JobSpec(id=JobId("run-7f3a2c"), command=("train.py", "--lr", "3e-4"), **shape)
        self.event(e.JobSubmitted, spec=spec)
        return self.event(e.ControlStarted, incarnation=incarnation(99), version="0.1.0")

    def joined(self, *nodes: int) -> Self:
        for n in nodes:
            node = Node(
                id=node_id(n),
                incarnation=incarnation(n),
                host=f"host-{n}",
                address="127.0.0.1",
                slots=SLOTS,
                version="0.1.0",
                world="w",
            )
            self.event(e.NodeJoined, node=node)
        return self

    def lost(self, n: int, silent_for: float = 0.5) -> Self:
        return self.event(
            e.NodeLost, node=node_id(n), incarnation=incarnation(n), silent_for=silent_for, connection_closed=True
        )

    def exited(self, rank: int, *, signal: int | None = None, code: int | None = None, step: int | None = None) -> Self:
        return self.event(
            e.WorkerExited,
            **self._worker(rank),
            exit_code=code if signal is None else None,
            signal=signal,
            step=step,
        )

    def stopped(self, rank: int, stopped_for: float = 0.5) -> Self:
        return self.event(e.WorkerStopped, **self._worker(rank), stopped_for=stopped_for, step=None)

    def stalled(self, rank: int, silent_for: float, step: int) -> Self:
        return self.event(
            e.WorkerStalled,
            **self._worker(rank),
            phase="training",
            step=step,
            silent_for=silent_for,
            limit=silent_for,
            limit_source="learned: 5 x p99 of 0.41 s",
            process_state="S",
        )

    def _worker(self, rank: int) -> dict[str, Any]:
        return {
            "node": node_id(self.members[rank // SLOTS]),
            "generation": self.generation,
            "rank": rank,
            "local_rank": rank % SLOTS,
            "pid": 2000 + rank,
        }

    # --- generations --------------------------------------------------------------------------------------------------

    def began(self, *nodes: int) -> Self:
        self.members, self.generation = nodes, self.generation + 1
        return self.event(e.GenerationBegan, assignment=assignment(self.generation, *nodes), because="test")

    def running(self, after: float = 0.1, last_step: int | None = None) -> Self:
        self.after(after)
        for n in self.members:
            self.event(e.NodeGathered, node=node_id(n), generation=self.generation, store=None, last_step=last_step)
            self.event(e.WorkersStarted, node=node_id(n), generation=self.generation, pids=(1, 2), forked=True)
        return self.event(e.GenerationRunning, generation=self.generation)

    def stepped(self, step: int, after: float = 0.2) -> Self:
        self.after(after)
        for n in self.members:
            self.event(e.StepsBegun, node=node_id(n), generation=self.generation, step=step)
        return self

    def caught_up(self, step: int, after: float) -> Self:
        self.after(after)
        for n in self.members:
            self.event(e.CaughtUp, node=node_id(n), generation=self.generation, step=step)
        return self

    def finished(self) -> Self:
        for rank in range(SLOTS * len(self.members)):
            self.exited(rank, code=0)
        return self

    def ended(self, exit_code: int = 0, reason: str = "every rank has finished") -> Self:
        return self.event(e.JobEnded, exit_code=exit_code, reason=reason)

    # --- diagnoses and decisions --------------------------------------------------------------------------------------

    def diagnosed(self, name: str, what: str, n: int, *, rank: int | None = None, scope: Scope = Scope.RANK) -> Self:
        """Of the last event; holds for the next decision."""
        self.diagnosis = Diagnosis(
            fault=fault(name, scope=scope),
            node=node_id(n),
            rank=None if rank is None else Rank(rank),
            generation=GenerationNumber(self.generation),
            step=None,
            evidence=(self.cause,),
            confidence=0.9,
            what=what,
            fingerprint=name,
            counts_as_restart=True,
        )
        return self

    def _decided(self, because: str, *actions: AnyAction) -> Self:
        self.records.append(
            Decision(at=self.at, answers=self.cause, because=because, actions=actions, diagnosis=self.diagnosis)
        )
        self.diagnosis = None
        return self

    def _next(self, nodes: tuple[int, ...]) -> dict[str, Any]:
        return {"id": self._action(), "assignment": assignment(self.generation + 1, *nodes)}

    def _action(self) -> ActionId:
        return ActionId(f"1.{self.generation}.{self.cause}")

    def begin(self, *nodes: int) -> Self:
        return self._decided("all nodes are there", Begin(**self._next(nodes))).began(*nodes)

    def restart(self) -> Self:
        nodes = self.members
        because = "the first fault of this kind: the same nodes can go on"
        return self._decided(because, RestartWorkers(**self._next(nodes))).began(*nodes)

    def replace(self, lost: int, spare: int) -> Self:
        nodes = tuple(spare if n == lost else n for n in self.members)
        action = ReplaceNode(**self._next(nodes), lost=(node_id(lost),), spares=(node_id(spare),))
        return self._decided(f"node-{spare} is a spare and takes the ranks of node-{lost}", action).began(*nodes)

    def shrink(self, lost: int) -> Self:
        nodes = tuple(n for n in self.members if n != lost)
        return self._decided("no spare", Shrink(**self._next(nodes), lost=(node_id(lost),))).began(*nodes)

    def grow(self, joined: int) -> Self:
        nodes = (*self.members, joined)
        return self._decided(f"node-{joined} has come", Grow(**self._next(nodes), joined=(node_id(joined),))).began(
            *nodes
        )

    def hold(self, seconds: float = 1800.0) -> Self:
        return self._decided("no spare, no way to shrink", Hold(id=self._action(), until=self.at + seconds, lacking=1))

    def give_up(self, reason: str, exit_code: int = 1) -> Self:
        return self._decided("the same again", GiveUp(id=self._action(), exit_code=exit_code, reason=reason))

    def finish(self) -> Self:
        return self._decided("every rank has finished", Finish(id=self._action()))


def a_log() -> LogBuilder:
    return LogBuilder()


def a_run() -> LogBuilder:
    """Two nodes and a spare; training from 3.0 s after the start."""
    return a_log().submitted().after(0.4).joined(0, 1, 2).after(2.2).begin(0, 1).running(0.1).stepped(0, after=0.3)
