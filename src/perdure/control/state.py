"""What control knows, as frozen values. `control.fold` makes it from the event log, and nothing else does.

It knows no leases (`control.leases`: silence is not an event until somebody calls it one) and makes no decisions
(`control.brain`).
"""

from collections.abc import Mapping

import msgspec

from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.decision import (
    Drain,
    Hold,
)
from perdure.vocab.event import (
    DrainAcked,
    EndDecided,
    JobEnded,
    NodeLeft,
    NodeLost,
    StartFailed,
    StopRequested,
    StoreLost,
    WorkerExited,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from perdure.vocab.generation import Address, Assignment, Phase
from perdure.vocab.ids import EventId, GenerationNumber, NodeId, Rank
from perdure.vocab.job import JobSpec
from perdure.vocab.node import Node, NodeCondition
from perdure.vocab.units import Instant
from perdure.vocab.view import JobView, PastFault

FaultEvent = (
    WorkerExited | WorkerStopped | WorkerStalled | WorkerUnkillable | StoreLost | StartFailed | NodeLost | NodeLeft
)
"""Events that somebody has to answer."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node as control knows it."""

    node: Node
    present: bool
    """Joined, and neither lost nor gone."""
    condition: NodeCondition = NodeCondition.HEALTHY
    ready: bool = False
    """Has said NodeReady in this incarnation."""
    joined_at: Instant
    disconnected_at: Instant | None = None
    ready_at: Instant = 0.0
    """When it said so last."""
    acked: int = 0
    """Number of the newest event of this incarnation that is in the log."""
    came: EventId = EventId("")
    """The event by which it last became usable: it joined, came back, or got warm."""
    came_version: int = 0
    """Number of that record, to order such events."""

    @property
    def is_fit(self) -> bool:
        return self.present and self.condition is not NodeCondition.QUARANTINED

    @property
    def is_suspect(self) -> bool:
        return self.condition is NodeCondition.SUSPECT


class GenerationState(msgspec.Struct, frozen=True, kw_only=True):
    """The current generation."""

    assignment: Assignment
    phase: Phase
    began_at: Instant
    answers: EventId
    store: Address | None = None
    gathered: frozenset[NodeId] = frozenset()
    started: frozenset[NodeId] = frozenset()
    begun: frozenset[NodeId] = frozenset()
    """Members all of whose ranks have finished a step."""
    begun_by: EventId = EventId("")
    begun_version: int = 0
    """The newest event of `begun`, and its number."""
    saved_at: Instant | None = None
    """When the first member ended the last checkpoint phase."""
    saved_by: EventId = EventId("")
    finished: frozenset[Rank] = frozenset()
    finished_by: EventId = EventId("")
    """The event that added the newest of `finished`."""
    gone: frozenset[NodeId] = frozenset()
    """Members that went away: their next life does not run their ranks again in this generation."""
    acks: tuple[DrainAcked, ...] = ()
    redo_until: int | None = None
    """Highest step that the generations before had finished, as far as told."""

    @property
    def number(self) -> GenerationNumber:
        return self.assignment.number


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """A user or a scheduler has asked the job to end."""

    request: StopRequested
    order: Drain | None = None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Where the job's checkpoints are, as far as its end depends on it."""

    newest: CheckpointId | None = None
    """What a restart would take: the last one committed, or chosen since."""
    durable: CheckpointId | None = None
    """Newest one in storage."""
    store: str = ""
    """Address of the storage; empty: there is none."""
    asides: frozenset[EventId] = frozenset()
    """What is in the log of checkpoints that were set aside: a control that begins anew finds it out again."""

    @property
    def is_owed(self) -> bool:
        """Whether the end of the job would lose the newest one, although there is a storage for it."""
        return self.newest is not None and bool(self.store) and (self.durable is None or self.durable < self.newest)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that control's decisions may rest on."""

    version: int = 0
    """Records folded; orders made from this state carry it."""
    spec: JobSpec | None = None
    began_at: Instant = 0.0
    nodes: Mapping[NodeId, NodeState] = {}
    generation: GenerationState | None = None
    number: GenerationNumber = GenerationNumber(0)
    previous: Assignment | None = None
    """Of the newest generation, also while none runs (a hold)."""
    uncleared: frozenset[NodeId] = frozenset()
    """Nodes left out although they are there: no generation is agreed before they have ended their workers."""
    restarts: tuple[Instant, ...] = ()
    past: tuple[PastFault, ...] = ()
    hold: Hold | None = None
    unanswered: tuple[FaultEvent, ...] = ()
    """Faults of the current generation that no decision has answered yet: a control that starts again answers them."""
    draining: Draining | None = None
    ending: EndDecided | None = None
    """No worker is to run any more; the memory servers still bring the newest checkpoint to storage."""
    kept: Kept = Kept()
    high_step: int | None = None
    """Highest step that any generation has finished, as far as told."""
    tells_saves: bool = False
    """Some generation has told of a checkpoint: growth waits for the next."""
    ended: JobEnded | None = None

    @property
    def fit(self) -> frozenset[NodeId]:
        return frozenset(node for node, known in self.nodes.items() if known.is_fit)

    def spares(self) -> tuple[NodeId, ...]:
        """Fit nodes outside the current world, the best first: warm ones, and members-to-be before standbys.

        A suspect node comes last, however warm: a job must not be restarted into the node that it was taken from.
        """
        members = set(self.previous.nodes) if self.previous is not None else set()
        free = [k for n, k in self.nodes.items() if k.is_fit and k.disconnected_at is None and n not in members]
        free.sort(key=lambda k: (k.is_suspect, not k.ready, k.node.standby, k.node.order, k.node.id))
        return tuple(k.node.id for k in free)

    def _cold(self) -> frozenset[NodeId]:
        """Members in a new life that import still, while a warm spare waits: they are no help now.

        Only those that the current generation has lost: their new life has no part in it, so it starts no worker of it.
        """
        if self.generation is None or not any(self.nodes[spare].ready for spare in self.spares()):
            return frozenset()
        return frozenset(node for node in self.generation.gone if not self.nodes[node].ready)

    def view(self) -> JobView:
        """The snapshot for policy. Only after JobSubmitted."""
        assert self.spec is not None
        return JobView(
            spec=self.spec,
            assignment=self.previous,
            next_number=GenerationNumber(self.number + 1),
            present=self.fit - self._cold(),
            spares=self.spares(),
            restarts=self.restarts,
            past=self.past,
            finished=self.generation.finished if self.generation is not None else frozenset(),
        )
