"""What must hold of checkpoints at every instant of a simulation. It sees the truth: what each memory has."""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.sim.agenda import START, Agenda
from perdure.sim.memory_server import MemoryServer
from perdure.vocab.checkpoint import CheckpointId, Chosen, Group, Member, Parity, Stored
from perdure.vocab.ids import NodeId

Storage = Mapping[CheckpointId, Stored]


class Guard(msgspec.Struct, frozen=True):
    """What has been promised."""

    checkpoint: CheckpointId
    copies: int
    """Of every rank's slot."""


class Rules:
    """Notes what is promised, and every time that a promise is broken."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self.violations: list[str] = []
        self.guard: Guard | None = None
        """The newest committed one, with as many copies of each rank as lost nodes have left."""
        self.refusals = 0
        self._saved: dict[CheckpointId, int] = {}
        """After which question each was saved: an id that comes twice has two contents."""
        self._lost: dict[CheckpointId, set[tuple[str, int]]] = {}
        """Copies that went with their nodes: control may not have heard of it when it commits."""
        self._lost_parity: dict[CheckpointId, list[tuple[NodeId, Parity]]] = {}
        """The same of parity."""

    def violate(self, rule: str, what: str) -> None:
        self.violations.append(f"at {self._agenda.now - START:.3f} s: {rule}: {what}")

    # --- what happens ------------------------------------------------------------------------------------------------

    def committed(
        self, guard: Guard, chosen: CheckpointId | None, servers: Iterable[MemoryServer], stored: Storage
    ) -> bool:
        """Control has committed it, or gone back to it; whether it is a new one."""
        new, old = guard.checkpoint, self.guard
        if old is not None and new <= old.checkpoint and new != chosen:
            return False  # a control that began anew finds out
        copies = least_copies(new, servers)
        if copies < 1 and new not in stored and new in self._lost:
            return False  # it had been committed, and went with its nodes
        if new == chosen:
            self.guard = Guard(new, min(guard.copies, copies))
            return False
        known = min(self._with_lost(new, servers).values(), default=0)
        if known < guard.copies and new not in stored:
            self.violate("a commit is complete", f"{new} has {known} copies of some rank, not {guard.copies}")
        self.guard = Guard(new, min(guard.copies, copies))
        return True

    def lost(self, node: MemoryServer, servers: Iterable[MemoryServer], stored: Storage) -> None:
        """A node is gone with its memory. What the promise did not cover is forgiven."""
        every = {c for _, slot in node.ring.slots.items() if (c := slot.checkpoint) is not None}
        every |= {c for kept in node.replicas.values() for c in kept}
        for checkpoint in every:
            self._lost.setdefault(checkpoint, set()).update((node.boot, rank) for rank in node.has(checkpoint))
            if checkpoint in node.parity:
                self._lost_parity.setdefault(checkpoint, []).append((node.node, node.parity[checkpoint]))
        if self.guard is None:
            return
        left = self.guard.copies - 1
        if left < 1 and self.guard.checkpoint not in stored:
            self.guard = None
        else:
            self.guard = Guard(self.guard.checkpoint, max(left, 0))
        self.look(servers, stored)

    def look(self, servers: Iterable[MemoryServer], stored: Storage) -> None:
        """The gate: what was promised is there."""
        if self.guard is None or self.guard.checkpoint in stored:
            return
        copies = least_copies(self.guard.checkpoint, servers)
        if copies < self.guard.copies:
            what = f"{self.guard.checkpoint} is committed and has {copies} copies of some rank"
            self.violate("what is committed stays whole", f"{what}, not {self.guard.copies}")
            self.guard = None

    def answered(
        self,
        chosen: Chosen,
        answers: set[CheckpointId | None],
        servers: Iterable[MemoryServer],
        stored: Storage,
        *,
        is_wished: bool = False,
    ) -> None:
        """Some rank was told what to restore; `is_wished`: exactly the step that the script wanted."""
        if len(answers) > 1:
            self.violate("all ranks get one answer", f"they got {sorted(map(str, answers))}")
        checkpoint = chosen.checkpoint
        lost = self.guard is not None and (checkpoint is None or checkpoint < self.guard.checkpoint)
        if self.guard is not None and lost and not is_wished:
            self.violate("no committed step is lost", f"{checkpoint} was chosen after {self.guard.checkpoint}")
        if checkpoint is None or checkpoint in stored:
            return
        # A node may have gone since: then the generation ends with it.
        known = (least_copies(checkpoint, servers), min(self._with_lost(checkpoint, servers).values(), default=0))
        if max(known) < 1:
            self.violate("what is chosen can be read", f"{checkpoint} is not complete")

    def saves(self, checkpoint: CheckpointId, question: int) -> None:
        """A rank copies; `question`: the last one that it has asked."""
        if self._saved.setdefault(checkpoint, question) != question:
            self.violate("an id has one content", f"{checkpoint} is saved again after the ranks have gone back")

    def _with_lost(self, checkpoint: CheckpointId, servers: Iterable[MemoryServer]) -> dict[int, int]:
        return copies_with(
            checkpoint, servers, self._lost.get(checkpoint, set()), self._lost_parity.get(checkpoint, [])
        )

    def refused(self, why: str, *, is_wished: bool = False) -> None:
        """There is no answer: right only where nothing that was promised is there, or not the one that is wished."""
        if self.guard is not None and not is_wished:
            self.violate("what is committed can be restored", f"{self.guard.checkpoint}, but: {why}")
        self.refusals += 1


def copies_with(
    checkpoint: CheckpointId,
    servers: Iterable[MemoryServer],
    more: Iterable[tuple[str, int]] = (),
    more_parity: Iterable[tuple[NodeId, Parity]] = (),
) -> dict[int, int]:
    """Memories that have each rank's slot, with `more` that had it; parity that can make it again is one, too."""
    size = 0
    places: set[tuple[str, int]] = set(more)
    for server in servers:
        size = max(size, server.sizes.get(checkpoint, 0))
        places |= {(server.boot, rank) for rank in server.has(checkpoint)}
    size = max(size, 1 + max((rank for _, rank in places), default=-1))
    direct = {rank: sum(other == rank for _, other in places) for rank in range(size)}
    parities = [(server.node, server.parity[checkpoint]) for server in servers if checkpoint in server.parity]
    again = _rebuildable([*parities, *more_parity], {rank for rank, count in direct.items() if count})
    return {rank: count + (rank in again) for rank, count in direct.items()}


def _rebuildable(parities: Iterable[tuple[NodeId, Parity]], held: set[int]) -> set[int]:
    holders: dict[tuple[Member, ...], list[NodeId]] = {}
    for node, parity in parities:
        holders.setdefault(parity.members, []).append(node)
    groups = (Group(members=members, holders=tuple(nodes)) for members, nodes in holders.items())
    return {rank for group in groups for rank in group.rebuildable(held)}


def least_copies(checkpoint: CheckpointId, servers: Iterable[MemoryServer]) -> int:
    return min(copies_with(checkpoint, servers).values(), default=0)
