"""The slots of a node's ranks and the gate: which one may be written next. Pure.

Facts come in as functions that give the next `Ring`; `grant` answers the question. It knows neither files nor
trainers' processes, and not how control finds out that a checkpoint is complete everywhere.

    free ─given─► (free, given) ─written─► written ─sealed─► sealed ─given─► …

A slot that is given is lost: the trainer may write into it at any time. So it is given only where the gate allows it.
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.vocab.checkpoint import CheckpointId, Level, SlotState
from perdure.vocab.ids import Rank

Key = tuple[Rank, int]
"""(rank, number) of a slot: what its file is called after."""
Line = tuple[int, int]
"""(attempt, generation)."""
Branch = tuple[int, int, int]
"""(attempt, generation, turn): `CheckpointId.line`."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One slot, as far as the gate is concerned."""

    state: SlotState = SlotState.FREE
    checkpoint: CheckpointId | None = None
    """What is in it: with WRITTEN and SEALED only."""
    given: bool = False
    """The trainer may write into it."""
    pinned: bool = False
    """It is being drained."""
    level: Level | None = None
    """With SEALED only."""
    obsolete: bool = False
    """Its file does not fit the present layout: kept while it is needed, then removed; never given."""


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the gate knows."""

    slots: Mapping[Key, Slot] = {}
    line: Line = (0, 0)
    """Newest one that a trainer here belongs to."""
    turn: int = 0
    """How often the ranks of this generation have gone back, as `CheckpointId.turn` counts it."""
    members: frozenset[Rank] = frozenset()
    """Ranks that have attached in that line, also when they have gone since."""
    committed: CheckpointId | None = None
    aborted: frozenset[CheckpointId] = frozenset()
    chosen: CheckpointId | None = None
    """What the ranks of the present line restore."""
    draining: CheckpointId | None = None
    """What this node has to write to storage next: from the order on, not only when its writing begins."""

    @property
    def branch(self) -> Branch:
        """The line that checkpoints are saved in now."""
        return *self.line, self.turn

    def of(self, rank: Rank) -> dict[int, Slot]:
        """The slots of one rank, by number."""
        return {number: slot for (owner, number), slot in sorted(self.slots.items()) if owner == rank}

    def holding(self, checkpoint: CheckpointId) -> dict[Key, Slot]:
        """Sealed slots of one checkpoint."""
        return {
            key: slot
            for key, slot in self.slots.items()
            if slot.checkpoint == checkpoint and slot.state is SlotState.SEALED
        }


# --- facts -----------------------------------------------------------------------------------------------------------


def adopted(ring: Ring, found: Mapping[Key, Slot]) -> Ring:
    """Slots that an earlier server has left."""
    return msgspec.structs.replace(ring, slots={**ring.slots, **found})


def attached(
    ring: Ring, rank: Rank, line: Line, new: Iterable[int] = (), obsolete: Iterable[int] = (), turn: int = 0
) -> Ring:
    """A trainer of `line` is here; slots `new` were made for it, and `obsolete` do not fit it."""
    slots = dict(ring.slots)
    slots.update({(rank, number): Slot() for number in new})
    for number in obsolete:
        slots[rank, number] = msgspec.structs.replace(slots[rank, number], obsolete=True, given=False)
    if line > ring.line:
        ring = msgspec.structs.replace(ring, line=line, turn=0, members=frozenset(), chosen=None)
    return _turned(msgspec.structs.replace(ring, slots=slots, members=ring.members | {rank}), turn)


def given(ring: Ring, key: Key) -> Ring:
    """The trainer has been told that it may write into this slot. What was in it counts as gone."""
    return _with(ring, key, Slot(given=True))


def written(ring: Ring, key: Key, checkpoint: CheckpointId) -> Ring:
    """The copy is whole, and is hashed next."""
    return _with(ring, key, Slot(state=SlotState.WRITTEN, checkpoint=checkpoint))


def sealed(ring: Ring, key: Key) -> Ring:
    return _change(ring, key, state=SlotState.SEALED, level=Level.SEALED)


def replicated(ring: Ring, key: Key, checkpoint: CheckpointId, *, is_so: bool = True) -> Ring:
    """Another node has a verified copy (or has it no longer). Late news of what the slot had before is dropped."""
    slot = ring.slots.get(key)
    if slot is None or slot.state is not SlotState.SEALED or slot.checkpoint != checkpoint:
        return ring
    return _change(ring, key, level=Level.REPLICATED if is_so else Level.SEALED)


def torn(ring: Ring, key: Key) -> Ring:
    """What is in it is nobody's checkpoint."""
    slot = ring.slots[key]
    return _with(ring, key, Slot(obsolete=slot.obsolete))


def committed(ring: Ring, checkpoint: CheckpointId | None) -> Ring:
    """Control's word, also when it is an older one than before: that copies were lost elsewhere only control sees."""
    return msgspec.structs.replace(ring, committed=checkpoint)


def aborted(ring: Ring, checkpoints: Iterable[CheckpointId]) -> Ring:
    """These will never be complete: the whole list, as control has it now."""
    return msgspec.structs.replace(ring, aborted=frozenset(checkpoints))


