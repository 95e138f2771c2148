"""An agent driven by facts: `a_node().ordered(Duty.RUN).launched()`; `actions` is what it asked for after the last."""

from typing import Any, Self

import msgspec

from perdure.agent import decide
from perdure.agent import state as facts
from perdure.agent.progress import Progress, seen
from perdure.agent.state import AgentAction, AgentState, Tell, WorkerState
from perdure.vocab.event import AnyEvent
from perdure.vocab.generation import Address, Assignment, Member
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire.layouts import NO_STEP, LoopPhase
from perdure.wire.messages import DrainOrder, Duty, Orders, Peer
from perdure.wire.reading import SlotReading

ME, OTHER, SPARE = NodeId("node-0"), NodeId("node-1"), NodeId("node-2")
SLOTS = 2
START = 1000.0


def world(number: int, *nodes: NodeId) -> Assignment:
    members = tuple(Member(node=node, first_rank=Rank(SLOTS * i), count=SLOTS) for i, node in enumerate(nodes))
    return Assignment(number=GenerationNumber(number), members=members, store_host=members[0].node)


def reading(pid: int, step: int = NO_STEP, phase: LoopPhase = LoopPhase.TRAINING, **fields: Any) -> SlotReading:
    known: dict[str, Any] = {
        "pid": pid, "generation": 1, "step": step, "step_at": 0.0, "phase": phase, "phase_at": 1.0, "tells": True,
        "first_step": 1, "saves": 0, "saves_step": NO_STEP, "beats": 0,
    }  # fmt: skip
    return SlotReading(**known | fields)


class Node:
    def __init__(self, *, warm: bool) -> None:
        self.now = START
        self.state = AgentState(node=ME, slots=SLOTS, contact=START, ready=warm)
        self.actions: list[AgentAction] = []
        self.version = 0

    def take(self, state: AgentState) -> Self:
        self.actions = []
        self.state = state
        for _ in range(10):
            self.state, actions = decide.act(self.state, self.now)
            self.actions.extend(actions)
            if not actions:
                break
        return self

    def after(self, seconds: float, *, heard: bool = True) -> Self:
        self.now += seconds
        return self.take(facts.answered(self.state, self.now) if heard else self.state)

    def ordered(self, duty: Duty, generation: int = 1, nodes: tuple[NodeId, ...] = (ME, OTHER), **fields: Any) -> Self:
        self.version += 1
        orders = Orders(
            version=self.version,
            job=JobId("job"),
            duty=duty,
            generation=GenerationNumber(generation),
            assignment=world(generation, *nodes) if duty in (Duty.GATHER, Duty.RUN) else None,
            peers=(Peer(OTHER, Address("10.0.0.1", 1)), Peer(SPARE, Address("10.0.0.2", 1))),
            **fields,
        )
        return self.take(facts.ordered(self.state, orders))

    def store(self, generation: int = 1) -> Self:
        number = GenerationNumber(generation)
        return self.take(facts.store_listens(self.state, number, 900 + generation, Address("10.0.0.9", 5)))

    def launched(self, generation: int = 1) -> Self:
        for local in range(SLOTS):
            worker = WorkerState(
                pid=generation * 100 + local,
                local_rank=local,
                rank=Rank(local),
                generation=GenerationNumber(generation),
                progress=Progress(since=self.now),
            )
            self.state = facts.started(self.state, worker)
        return self.take(facts.launched(self.state))

    def running(self, **fields: Any) -> Self:
        return self.ordered(Duty.GATHER).store().ordered(Duty.RUN, **fields).launched()

    def read(self, pid: int, step: int = NO_STEP, letter: str = "S", **fields: Any) -> Self:
        worker = self.state.workers[pid]
        progress = seen(worker.progress, reading(pid, step, **fields), letter, self.now)
        return self.take(facts.changed(self.state, worker, progress=progress, state_letter=letter))

    def ended(self, pid: int, code: int | None = None, signal: int | None = None) -> Self:
        state, actions = decide.worker_ended(
            self.state, pid, exit_code=code, signal=signal, error=None, memory=None, log_tail="", now=self.now
        )
        self.take(state)
        self.actions = [*actions, *self.actions]
        return self

    @property
    def told(self) -> list[AnyEvent]:
        return [action.event for action in self.actions if isinstance(action, Tell)]

    @property
    def asked(self) -> list[AgentAction]:
        return [action for action in self.actions if not isinstance(action, Tell)]


def a_node(*, warm: bool = True) -> Node:
    return Node(warm=warm)


def drain(**fields: Any) -> DrainOrder:
    return msgspec.structs.replace(DrainOrder(signal=2, grace=30.0, stop_after=None, forward=False), **fields)
