"""What a trainer holds of its memory server: the page, the mapped slots, and one copy that is under way.

Knows headers and their order; does not know when to save.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.errors import CorruptCheckpointError
from perdure.trainer.checkpoint.client import Granted
from perdure.trainer.checkpoint.copy import Copiers, SlotMap, into_slot
from perdure.vocab.checkpoint import CheckpointId, SlotState, TensorPart
from perdure.vocab.ids import Incarnation, JobId
from perdure.wire import slotfile
from perdure.wire.memory import SAVE_PAGE_WORDS
from perdure.wire.slots import SlotHeader


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of which job this process is, and where its memory server is."""

    job: JobId
    attempt: int
    generation: int
    rank: int
    world_size: int
    local_world_size: int
    socket: str


class Seat:
    """Made from an Attached; takes its descriptors."""

    def __init__(self, granted: Granted, before: "Seat | None" = None) -> None:
        """Slots that `before` has mapped already are kept as they are. Raises CorruptCheckpointError, HostError."""
        self.durable = granted.answer.durable
        known = {} if before is None else {slot.identity: slot for slot in before.slots}
        self.slots: list[SlotMap] = []
        try:
            self.words = memoryview(mmap.mmap(granted.page, mmap.PAGESIZE)).cast("q")[:SAVE_PAGE_WORDS]
        finally:
            os.close(granted.page)
        for fd in granted.slots:
            status = os.fstat(fd)
            same = known.pop((status.st_dev, status.st_ino, status.st_size), None)
            if same is None:
                self.slots.append(SlotMap(fd))
            else:
                os.close(fd)
                self.slots.append(same)
        for slot in known.values():
            slot.close()

    def begin(self, index: int, checkpoint: CheckpointId, writer: Incarnation) -> "Copying | None":
        """Claim slot `index` for a checkpoint; None where the grant is an old one, that has been used.

        A slot that is given is FREE (the server has seen to it), or WRITING where we failed the last time.
        """
        if not 0 <= index < len(self.slots):
            return None
        slot = self.slots[index]
        try:
            header = slotfile.read_header(slot.fd)
        except CorruptCheckpointError:
            return None  # the server gives it up when it looks
        if header.state not in (SlotState.FREE, SlotState.WRITING):
            return None
        return Copying(index, slot, header, checkpoint, writer)

    def mapped(self, fd: int) -> mmap.mmap | None:
        """The map of the slot whose file `fd` is, where it is one of these."""
        status = os.fstat(fd)
        wanted = (status.st_dev, status.st_ino, status.st_size)
        return next((slot.map for slot in self.slots if slot.identity == wanted), None)

    def pin(self) -> None:
        """Register all slots with the CUDA driver."""
        for slot in self.slots:
            slot.pin()

    def close(self) -> None:
        for slot in self.slots:
            slot.close()


class Copying:
    """One slot from WRITING to WRITTEN. Left before its end, it is torn, and nobody reads it."""

    def __init__(
        self, index: int, slot: SlotMap, header: SlotHeader, checkpoint: CheckpointId, writer: Incarnation
    ) -> None:
        self.index, self.slot = index, slot
        begun = msgspec.structs.replace(
            header, state=SlotState.WRITING, checkpoint=checkpoint, writer=writer, tail_bytes=0, root=""
        )
        self._header = slotfile.write_header(slot.fd, begun)  # before the first byte

    def put(
        self, flat: Sequence[tuple[int, int, int]], rest: Sequence[tuple[TensorPart, Any]], copiers: Copiers
    ) -> None:
        into_slot(self.slot, flat, rest, copiers)

    def put_tail(self, tail: bytes) -> None:
        self.slot.write(self._header.tail_start, tail)
        self._header = msgspec.structs.replace(self._header, tail_bytes=len(tail))

    def end(self) -> None:
        """After the last byte."""
        self._header = slotfile.write_header(
            self.slot.fd, msgspec.structs.replace(self._header, state=SlotState.WRITTEN)
        )