def chosen(ring: Ring, line: Line, checkpoint: CheckpointId | None, turn: int = 0) -> Ring:
    """All ranks of `line` restore this one, and save in `turn` from then on. An earlier turn does not come back."""
    if line != ring.line or turn < ring.turn:
        return ring
    return msgspec.structs.replace(ring, chosen=checkpoint, turn=turn)


def _turned(ring: Ring, turn: int) -> Ring:
    """A trainer that attaches again says that it has gone back meanwhile: to what, control says."""
    return ring if turn <= ring.turn else msgspec.structs.replace(ring, turn=turn, chosen=None)


def draining(ring: Ring, checkpoint: CheckpointId | None) -> Ring:
    """This one is to go to storage, and waits for its turn; None: none, or it is there."""
    return ring if checkpoint == ring.draining else msgspec.structs.replace(ring, draining=checkpoint)


def pinned(ring: Ring, key: Key) -> Ring:
    return _change(ring, key, pinned=True)


def unpinned(ring: Ring, key: Key) -> Ring:
    return ring if key not in ring.slots else _change(ring, key, pinned=False)


def trainer_gone(ring: Ring, rank: Rank) -> Ring:
    """What was given to it is nobody's now. The caller looks into the file, where a whole copy may be after all."""
    slots = {
        key: msgspec.structs.replace(slot, given=False) if key[0] == rank else slot for key, slot in ring.slots.items()
    }
    return msgspec.structs.replace(ring, slots=slots)


def removed(ring: Ring, key: Key) -> Ring:
    """Its file is gone."""
    return msgspec.structs.replace(ring, slots={other: slot for other, slot in ring.slots.items() if other != key})


# --- questions -------------------------------------------------------------------------------------------------------


def grant(ring: Ring, rank: Rank) -> int | None:
    """Number of the slot that `rank` writes next: the one that it was given, else the one that is missed least."""
    slots = {number: slot for number, slot in ring.of(rank).items() if not slot.obsolete}
    held = [number for number, slot in slots.items() if slot.given]
    if held:
        return held[0]
    open_ones = [number for number, slot in slots.items() if may_be_lost(ring, slot)]
    return min(open_ones, key=lambda number: _worth(ring, slots[number]), default=None)


def may_be_lost(ring: Ring, slot: Slot) -> bool:
    """THE GATE. A free slot; one whose checkpoint is older than the newest committed one, or will never be complete.

    Never what is being drained, never what is not hashed yet, and never what the whole job would go back to.
    """
    if slot.pinned or slot.given or slot.state in (SlotState.WRITTEN, SlotState.WRITING):
        return False
    if slot.checkpoint is not None and slot.checkpoint == ring.draining:
        return False
    return slot.checkpoint is None or is_spent(ring, slot.checkpoint)


def is_spent(ring: Ring, checkpoint: CheckpointId) -> bool:
    """Whether the job will never go back to it, as far as control has told: a copy of it, anybody's, may be lost."""
    if checkpoint == _base(ring):
        return False
    if checkpoint == ring.committed and ring.chosen is not None and checkpoint < ring.chosen:
        return False  # what was restored may have fewer copies than it: control says when that has enough
    return checkpoint in ring.aborted or _is_superseded(ring, checkpoint)


def removable(ring: Ring) -> tuple[Key, ...]:
    """Slots whose files nobody needs: obsolete ones, and those of ranks that the present line has elsewhere."""
    ours = ring.line > (0, 0) and _has_commit_of_present(ring)
    return tuple(
        key
        for key, slot in ring.slots.items()
        if may_be_lost(ring, slot) and (slot.obsolete or (ours and key[0] not in ring.members))
    )


def _base(ring: Ring) -> CheckpointId | None:
    """What the job goes back to if everything stops now: what it restored, until it has committed something since."""
    if ring.chosen is not None and not _has_commit_of_present(ring):
        return ring.chosen
    return ring.committed


def _is_superseded(ring: Ring, checkpoint: CheckpointId) -> bool:
    if ring.chosen is not None and not _has_commit_of_present(ring):
        # The job has gone back to `chosen`. What the lines before have left besides it is history, also where it has
        # the greater step: with two slots nothing could ever be written otherwise.
        return checkpoint.line < ring.branch
    return ring.committed is not None and checkpoint < ring.committed


def _has_commit_of_present(ring: Ring) -> bool:
    return ring.committed is not None and ring.committed.line >= ring.branch


def _worth(ring: Ring, slot: Slot) -> tuple[int, Branch, int]:
    """Free ones first, then aborted ones, then the oldest."""
    if slot.checkpoint is None:
        return 0, (0, 0, 0), 0
    return 1 if slot.checkpoint in ring.aborted else 2, slot.checkpoint.line, slot.checkpoint.step


def _with(ring: Ring, key: Key, slot: Slot) -> Ring:
    return msgspec.structs.replace(ring, slots={**ring.slots, key: slot})


def _change(ring: Ring, key: Key, **changes: object) -> Ring:
    return _with(ring, key, msgspec.structs.replace(ring.slots[key], **changes))
