"""`Action`: an imperative to a port. `Decision`: actions, with the reason and with what they answer."""

import msgspec

from perdure.vocab.fault import Diagnosis
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import ActionId, EventId, GenerationNumber, NodeId, Rank
from perdure.vocab.units import Instant


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action"):
    """Doing it twice is harmless: `id` is attempt + generation + the event that it answers."""

    id: ActionId


class RetryStep(Action, frozen=True, kw_only=True, tag="retry_step"):
    """Rung 1."""


class RestartInProcess(Action, frozen=True, kw_only=True, tag="restart_in_process"):
    """Rung 2."""

    assignment: Assignment


class RestartWorkers(Action, frozen=True, kw_only=True, tag="restart_workers"):
    """Rung 3: the same nodes, all workers anew."""

    assignment: Assignment


class ReplaceNode(Action, frozen=True, kw_only=True, tag="replace_node"):
    """Rung 4: spares take the ranks of lost or unfit nodes."""

    assignment: Assignment
    lost: tuple[NodeId, ...]
    spares: tuple[NodeId, ...]


class Shrink(Action, frozen=True, kw_only=True, tag="shrink"):
    """Between 4 and 5: go on with fewer nodes."""

    assignment: Assignment
    lost: tuple[NodeId, ...]


class Grow(Action, frozen=True, kw_only=True, tag="grow"):
    """Take nodes in that have come (back)."""

    assignment: Assignment
    joined: tuple[NodeId, ...]


class Begin(Action, frozen=True, kw_only=True, tag="begin"):
    """The first generation, or the first after a hold."""

    assignment: Assignment


class Hold(Action, frozen=True, kw_only=True, tag="hold"):
    """Rung 5: end the workers that cannot go on, keep the rest, wait for a node."""

    until: Instant
    lacking: int
    """Nodes that are missing."""


class Requeue(Action, frozen=True, kw_only=True, tag="requeue"):
    """Rung 6: a new attempt without these nodes."""

    exclude: tuple[NodeId, ...]


class Drain(Action, frozen=True, kw_only=True, tag="drain"):
    """Save and end: the workers are told, and at `until` ended."""

    until: Instant
    signal: int
    stop_after: int | None = None
    """Step after which scripts that tell their steps end; None with forward False: the nodes are asked for theirs."""
    forward: bool = False
    """The signal goes to the workers themselves, because some do not tell their steps."""


class GiveUp(Action, frozen=True, kw_only=True, tag="give_up"):
    """Rung 7: stop, and keep the evidence."""

    exit_code: int
    reason: str


class Finish(Action, frozen=True, kw_only=True, tag="finish"):
    """Everything is done."""


class Quarantine(Action, frozen=True, kw_only=True, tag="quarantine"):
    """No work on this node until someone has looked at it."""

    node: NodeId
    reason: str


class LetFinish(Action, frozen=True, kw_only=True, tag="let_finish"):
    """Nothing to do: these ranks have ended well."""

    ranks: tuple[Rank, ...]


class Escalate(Action, frozen=True, kw_only=True, tag="escalate"):
    """This scope cannot do what the ladder asks; the next one must."""

    generation: GenerationNumber


AnyAction = (
    RetryStep
    | RestartInProcess
    | RestartWorkers
    | ReplaceNode
    | Shrink
    | Grow
    | Begin
    | Hold
    | Requeue
    | Drain
    | GiveUp
    | Finish
    | Quarantine
    | LetFinish
    | Escalate
)


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="decision"):
    """What is done, why, and which event it answers. The decision is the log."""

    at: Instant
    answers: EventId
    because: str
    """One sentence."""
    actions: tuple[AnyAction, ...]
    diagnosis: Diagnosis | None = None
    """None where a user or the plain course of things (all nodes are there) is answered."""
