"""A job driven through the brain: `a_job(nodes=2).started()`. It says what nodes would say; time moves by `after`."""

from pathlib import Path
from typing import Any, Self

from perdure.control.brain import step
from perdure.control.fold import event_id, replay
from perdure.control.orders import orders_for
from perdure.control.state import State
from perdure.playbook.parse import Catalogue, parse_catalogue
from perdure.ports import LogRecord
from perdure.sim.checker import check_records
from perdure.vocab import event as e
from perdure.vocab.decision import AnyAction, Decision
from perdure.vocab.generation import Address, Assignment
from perdure.vocab.ids import EventId, Incarnation, JobId, NodeId, Rank
from perdure.vocab.job import JobSpec, RecoveryRules
from perdure.vocab.node import Node
from perdure.wire.messages import Orders

START = 1_796_000_000.0
FOLDER = Path(__file__).parents[3] / "src" / "perdure" / "playbook" / "catalogue"


def catalogue() -> Catalogue:
    return parse_catalogue(file.read_text() for file in FOLDER.glob("*.toml"))


def node_id(index: int) -> NodeId:
    return NodeId(f"node-{index}")


class Job:
    """Each method is one thing that happens; `decisions` is what control made of it, newest last."""

    def __init__(self, spec: JobSpec) -> None:
        self.now = START
        self.spec = spec
        self.state = State()
        self.records: list[LogRecord] = []
        self.lives: dict[int, int] = {}
        self.seqs: dict[int, int] = {}
        self.catalogue = catalogue()
        self.take(e.JobSubmitted(id=EventId("control//job"), at=self.now, spec=spec))

    # --- driving -----------------------------------------------------------------------------------------------------

    def take(self, *events: Any) -> Self:
        self.state, records = step(self.state, events, self.now, self.catalogue)
        self.records.extend(records)
        assert replay(self.records) == self.state
        assert check_records(self.records) == ()
        return self

    def after(self, seconds: float) -> Self:
        self.now += seconds
        return self.take()

    def life(self, index: int) -> Incarnation:
        return Incarnation(pid=100 + index, started_ticks=self.lives.get(index, 1), boot_id="boot")

    def say(self, kind: Any, index: int, **fields: Any) -> Self:
        """An event of a node; a repeated one if `seq` is given."""
        seq = fields.pop("seq", None)
        if seq is None:
            seq = self.seqs[index] = self.seqs.get(index, 0) + 1
        fields = {"at": self.now, "generation": self.state.number} | fields
        if "generation" not in kind.__struct_fields__:
            del fields["generation"]
        return self.take(kind(id=event_id(node_id(index), self.life(index), seq), node=node_id(index), **fields))

    def join(self, *indices: int, ready: bool = True, standby: bool = False) -> Self:
        for index in indices:
            self.take(self.joined(index, standby=standby))
            if ready:
                self.say(e.NodeReady, index, warm=True, seconds=1.0)
        return self

    def joined(self, index: int, *, standby: bool = False) -> e.NodeJoined:
        node = Node(
            id=node_id(index),
            incarnation=self.life(index),
            host=f"host-{index}",
            address=f"10.0.0.{index}",
            slots=self.spec.workers_per_node,
            version="1",
            world=self.spec.world,
            order=index,
            standby=standby,
        )
        identity = EventId(f"join/{index}/{self.life(index)}/{len(self.records)}")
        return e.NodeJoined(id=identity, at=self.now, node=node)

    def rejoin(self, *indices: int, ready: bool = True) -> Self:
        """The node is back with a new agent."""
        for index in indices:
            self.lives[index] = self.lives.get(index, 1) + 1
            self.seqs[index] = 0
            self.join(index, ready=ready)
        return self

    def gather(self) -> Self:
        """All members have gathered, and all that were left out have cleared."""
        for node in sorted(self.state.uncleared):
            self.say(e.NodeGathered, int(node.removeprefix("node-")), store=None, last_step=None)
        return self.gather_members()

    def gather_members(self) -> Self:
        for node in self.assignment.nodes:
            index = int(node.removeprefix("node-"))
            store = Address("10.0.0.1", 29500) if node == self.assignment.store_host else None
            self.say(e.NodeGathered, index, store=store, last_step=None)
        return self

    def run(self, *, steps: bool = True) -> Self:
        """The current generation gathers, starts and makes its first step."""
        self.gather()
        for index in self.members:
            self.say(e.WorkersStarted, index, pids=(1,), forked=True)
        for index in self.members if steps else ():
            self.say(e.StepsBegun, index, step=1)
        return self

    def started(self) -> Self:
        return self.join(*range(self.spec.max_nodes)).run()

    def exit(self, rank: int, code: int | None = 0, signal: int | None = None, **fields: Any) -> Self:
        node = self.assignment.node_of(Rank(rank))
        assert node is not None
        member = self.assignment.member(node)
        assert member is not None
        fields = {"step": None, "pid": 1000 + rank, "local_rank": rank - member.first_rank} | fields
        index = int(node.removeprefix("node-"))
        return self.say(e.WorkerExited, index, rank=Rank(rank), exit_code=code, signal=signal, **fields)

    def raise_(self, rank: int, where: str = "train.py:7", step: int | None = 5, message: str = "bad sample") -> Self:
        error = e.WorkerError(type="ValueError", message=message, where=where, traceback="Traceback …")
        return self.exit(rank, 1, error=error, step=step)

    def lose(self, index: int, *, closed: bool = True) -> Self:
        return self.take(self.lost(index, closed=closed))

    def lost(self, index: int, *, closed: bool = True) -> e.NodeLost:
        life = self.life(index)
        return e.NodeLost(
            id=EventId(f"lost/{index}/{life}"),
            at=self.now,
            node=node_id(index),
            incarnation=life,
            silent_for=0.5 if closed else 5.5,
            connection_closed=closed,
        )

    def lose_and_rejoin_at_once(self, index: int) -> Self:
        """Its agent is started again before anyone has noticed: control hears of both by the new one's join."""
        lost = self.lost(index)
        self.lives[index] = self.lives.get(index, 1) + 1
        self.seqs[index] = 0
        return self.take(lost, self.joined(index))

    def disconnect(self, index: int) -> Self:
        gone = EventId(f"gone/{index}/{len(self.records)}")
        return self.take(e.NodeDisconnected(id=gone, at=self.now, node=node_id(index), incarnation=self.life(index)))

    def leave(self, index: int) -> Self:
        life = self.life(index)
        return self.take(
            e.NodeLeft(id=EventId(f"left/{index}/{life}"), at=self.now, node=node_id(index), incarnation=life)
        )

    def stop(self, grace: float = 30.0) -> Self:
        identity = EventId(f"stop//{len(self.records)}")
        return self.take(e.StopRequested(id=identity, at=self.now, by="a user", signal=2, grace=grace))

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> Assignment:
        assert self.state.previous is not None
        return self.state.previous

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(int(node.removeprefix("node-")) for node in self.assignment.nodes)

    @property
    def ranks(self) -> dict[int, tuple[int, ...]]:
        return {int(m.node.removeprefix("node-")): m.ranks for m in self.assignment.members}

    @property
    def decisions(self) -> list[Decision]:
        return [record for record in self.records if isinstance(record, Decision)]

    @property
    def did(self) -> list[str]:
        """Tags of all first actions but the first Begin."""
        return [str(type(d.actions[0]).__struct_config__.tag) for d in self.decisions[1:]]

    @property
    def last(self) -> AnyAction:
        return self.decisions[-1].actions[0]

    def orders(self, index: int) -> Orders:
        return orders_for(self.state, node_id(index), self.now)


def a_job(nodes: int = 2, *, least: int | None = None, workers: int = 2, spares: int = 0, **rules: Any) -> Job:
    spec = JobSpec(
        id=JobId("job"),
        command=("train.py",),
        min_nodes=nodes if least is None else least,
        max_nodes=nodes,
        workers_per_node=workers,
        spares=spares,
        rules=RecoveryRules(**rules),
    )
    return Job(spec)
