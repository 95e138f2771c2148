"""Checkpoints as values: which one, of whom, what is in it, where copies are, and how safe it is.

A checkpoint is made of one slot per rank. What is in a slot is known by its layout, so that any later world can read
it: a tensor is found by its name and its place in the whole, never by the rank that happened to hold it.
"""

from collections.abc import Container, Iterable, Mapping
from enum import IntEnum, StrEnum

import msgspec

from perdure.vocab.ids import GenerationNumber, NodeId, Rank
from perdure.vocab.units import Bytes


class CheckpointId(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """One checkpoint of the whole job. The greater one is the later one.

    The line (attempt, generation, turn) counts before the step: a run that has gone back to an earlier step, on purpose
    or because nothing newer could be read, must not jump ahead into the line that it left (decisions 0011 and 0013).
    """

    attempt: int
    """Start of the job's control, in whole seconds since the epoch: a job begun anew counts generations anew."""
    generation: GenerationNumber
    turn: int = 0
    """How often the processes of this generation had gone back to a checkpoint when they had saved already."""
    step: int
    """Last finished step; the next one to do is `step` + 1."""

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}{f', turn {self.turn}' if self.turn else ''}"

    @property
    def life(self) -> tuple[int, GenerationNumber]:
        """(attempt, generation): whose processes wrote it."""
        return self.attempt, self.generation

    @property
    def line(self) -> tuple[int, GenerationNumber, int]:
        """(attempt, generation, turn): steps of one line follow each other, and no step is in it twice."""
        return self.attempt, self.generation, self.turn


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was restored and found to be bad. What was saved after it, in `line`, is no better."""

    checkpoint: CheckpointId
    line: tuple[int, int, int]
    """`CheckpointId.line` of the ranks that had restored it."""
    reason: str
    """The script's own words."""

    @property
    def act(self) -> tuple[CheckpointId, tuple[int, int, int]]:
        """All ranks that set it aside at once do the same thing, whatever their words are."""
        return self.checkpoint, self.line

    def covers(self, checkpoint: CheckpointId) -> bool:
        return checkpoint == self.checkpoint or checkpoint.line == self.line


class Level(IntEnum):
    """What a copy of a rank's slot survives. Each level includes the ones before."""

    SEALED = 1
    """A process: hashed, in this node's memory."""
    REPLICATED = 2
    """A failure domain: verified in another node's memory too."""
    DURABLE = 3
    """Everything: in storage."""


class SlotState(StrEnum):
    """Where a slot stands. WRITING is stored before the first byte of a copy, WRITTEN after the last."""

    FREE = "free"
    WRITING = "writing"
    WRITTEN = "written"
    SEALED = "sealed"


# --- what is in a slot -----------------------------------------------------------------------------------------------


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous, row-major piece of one tensor in a slot."""

    name: str
    """Fully qualified, as torch.distributed.checkpoint names it, as in `model.layers.0.weight`."""
    dtype: str
    """torch's name of it, as in `bfloat16`."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of its first element in the whole."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    start: Bytes
    """Of its first byte in the slot's data; a multiple of 64."""
    nbytes: Bytes

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Which logical shard this is, whoever holds it."""
        return self.name, self.offsets


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in one rank's slot but its bytes. Made anew only when a name, a shape or a dtype changes."""

    rank: Rank
    world_size: int
    parts: tuple[TensorPart, ...]
    data_bytes: Bytes
    """Of all parts, with the gaps between them."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed copy of one rank's slot that a node can give out."""

    checkpoint: CheckpointId
    rank: Rank
    world_size: int
    level: Level
    layout: str
    """Hash of the `Layout`, hexadecimal."""
    shards: str
    """Hash of the logical shards in it, whoever's they are: replicas of one another have the same."""
    root: str
    """Hash over the hashes of all its chunks, and over the layout and the id."""
    nbytes: Bytes


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a parity group, with the ranks whose slots it has."""

    node: NodeId
    ranks: tuple[int, ...]
    """Ascending."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """What one node of a parity group keeps of the slots of the others: with it a lost one can be made again."""

    checkpoint: CheckpointId
    members: tuple[Member, ...]
    """In the order of their places."""
    roots: Mapping[int, str]
    """`Held.root` of every slot of the group, by rank."""
    nbytes: Bytes


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A parity group of one checkpoint, and who of it has its parity."""

    members: tuple[Member, ...]
    holders: tuple[NodeId, ...]

    @property
    def is_whole(self) -> bool:
        return {member.node for member in self.members} <= set(self.holders)

    def rebuildable(self, ranks: Container[int]) -> frozenset[int]:
        """Ranks whose slots can be made again where the slots of `ranks` are there: of one node, not of two."""
        found: set[int] = set()
        for lost in self.members:
            rest = [member for member in self.members if member is not lost]
            if all(each.node in self.holders and all(rank in ranks for rank in each.ranks) for each in rest):
                found.update(lost.ranks)
        return frozenset(found)


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """Which logical shards the ranks of one generation hold: `by_rank[r]` is `Held.shards` of rank r.

    With it a checkpoint is known to be complete although a rank's own copy is lost: a replica has the same shards.
    """

    attempt: int
    generation: GenerationNumber
    by_rank: tuple[str, ...]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint in storage."""

    checkpoint: CheckpointId
    path: str
    """Folder or prefix, below the store's address."""
    world_size: int
    nbytes: Bytes
    aside: Aside | None = None
    """Somebody has marked it as bad."""


# --- what is decided of it -------------------------------------------------------------------------------------------


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """After which steps all ranks save: `first`, and every `every`-th one from there on. Announced ahead."""

    first: int
    every: int

    def is_due(self, step: int) -> bool:
        return step >= self.first and (step - self.first) % self.every == 0


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that all ranks restore, and where each rank's slot of it can be read."""

    checkpoint: CheckpointId | None
    """None: there has never been one; the run begins at step 0."""
    world_size: int = 0
    holders: Mapping[int, tuple[NodeId, ...]] = {}
    """By the rank that wrote it: the nodes whose memory has it, the best first. Empty where it is read from storage."""
    stored: Stored | None = None
    """The same checkpoint in storage: for what no memory has, and for chunks that turn out to be bad."""
    groups: tuple[Group, ...] = ()
    """Parity groups, by which slots can be made again that nobody has, or of which every copy is bad."""
    missing: tuple[int, ...] = ()
    """Ranks whose own state (random numbers, data position) is lost, though replicas have all that they shared."""

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ranks whose slots no memory has, and which their groups make again."""
        again = {rank for group in self.groups for rank in group.rebuildable(self.holders)}
        return tuple(sorted(again - self.holders.keys()))


ASIDES_KEPT = 64


def put_together(asides: Iterable[Aside]) -> tuple[Aside, ...]:
    """The newest ones, each act once: the same on every node, in whatever order it has heard of them."""
    by_act: dict[tuple[CheckpointId, tuple[int, int, int]], Aside] = {}
    for each in asides:
        known = by_act.get(each.act)
        if known is None or each.reason < known.reason:
            by_act[each.act] = each
    return tuple(sorted(by_act.values(), key=lambda each: each.act)[-ASIDES_KEPT:])


def covers(shards: Shards, ranks: Iterable[int]) -> bool:
    """Whether the slots of `ranks` hold every logical shard of that generation."""
    return set(shards.by_rank) <= {shards.by_rank[rank] for rank in ranks if 0 <= rank < len(shards.by_rank)}
