"""The generation protocol: one table, played in three roles (control, agent, trainer).

A generation is one agreement inside an attempt on who is which rank. Every recovery, spare, shrink or growth makes a
new one. This module knows the order of the phases; it does not know messages or time.

    running → interrupting → gathering → agreed → running → … → ended
"""

from enum import StrEnum

import msgspec

from perdure.errors import IllegalMove
from perdure.vocab.ids import GenerationNumber, NodeId, Rank


class Phase(StrEnum):
    """Where a generation stands."""

    INTERRUPTING = "interrupting"
    """The previous generation's workers are being ended."""
    GATHERING = "gathering"
    """They have ended here; the other nodes and the store are awaited."""
    AGREED = "agreed"
    """All have gathered and the store listens: workers are being started."""
    RUNNING = "running"
    ENDED = "ended"
    """Superseded, finished or given up. Nothing follows."""


class Move(StrEnum):
    """What moves a generation on."""

    CLEARED = "cleared"
    """No worker of an earlier generation is alive."""
    GATHERED = "gathered"
    """Every member has cleared, and the store's address is known."""
    STARTED = "started"
    """Every worker runs."""
    FAULT = "fault"
    """Something ends this generation and begins the next."""
    FINISHED = "finished"
    """All ranks have ended well, or the job stops."""


TABLE: dict[tuple[Phase, Move], Phase] = {
    (Phase.INTERRUPTING, Move.CLEARED): Phase.GATHERING,
    (Phase.INTERRUPTING, Move.FAULT): Phase.ENDED,
    (Phase.INTERRUPTING, Move.FINISHED): Phase.ENDED,
    (Phase.GATHERING, Move.GATHERED): Phase.AGREED,
    (Phase.GATHERING, Move.FAULT): Phase.ENDED,
    (Phase.GATHERING, Move.FINISHED): Phase.ENDED,
    (Phase.AGREED, Move.STARTED): Phase.RUNNING,
    (Phase.AGREED, Move.FAULT): Phase.ENDED,
    (Phase.AGREED, Move.FINISHED): Phase.ENDED,
    (Phase.RUNNING, Move.FAULT): Phase.ENDED,
    (Phase.RUNNING, Move.FINISHED): Phase.ENDED,
}
"""Pairs that are missing are illegal: a message that asks for one is late or false."""


def move(phase: Phase, by: Move) -> Phase:
    """The phase after `by`. Raises IllegalMove, changing nothing, where the table has no entry."""
    try:
        return TABLE[phase, by]
    except KeyError:
        raise IllegalMove(f"a generation that is {phase} cannot move by {by}") from None


class Address(msgspec.Struct, frozen=True):
    """Where a TCP server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a generation: it runs the ranks first … first + count - 1, in local-rank order."""

    node: NodeId
    first_rank: Rank
    count: int

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(self.first_rank + i) for i in range(self.count))


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who is which rank. Members are in rank order; their ranks are contiguous and begin at 0."""

    number: GenerationNumber
    members: tuple[Member, ...]
    store_host: NodeId
    """The member that hosts this generation's store."""

    def __post_init__(self) -> None:
        expected = 0
        for member in self.members:
            if member.first_rank != expected or member.count < 1:
                raise ValueError(f"generation {self.number}: ranks of {member.node} do not follow on {expected - 1}")
            expected += member.count
        if len({m.node for m in self.members}) != len(self.members):
            raise ValueError(f"generation {self.number}: a node appears twice")
        if self.store_host not in {m.node for m in self.members}:
            raise ValueError(f"generation {self.number}: its store's host {self.store_host} is no member")

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(m.node for m in self.members)

    @property
    def world_size(self) -> int:
        return sum(m.count for m in self.members)

    def member(self, node: NodeId) -> Member | None:
        return next((m for m in self.members if m.node == node), None)

    def node_of(self, rank: Rank) -> NodeId | None:
        return next((m.node for m in self.members if m.first_rank <= rank < m.first_rank + m.count), None)
