"""What control knows of the memory servers of a job, as one frozen value, and questions about it. Pure.

Everything in it can be made anew from the servers' reports; nothing of it is written down. What follows from it is
decided in `control.commits`, `control.tempo` and `control.storing`.
"""

import math
from collections.abc import Mapping

import msgspec

from perdure.control.choice import Choice
from perdure.control.inventory import Copies, Line, Reports, Standing, Worlds, stand
from perdure.policy.cadence import Failures
from perdure.vocab.checkpoint import Cadence, CheckpointId, Shards, Stored
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.vocab.units import Instant, Seconds
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

    checkpoint: CheckpointId
    since: Instant
    nodes: frozenset[NodeId]
    """That had reported when it began: each of them writes a part, if it has one."""
    parts: frozenset[NodeId] = frozenset()
    """Nodes whose parts are there."""
    moved_at: Instant
    """When one more part was there."""


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
    bad: frozenset[CheckpointId] = frozenset()
    """Set aside after they were loaded: never chosen again."""
    seen_at: Mapping[CheckpointId, Instant] = {}
    """When the first part of an uncommitted one was seen."""
    aborts: int = 0
    """For want of time, since the last commit."""
    asked_at: Instant | None = None
    """When the first rank asked what to restore."""
    choice: Choice | None = None
    cadence: Cadence | None = None
    once: int | None = None
    stopping: bool = False
    """The newest committed checkpoint goes to storage now."""
    partners: Mapping[NodeId, tuple[Address, ...]] = {}
    drain: Draining | None = None
    drained_at: Instant | None = None
    """When the last drain was ordered."""
    undrained: frozenset[CheckpointId] = frozenset()
    """Given up on the way."""
    durable: CheckpointId | None = None

    # experience
    costs: Costs = Costs()
    failures: Failures = Failures()
    """Counts, of this life of control."""
    node_went: bool = False
    """A node was lost since the generation began."""

    @property
    def line(self) -> Line:
        return self.attempt, self.generation


def present(state: SavesState) -> dict[NodeId, MemoryReport]:
    """The reports of the generation's members, as far as they have reported it."""
    return {
        node: report
        for node, report in state.reports.items()
        if (report.attempt, report.generation) == state.line
        and state.generation > 0
        and (state.members is None or node in state.members)
    }


def attachments(state: SavesState) -> dict[int, Attachment]:
    """The trainers of the generation, by rank."""
    return {each.rank: each for report in present(state).values() for each in report.attached}


def is_gathered(state: SavesState, now: Instant) -> bool:
    """Whether those who can have something to say have said it, or have had the time."""
    if state.members is not None and state.members <= present(state).keys():
        return True
    if state.world is not None and state.members is None:
        return True
    return now >= max(state.began_at, state.opened_at) + GATHER_PATIENCE


def policy(state: SavesState) -> Policy:
    """What the ranks of the generation ask for; it is the same on all of them (the servers refuse others)."""
    reports = present(state)
    return reports[min(reports)].policy if reports else Policy()


def copies_needed(state: SavesState) -> int:
    """Nodes that must have a slot before it is safe at the policy's level: fewer where there are too few nodes."""
    return 1 + max(0, min(policy(state).replicas, len(present(state)) - 1))


def stored(state: SavesState) -> dict[CheckpointId, Stored]:
    """What is in storage."""
    return {each.checkpoint: each for report in state.reports.values() for each in report.stored}


def standing(state: SavesState, checkpoint: CheckpointId) -> Standing:
    return stand(checkpoint, state.copies.get(checkpoint, {}), stored(state).get(checkpoint), state.worlds)


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
