"""Memory servers driven through `control.saves`: `a_memory(nodes=2).attached()`. It says what servers would say."""

from typing import Any, Self

import msgspec

from perdure.control import saves
from perdure.vocab.checkpoint import CheckpointId, Held, Level, Stored
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Incarnation, NodeId, Rank
from perdure.wire.memory import Attachment, MemoryOrders, MemoryReport, Policy

START = 1_796_000_000.0
ATTEMPT = int(START)


def an_id(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(attempt=ATTEMPT, generation=GenerationNumber(generation), step=step)


def node_id(index: int) -> NodeId:
    return NodeId(f"node-{index}")


class Memory:
    """One rank per node, rank i on node i. Each method is one thing that happens; `orders` is what follows."""

    def __init__(self, nodes: int, policy: Policy, *, store: bool) -> None:
        self.now, self.nodes, self.store = START, nodes, store
        self.state = saves.opened(START)
        self.policy = policy
        self.reports = [self._report(index) for index in range(nodes)]
        self.shards = [f"shards-{index}" for index in range(nodes)]

    def _report(self, index: int) -> MemoryReport:
        return MemoryReport(
            node=node_id(index),
            incarnation=Incarnation(pid=index, started_ticks=1, boot_id=f"boot-{index}"),
            address=Address("127.0.0.1", 7000 + index),
            domain=f"rack-{index}",
            attempt=ATTEMPT,
            generation=GenerationNumber(0),
            policy=self.policy,
            world_size=self.nodes,
            store="/store" if self.store else "",
        )

    @property
    def orders(self) -> MemoryOrders:
        return saves.orders(self.state, self.now)

    def restarted(self) -> Self:
        """Control begins anew and knows nothing."""
        self.state = saves.opened(self.now)
        return self

    def say(self, index: int, **changes: Any) -> Self:
        report = msgspec.structs.replace(self.reports[index], **changes)
        self.reports[index] = msgspec.structs.replace(report, number=report.number + 1)
        self.state = saves.reported(self.state, self.reports[index], self.now)
        return self

    def attached(self, generation: int = 1, *, restoring: bool = False, **about: Any) -> Self:
        for index in range(self.nodes):
            self.attach(index, generation, restoring=restoring, **about)
        return self

    def attach(self, index: int, generation: int = 1, *, restoring: bool = False, **about: Any) -> Self:
        trainer = Attachment(rank=Rank(index), shards=self.shards[index], restoring=int(restoring), **about)
        ranks = (Rank(index),)
        return self.say(index, generation=GenerationNumber(generation), attached=(trainer,), ranks=ranks, done=False)

    def at_step(self, step: int, seconds: float = 1.0) -> Self:
        for index, report in enumerate(self.reports):
            trainers = tuple(msgspec.structs.replace(each, step=step) for each in report.attached)
            self.say(index, attached=trainers, step_seconds=seconds)
        return self

    def holds(self, index: int, *held: Held) -> Self:
        return self.say(index, held=(*self.reports[index].held, *held))

    def sealed(self, checkpoint: CheckpointId) -> Self:
        """By all ranks, each on its own node."""
        for index in range(self.nodes):
            self.holds(index, self.copy(checkpoint, index))
        return self

    def replicated(self, checkpoint: CheckpointId) -> Self:
        """On the next node."""
        for index in range(self.nodes):
            self.holds((index + 1) % self.nodes, self.copy(checkpoint, index))
        return self

    def copy(self, checkpoint: CheckpointId, rank: int, **changes: Any) -> Held:
        held = Held(
            checkpoint=checkpoint,
            rank=Rank(rank),
            world_size=self.nodes,
            level=Level.SEALED,
            layout="layout",
            shards=self.shards[rank],
            root=f"root of {checkpoint} of {rank}",
            nbytes=100,
        )
        return msgspec.structs.replace(held, **changes)

    def in_storage(self, *checkpoints: CheckpointId) -> Self:
        stored = tuple(Stored(checkpoint=c, path=str(c), world_size=self.nodes, nbytes=1) for c in checkpoints)
        return self.say(0, stored=stored)

    def lost(self, index: int) -> Self:
        """The node and its memory; it is replaced by an empty one of the same name, which says nothing yet."""
        self.state = saves.gone(self.state, node_id(index), self.now)
        again = self._report(index)
        self.reports[index] = msgspec.structs.replace(again, incarnation=Incarnation(9, 9, f"new-{index}"))
        return self

    def after(self, seconds: float) -> Self:
        self.now += seconds
        self.state = saves.ticked(self.state, self.now)
        return self


def a_memory(nodes: int = 2, *, store: bool = False, **policy: Any) -> Memory:
    return Memory(nodes, Policy(**policy), store=store)
