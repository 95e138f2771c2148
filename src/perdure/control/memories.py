"""What control knows of the memory servers of a job, as one frozen value, and questions about it. Pure.

Everything in it can be made anew from the servers' reports; nothing of it is written down. What follows from it is
decided in `control.commits`, `control.tempo` and `control.storing`.
"""

import math
from collections.abc import Mapping

import msgspec

from perdure.control.choice import Choice
from perdure.control.inventory import Copies, Life, Line, Reports, Standing, Worlds, stand
from perdure.policy.cadence import Failures
from perdure.vocab.checkpoint import Aside, Cadence, CheckpointId, Shards, Stored
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.vocab.units import Bytes, Instant, Seconds
from perdure.wire.memory import Attachment, MemoryReport, Policy, Told

GATHER_PATIENCE: Seconds = 30.0
"""After a generation began: nodes that have not reported by then are done without."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint costs, as far as it was measured (smoothed)."""

    stall: Seconds | None = None
    commit: Seconds | None = None
    """From written to replicated."""
    drain: Seconds | None = None
    """From control's order until it is committed in storage."""


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on its way to storage."""

    number: int
    """`DrainOrder.number`."""
    checkpoint: CheckpointId
    since: Instant
    ranks: tuple[int, ...] = ()
    """Whose slots make up the whole."""
    written: frozenset[int] = frozenset()
    """Ranks whose parts are there."""
    writers: Mapping[NodeId, tuple[int, ...]] = {}
    """Who writes the others."""
    nbytes: Bytes = 0
    """Written by all nodes together, as far as they have told."""
    moved_at: Instant
    """When that was more than before."""


class StoreProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last drain has not reached storage. It is gone with the first one that does."""

    why: str
    lasting: bool
    """The store refuses: trying again soon does not help."""
    since: Instant
    """When the first of the failures in a row was known."""
    failed_at: Instant
    """When the last one was."""
    tries: int
    """Failures in a row."""


