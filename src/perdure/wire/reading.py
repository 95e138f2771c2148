"""One slot of the heartbeat page as a value. Pure; `layouts` has the words, and imports nothing, for the worker."""

import msgspec

from perdure.wire.layouts import LoopPhase


class SlotReading(msgspec.Struct, frozen=True):
    """One slot at one moment. Times are CLOCK_MONOTONIC in seconds."""

    pid: int
    generation: int
    step: int
    step_at: float
    phase: LoopPhase
    phase_at: float
    tells: bool
    first_step: int
    saves: int
    saves_step: int
    beats: int
