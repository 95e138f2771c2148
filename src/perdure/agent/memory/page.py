"""The server's side of a `SavePage`: what a trainer must know at every step, in memory that both share."""

import mmap
import os

from perdure.vocab.checkpoint import Cadence
from perdure.wire.layouts import NO_STEP
from perdure.wire.memory import NO_SLOT, SAVE_PAGE_WORDS, SavePage


class GrantPage:
    """For one trainer. `fd` is given to it; close() ends this side, the memory goes with the last user."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("perdure-save", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("q")[:SAVE_PAGE_WORDS]
        self._values: tuple[int, ...] = ()
        self._words[SavePage.STEP] = NO_STEP
        self.show(None, None, None, None)

    def show(self, cadence: Cadence | None, once: int | None, slot: int | None, committed: int | None) -> None:
        """All of the server's words at once. The trainer never sees a mixture."""
        values = (
            0 if cadence is None else cadence.first,
            0 if cadence is None else cadence.every,
            NO_STEP if once is None else once,
            NO_SLOT if slot is None else slot,
            NO_STEP if committed is None else committed,
        )
        if values == self._values:
            return
        self._words[SavePage.VERSION] += 1
        for word, value in enumerate(values, SavePage.FIRST):
            self._words[word] = value
        self._words[SavePage.VERSION] += 1
        self._values = values

    @property
    def step(self) -> int:
        """Last step that the trainer told; NO_STEP: none."""
        return self._words[SavePage.STEP]

    @property
    def step_at(self) -> float:
        """When, on CLOCK_MONOTONIC, in seconds."""
        return self._words[SavePage.STEP_AT] / 1e9

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)
