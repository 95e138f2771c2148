"""The worker's side of the heartbeat page: it writes one slot and reads one word of the header.

Knows the bytes of `wire.layouts`; knows neither the agent that reads them nor what is done about silence. Outside
Perdure the same calls write to scratch memory. Imported in every worker, so it must stay light.
"""

import mmap
import os
import time

from perdure.errors import HostError
from perdure.wire.layouts import (
    MAGIC,
    NEVER_STOP,
    NO_STEP,
    WORDS_HEADER,
    WORDS_SLOT,
    Header,
    LoopPhase,
    Slot,
    page_bytes,
    slot_start,
)

# Plain integers: indexing by an IntEnum's member would double the cost of a step.
_STEP, _STEP_AT, _PHASE, _PHASE_AT, _BEATS = (
    int(word) for word in (Slot.STEP, Slot.STEP_AT, Slot.PHASE, Slot.PHASE_AT, Slot.BEATS)
)
_STOP_AFTER = int(Header.STOP_AFTER)
_FIRST_STEP, _TRAINING = int(LoopPhase.FIRST_STEP), int(LoopPhase.TRAINING)


class Heartbeat:
    """One worker's slot. `attached` is False where nobody reads it; every method works all the same."""

    __slots__ = ("_header", "_slot", "attached", "generation")

    def __init__(self) -> None:
        self.detach()

    def detach(self) -> None:
        """From now on write to scratch memory only."""
        words = memoryview(bytearray(page_bytes(1))).cast("q")
        words[_STOP_AFTER] = NEVER_STOP
        self._header = words[:WORDS_HEADER]
        self._slot = words[WORDS_HEADER:]
        self._slot[_STEP] = NO_STEP
        self._slot[Slot.FIRST_STEP] = NO_STEP
        self.attached = False
        self.generation = 0

    def attach(self, fd: int, slot: int, generation: int) -> None:
        """Write to `slot` of the page behind `fd` (which may be closed afterwards).

        The agent has cleared the slot. Raises HostError when `fd` is no heartbeat page or has no such slot.
        """
        size = os.fstat(fd).st_size
        if size < page_bytes(slot + 1):
            raise HostError(f"descriptor {fd} holds {size} bytes, too few for a heartbeat page with slot {slot}")
        words = memoryview(mmap.mmap(fd, size)).cast("q")
        if words[Header.MAGIC] != MAGIC:
            raise HostError(f"descriptor {fd} is no heartbeat page of this version of Perdure")
        start = slot_start(slot)
        self._header = words[:WORDS_HEADER]
        self._slot = words[start : start + WORDS_SLOT]
        self._slot[Slot.GENERATION] = self.generation = generation
        self.set_phase(LoopPhase.START_UP)
        self._slot[Slot.PID] = os.getpid()  # last: a reader that sees the pid sees the rest
        self.attached = True

    @property
    def step(self) -> int:
        """Last finished step, NO_STEP: none."""
        return self._slot[_STEP]

    @property
    def phase(self) -> LoopPhase:
        return LoopPhase(self._slot[_PHASE])

    @property
    def tells(self) -> bool:
        return bool(self._slot[Slot.TELLS])

    @property
    def stop_after(self) -> int:
        """Step after which the loop shall end, NEVER_STOP: none."""
        return self._header[_STOP_AFTER]

    def tell_from(self, first_step: int) -> None:
        """The script tells its steps itself, and the next one is `first_step`."""
        self._slot[Slot.FIRST_STEP] = first_step
        self._slot[Slot.TELLS] = 1
        self.set_phase(LoopPhase.FIRST_STEP)

    def step_done(self, step: int) -> None:
        """`step` is finished. No system call, no allocation that lasts: well below a microsecond."""
        slot = self._slot
        slot[_STEP_AT] = time.monotonic_ns()
        slot[_STEP] = step
        if slot[_PHASE] < _TRAINING:
            self.set_phase(LoopPhase.TRAINING)

    def set_phase(self, phase: LoopPhase) -> None:
        slot = self._slot
        slot[_PHASE_AT] = time.monotonic_ns()
        slot[_PHASE] = phase
        slot[_BEATS] += 1

    def saved(self) -> None:
        """A checkpoint phase has ended well."""
        self._slot[Slot.SAVES_STEP] = self._slot[_STEP]
        self._slot[Slot.SAVES] += 1

    def beat(self) -> None:
        """Progress that is no step."""
        self._slot[_BEATS] += 1


current = Heartbeat()
"""This process's own. Bound once by `attach`, never replaced, so that it may be imported by name."""


def attach(fd: int, slot: int, generation: int) -> None:
    """Bind `current` to a slot; see `Heartbeat.attach`."""
    current.attach(fd, slot, generation)


# A slot has one writer: what a worker forks (loaders of data) must not speak for it.
os.register_at_fork(after_in_child=current.detach)
