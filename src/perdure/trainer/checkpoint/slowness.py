"""Whether a save took longer than its copy must, and why. Thread intelligent-machine-learning/dlrover 1225.

A probe copies memory as a save does, with the same threads, and says what this machine can; it is run when a save looks
slow, and not before. Knows times and counters; does not know slots. States on a GPU are not judged: no probe of host
memory tells what they may cost.
"""

import mmap
import resource
import time

import msgspec
import torch

from perdure.trainer.checkpoint.copy import Copiers
from perdure.trainer.checkpoint.layout import Bound, reasons_of_slowness
from perdure.vocab.units import Bytes, Seconds, show_bytes
from perdure.wire.slotfile import populate

TOO_SLOW = 3.0
"""Times the bare copy."""
UNNOTICED: Seconds = 0.05
"""Shorter saves are never told of: what they cost beside the copy is a constant that nobody can change."""
PROBE: Bytes = 32 << 20
"""More than most caches; half of it is read and half is written. Held for a moment, once."""
_SHARE = 0.2
"""A cause that explains less of the time is none."""
_FAULT: Seconds = 0.5e-6
"""What a page fault costs at least (measured 0.5 to 1 µs, 2026-12-01)."""
_SURELY_FAST = 20e9
"""Bytes per second. A save that is fast beside this is fast beside every memory."""


class Took(msgspec.Struct, frozen=True, kw_only=True):
    """One save, as it was measured."""

    nbytes: Bytes
    whole: Seconds
    gathering: Seconds
    """Of `whole`: `state_dict()` of the script's own objects, and what is no tensor."""
    waiting: Seconds
    """Of `whole`: the thread was not on a processor."""
    faults: int
    """Pages that were not in place."""
    odd: tuple[str, ...] = ()
    """Of the layout: what cannot be copied as it lies."""

    def is_slow(self, bytes_per_second: float) -> bool:
        return self.whole > max(TOO_SLOW * self.nbytes / bytes_per_second, UNNOTICED)


def explain(took: Took, bytes_per_second: float) -> str:
    """One sentence: how slow, and what explains most of it."""
    reasons = list(took.odd)
    if took.gathering > _SHARE * took.whole:
        reasons.append(f"state_dict() of what is kept took {took.gathering:.2f} s of it")
    if took.faults * _FAULT > _SHARE * took.whole:
        reasons.append(f"{took.faults} pages were not in place (page faults): the machine is short of memory, or swaps")
    if took.waiting > _SHARE * took.whole and not reasons:
        reasons.append(
            f"the training thread waited {took.waiting:.2f} s for a processor or for Python's lock: the machine is "
            "busy, or other threads of the script are"
        )
    bare = took.nbytes / bytes_per_second
    return (
        f"a save of {show_bytes(took.nbytes)} kept training for {took.whole:.2f} s, a bare copy takes {bare:.2f} s: "
        f"{'; '.join(reasons) or 'nothing that is measured explains it'}"
    )


class Stopwatch:
    """Measures one save."""

    def __init__(self) -> None:
        self._faults = _faults()
        self._busy = time.thread_time()
        self.begin = time.perf_counter()
        self._gathered = self.begin

    def gathered(self) -> None:
        """What follows is the copy."""
        self._gathered = time.perf_counter()

    def stop(self, bound: Bound) -> Took | None:
        """None: the state is on a device, and not judged."""
        whole, busy = time.perf_counter() - self.begin, time.thread_time() - self._busy
        if any(tensor.device.type != "cpu" for _, tensor in bound.rest):
            return None
        return Took(
            nbytes=bound.layout.data_bytes,
            whole=whole,
            gathering=self._gathered - self.begin,
            waiting=max(0.0, whole - busy),
            faults=_faults() - self._faults,
            odd=_odd(bound) if whole > UNNOTICED else (),
        )


class Judge:
    """Says once what makes saves slow: when two in a row are, for one alone may have met anything."""

    def __init__(self, copiers: Copiers) -> None:
        self._copiers = copiers
        self._rate: float | None = None
        self._slow = 0
        self._has_said = False

    def hear(self, took: Took | None) -> str:
        """A sentence to be told, or nothing. Costs nothing but after a save that looks slow; the probe, once, 20 ms."""
        if took is None or self._has_said or not took.is_slow(self._rate or _SURELY_FAST):
            self._slow = 0
            return ""
        if self._rate is None:
            self._rate = probe(self._copiers)
        self._slow = self._slow + 1 if took.is_slow(self._rate) else 0
        if self._slow < 2:
            return ""
        self._has_said = True
        return explain(took, self._rate)


def probe(copiers: Copiers, nbytes: Bytes = PROBE) -> float:
    """Bytes per second of a copy between memory that is in place, the best of three."""
    half = nbytes // 2
    with mmap.mmap(-1, 2 * half) as area:
        populate(area)
        view = torch.frombuffer(area, dtype=torch.uint8)
        address, best = view.data_ptr(), float("inf")
        del view
        for _ in range(3):
            begin = time.perf_counter()
            copiers.run([(address + half, address, half)])
            best = min(best, time.perf_counter() - begin)
    return half / best


def _odd(bound: Bound) -> tuple[str, ...]:
    """Why torch has to copy parts of this state element by element."""
    odd = sum(part.nbytes for part, _ in bound.rest)
    return tuple(reasons_of_slowness(bound)) if odd > _SHARE * bound.layout.data_bytes / TOO_SLOW else ()


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt
