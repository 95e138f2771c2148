"""The agent's side of the heartbeat page: make it, clear a slot, read a slot (`trainer.heartbeat` is the other)."""

import mmap
import os

from perdure.wire.layouts import (
    MAGIC,
    NEVER_STOP,
    NO_STEP,
    WORDS_SLOT,
    Header,
    LoopPhase,
    Slot,
    page_bytes,
    slot_start,
)
from perdure.wire.reading import SlotReading


class HeartbeatPage:
    """Owned by an agent. `fd` is given to workers; close() ends this side, the memory goes with the last user."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.fd = os.memfd_create("perdure-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, page_bytes(slots))
        self._map = mmap.mmap(self.fd, page_bytes(slots))
        self._words = memoryview(self._map).cast("q")
        self._words[Header.MAGIC] = MAGIC
        self._words[Header.SLOTS] = slots
        self._words[Header.STOP_AFTER] = NEVER_STOP
        for slot in range(slots):
            self.clear(slot)

    def clear(self, slot: int) -> None:
        """Forget the worker that used `slot`: nothing of an earlier life may be read as the next one's."""
        start = slot_start(slot)
        for word in range(WORDS_SLOT):
            self._words[start + word] = 0
        self._words[start + Slot.STEP] = NO_STEP
        self._words[start + Slot.FIRST_STEP] = NO_STEP

    def read(self, slot: int) -> SlotReading:
        w = self._words[slot_start(slot) : slot_start(slot) + WORDS_SLOT]
        phase = w[Slot.PHASE]
        return SlotReading(
            pid=w[Slot.PID],
            generation=w[Slot.GENERATION],
            step=w[Slot.STEP],
            step_at=w[Slot.STEP_AT] / 1e9,
            phase=LoopPhase(phase) if 0 <= phase <= LoopPhase.DONE else LoopPhase.OTHER,
            phase_at=w[Slot.PHASE_AT] / 1e9,
            tells=bool(w[Slot.TELLS]),
            first_step=w[Slot.FIRST_STEP],
            saves=w[Slot.SAVES],
            saves_step=w[Slot.SAVES_STEP],
            beats=w[Slot.BEATS],
        )

    def stop_after(self, step: int | None) -> None:
        """Ask scripts that tell their steps to end after `step`; None: take that back."""
        self._words[Header.STOP_AFTER] = NEVER_STOP if step is None else step

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)
