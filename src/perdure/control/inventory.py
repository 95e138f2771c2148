"""What all memory servers and the storage hold of each checkpoint, and whether that is all of it. Pure.

It knows copies and who has them; it does not know which checkpoint is wanted (`control.choice`, `control.commits`).
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.vocab.checkpoint import Aside, CheckpointId, Group, Held, Level, Member, Parity, Shards, Stored, covers
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.wire.memory import MemoryReport

Reports = Mapping[NodeId, MemoryReport]
Life = tuple[int, GenerationNumber]
"""(attempt, generation): one set of processes."""
Line = tuple[int, GenerationNumber, int]
"""(attempt, generation, turn)."""
Copies = Mapping[NodeId, tuple[Held, ...]]
"""Of one checkpoint, by node."""
Worlds = Mapping[Life, Shards]
_NONE: Mapping[NodeId, Parity] = {}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as far as it has been found."""

    checkpoint: CheckpointId
    world_size: int
    """Of the world that wrote it; 0: nobody who has a part of it says so."""
    holders: Mapping[int, tuple[NodeId, ...]]
    """In memory, by rank, the best first. Ranks without a copy are not in it."""
    stored: Stored | None
    lost: tuple[int, ...]
    """Ranks whose slot no memory has, nor can make again."""
    rebuilt: tuple[int, ...] = ()
    """Ranks whose slot no memory has, and which parity can make again."""
    groups: tuple[Group, ...] = ()
    """Its parity groups, as far as there is parity that fits the slots."""
    in_memory: bool
    """Memory has all of it, or all of it but what was some rank's own."""
    flaws: tuple[str, ...] = ()
    """Copies that cannot be used, in words."""

    @property
    def is_complete(self) -> bool:
        return self.in_memory or self.stored is not None

    def is_held(self, copies: int) -> bool:
        """Whether every rank's own slot is in the memory of as many nodes."""
        whole = self.world_size > 0 and not self.lost and not self.rebuilt
        return whole and all(len(h) >= copies for h in self.holders.values())

    @property
    def protected(self) -> frozenset[int]:
        """Ranks whose slots can be made again if their node is lost, whichever of its group that is."""
        return frozenset(
            rank for group in self.groups if group.is_whole for member in group.members for rank in member.ranks
        )


def line_of(checkpoint: CheckpointId) -> Line:
    return checkpoint.line


def copies_of(report: MemoryReport) -> dict[CheckpointId, tuple[Held, ...]]:
    """What one node holds, by checkpoint. A copy without a hash over it is unverified: it does not count."""
    found: dict[CheckpointId, list[Held]] = {}
    for held in report.held:
        if held.root and held.level >= Level.SEALED and 0 <= held.rank < held.world_size:
            found.setdefault(held.checkpoint, []).append(held)
    return {checkpoint: tuple(parts) for checkpoint, parts in found.items()}


def stored_of(reports: Reports) -> dict[CheckpointId, Stored]:
    """Everything in storage that any node has seen there."""
    return {stored.checkpoint: stored for report in reports.values() for stored in report.stored}


def marked_in(report: MemoryReport) -> tuple[Aside, ...]:
    """What a node has seen marked as bad in storage."""
    return tuple(stored.aside for stored in report.stored if stored.aside is not None)


def stand(
    checkpoint: CheckpointId,
    copies: Copies,
    stored: Stored | None,
    worlds: Worlds,
    parities: Mapping[NodeId, Parity] = _NONE,
) -> Standing:
    """How `checkpoint` stands. Copies that contradict each other are not used: never a mix of two histories."""
    parts = [(node, held) for node, several in copies.items() for held in several]
    sizes = {held.world_size for _, held in parts} | ({stored.world_size} if stored is not None else set())
    if len(sizes) > 1:
        flaw = f"parts of it say that {' and '.join(str(size) for size in sorted(sizes))} ranks wrote it"
        size = stored.world_size if stored is not None else 0
        return _standing(checkpoint, size, {}, stored, None, (), flaws=(flaw,))
    size = next(iter(sizes), 0)
    holders, flaws = _holders(parts)
    world = worlds.get(checkpoint.life)
    if world is not None and not _fits(world, size, parts):
        world = None
    roots = {int(held.rank): held.root for _, held in parts if held.rank in holders}
    return _standing(checkpoint, size, holders, stored, world, _groups(parities, roots), flaws=flaws)


def _standing(
    checkpoint: CheckpointId,
    size: int,
    holders: Mapping[int, tuple[NodeId, ...]],
    stored: Stored | None,
    world: Shards | None,
    groups: tuple[Group, ...],
    *,
    flaws: tuple[str, ...],
) -> Standing:
    again = {rank for group in groups for rank in group.rebuildable(holders)}
    absent = [rank for rank in range(size) if rank not in holders]
    lost = tuple(rank for rank in absent if rank not in again)
    in_memory = size > 0 and (not lost or (world is not None and covers(world, {*holders, *again})))
    return Standing(
        checkpoint=checkpoint,
        world_size=size,
        holders=holders,
        stored=stored,
        lost=lost,
        rebuilt=tuple(rank for rank in absent if rank in again),
        groups=groups,
        in_memory=in_memory,
        flaws=flaws,
    )


def _holders(parts: Iterable[tuple[NodeId, Held]]) -> tuple[dict[int, tuple[NodeId, ...]], tuple[str, ...]]:
    """Who has each rank's slot, the safest copy first; and the ranks of which there are two different ones."""
    by_rank: dict[int, list[tuple[NodeId, Held]]] = {}
    for node, held in parts:
        by_rank.setdefault(held.rank, []).append((node, held))
    flaws = []
    holders: dict[int, tuple[NodeId, ...]] = {}
    for rank, several in sorted(by_rank.items()):
        if len({held.root for _, held in several}) > 1:
            nodes = ", ".join(sorted({node for node, _ in several}))
            flaws.append(f"the copies of rank {rank} differ (on {nodes})")
            continue
        best = {node: -held.level for node, held in sorted(several, key=lambda each: each[1].level)}
        holders[rank] = tuple(sorted(best, key=lambda node: (best[node], node)))
    return holders, tuple(flaws)


def _groups(parities: Mapping[NodeId, Parity], roots: Mapping[int, str]) -> tuple[Group, ...]:
    """The groups that there is parity of. What was made of other slots than those that are there does not count."""
    holders: dict[tuple[tuple[Member, ...], tuple[tuple[int, str], ...]], list[NodeId]] = {}
    for node, parity in sorted(parities.items()):
        if all(roots.get(rank, root) == root for rank, root in parity.roots.items()):
            key = (parity.members, tuple(sorted(parity.roots.items())))
            holders.setdefault(key, []).append(node)
    return tuple(Group(members=members, holders=tuple(nodes)) for (members, _), nodes in holders.items())


def _fits(world: Shards, size: int, parts: Iterable[tuple[NodeId, Held]]) -> bool:
    """Whether `world` tells what was in these slots: a layout may have changed after the ranks had attached."""
    return len(world.by_rank) == size and all(held.shards == world.by_rank[held.rank] for _, held in parts)