class SavesState(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known and decided of one job's checkpoints."""

    version: int = 0
    """Of the orders; one more whenever they mean something else. It begins with the time (`saves.opened`)."""
    opened_at: Instant = 0.0
    """Start of this life of control."""

    # the generation
    attempt: int = 0
    generation: GenerationNumber = GenerationNumber(0)
    members: frozenset[NodeId] | None = None
    """As control has assigned them; None: whoever reports the generation."""
    world_size: int = 0
    began_at: Instant = 0.0
    world: Shards | None = None
    """When all ranks have attached."""

    # the servers
    reports: Reports = {}
    heard: Mapping[NodeId, Instant] = {}
    copies: Mapping[CheckpointId, Copies] = {}
    """The reports' `held`, by checkpoint."""
    worlds: Worlds = {}

    told: Told = Told()
    """What servers were told for this generation, by whomever; they may forget it while we find out the rest."""

    # what is decided
    committed: CheckpointId | None = None
    aborted: frozenset[CheckpointId] = frozenset()
    asides: tuple[Aside, ...] = ()
    """What was found to be bad after it was restored, as far as any node or the storage remembers."""
    closed: frozenset[int] = frozenset()
    """Ranks of the generation that have ended well."""
    finished: bool = False
    """All of them have: the next generation does not go on from here, but for what is stored."""
    bad: frozenset[CheckpointId] = frozenset()
    """Those of all that there are that `asides` covers: never committed, nor chosen unless asked for by step."""
    seen_at: Mapping[CheckpointId, Instant] = {}
    """When the first part of an uncommitted one was seen."""
    aborts: int = 0
    """For want of time, since the last commit."""
    asked_at: Instant | None = None
    """When the first rank asked what to restore; None: no question waits."""
    choice: Choice | None = None
    question: int = 0
    """Number of the question that `choice` answers."""
    turn: int = 0
    """How often the ranks of the generation have gone back (`CheckpointId.turn`)."""
    cadence: Cadence | None = None
    once: int | None = None
    stopping: bool = False
    """The newest committed checkpoint goes to storage now."""
    noticed: bool = False
    """As `stopping`, until the checkpoint that was asked for is there: the job goes on."""
    gathered: bool = False
    """All members of the generation are known (`is_gathered`): groups may be made of them."""
    partners: Mapping[NodeId, tuple[Address, ...]] = {}
    drain: Draining | None = None
    drained_at: Instant | None = None
    """When the last drain was ordered."""
    problem: StoreProblem | None = None
    awaited_since: Instant | None = None
    """Since when some trainer waits for its last checkpoint to reach storage (`Flush`)."""
    unstorable: str = ""
    """Why it need not wait any longer."""
    durable: CheckpointId | None = None

    # experience
    costs: Costs = Costs()
    failures: Failures = Failures()
    """Counts, of this life of control."""
    node_went: bool = False
    """A node was lost since the generation began."""
    went: frozenset[NodeId] = frozenset()
    """Nodes that were lost since the generation began, and have not come back: nobody waits for them."""

    @property
    def life(self) -> Life:
        return self.attempt, self.generation

    @property
    def line(self) -> Line:
        return self.attempt, self.generation, self.turn


def present(state: SavesState) -> dict[NodeId, MemoryReport]:
    """The reports of the generation's members, as far as they have reported it.

    Where the end came before anybody of this generation did, nobody will: then those of the last one that was there.
    """
    found = _of(state, state.life)
    if found or not state.stopping:
        return found
    lives = [(r.attempt, r.generation) for r in state.reports.values() if r.generation > 0]
    return _of(state, max(lives, default=state.life))


def _of(state: SavesState, life: tuple[int, GenerationNumber]) -> dict[NodeId, MemoryReport]:
    return {
        node: report
        for node, report in state.reports.items()
        if (report.attempt, report.generation) == life
        and life[1] > 0
        and (state.members is None or node in state.members)
    }


def attachments(state: SavesState) -> dict[int, Attachment]:
    """The trainers of the generation, by rank."""
    return {each.rank: each for report in present(state).values() for each in report.attached}


def is_gathered(state: SavesState, now: Instant) -> bool:
    """Whether those who can have something to say have said it, or have had the time."""
    if state.members is not None and state.members - state.went <= present(state).keys():
        return True
    if state.world is not None and state.members is None:
        return True
    return now >= max(state.began_at, state.opened_at) + GATHER_PATIENCE


def awaited(state: SavesState) -> frozenset[NodeId]:
    """Nodes that are there, or may still come: each has what it holds of its own ranks, or will say that it has not."""
    return frozenset(present(state)) | ((state.members or frozenset()) - state.went)


def stand_in(state: SavesState) -> NodeId | None:
    """Who looks into the storage and commits there when rank 0's node is gone; None: nobody has to."""
    ranks = {node: min(report.ranks) for node, report in present(state).items() if report.ranks}
    if not state.went or not ranks or 0 in ranks.values():
        return None
    return min(ranks, key=lambda node: (ranks[node], node))


def policy(state: SavesState) -> Policy:
    """What the ranks of the generation ask for; it is the same on all of them (the servers refuse others)."""
    reports = present(state)
    return reports[min(reports)].policy if reports else Policy()


def copies_needed(state: SavesState) -> int:
    """Nodes that must have a slot before it is safe at the policy's level: fewer where there are too few nodes.

    Parity counts as a second copy (`control.parity`).
    """
    asked = policy(state)
    return 1 + max(0, min(1 if asked.xor else asked.replicas, len(present(state)) - 1))


def stored(state: SavesState) -> dict[CheckpointId, Stored]:
    """What is in storage."""
    return {each.checkpoint: each for report in state.reports.values() for each in report.stored}


def standing(state: SavesState, checkpoint: CheckpointId) -> Standing:
    parities = {
        node: parity
        for node, report in state.reports.items()
        for parity in report.parity
        if parity.checkpoint == checkpoint
    }
    return stand(checkpoint, state.copies.get(checkpoint, {}), stored(state).get(checkpoint), state.worlds, parities)


def is_whole(state: SavesState, checkpoint: CheckpointId | None) -> bool:
    """Whether it could be restored now."""
    return checkpoint is not None and standing(state, checkpoint).is_complete


def step_seconds(state: SavesState) -> Seconds | None:
    """The shortest step time that a node measures: the fastest rank is the one that must not be missed."""
    known = [r.step_seconds for r in present(state).values() if r.step_seconds is not None and r.step_seconds > 0]
    return min(known, default=None)


def furthest_step(state: SavesState, now: Instant) -> int:
    """The step that no rank has passed: the furthest one told, and what may have been done since; -1: none."""
    seconds = step_seconds(state)
    steps = [-1]
    for node, report in present(state).items():
        silent = max(0.0, now - state.heard.get(node, now))
        since = math.ceil(silent / seconds) if seconds is not None else 0
        steps += [each.step + since for each in report.attached if each.step >= 0]
    return max(steps)
