"""What one worker's heartbeat slot and process say over time: steps, phases, stops, stalls. Pure.

It knows limits (`policy.stalls`) and readings; it does not know who reads them, nor what is done about a finding.
"""

import msgspec

from perdure.policy.stalls import Limit, percentile, shortest_limit, stall_limit
from perdure.vocab.job import StallRules
from perdure.vocab.units import Instant, Seconds
from perdure.wire.layouts import NO_STEP, LoopPhase
from perdure.wire.reading import SlotReading

STEPS_KEPT = 100
PHASES_KEPT = 20
BUSY_CPU_SHARE = 0.05
"""CPU seconds per second from which a process counts as working; a waiting gloo rank uses under 0.01 (measured)."""


class Work(msgspec.Struct, frozen=True):
    """Counters of a process that grow when it works."""

    cpu_seconds: float
    faults: int
    io_bytes: int
    children: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one worker, as watched by its agent. Times are the agent's monotonic clock."""

    since: Instant
    """Last change of anything that counts as progress."""
    reading: SlotReading | None = None
    steps: tuple[Seconds, ...] = ()
    phases: tuple[tuple[str, Seconds], ...] = ()
    stopped_since: Instant | None = None
    work: Work | None = None
    work_read_at: Instant = 0.0
    worked_at: Instant | None = None
    """When the counters last grew enough to count as work."""
    told_stopped: bool = False
    told_stalled: bool = False

    @property
    def step(self) -> int | None:
        """Last finished step, None: none yet."""
        return None if self.reading is None or self.reading.step == NO_STEP else self.reading.step

    @property
    def phase(self) -> LoopPhase:
        return LoopPhase.START_UP if self.reading is None else self.reading.phase

    @property
    def tells(self) -> bool:
        return self.reading is not None and self.reading.tells

    @property
    def has_stepped(self) -> bool:
        return self.step is not None and self.phase is not LoopPhase.START_UP

    def step_seconds(self) -> Seconds | None:
        return percentile(self.steps, 0.5) if self.steps else None


def seen(progress: Progress, reading: SlotReading, state_letter: str, now: Instant) -> Progress:
    """Take in one reading of the slot and of the process's state."""
    before = progress.reading
    stopped = (progress.stopped_since or now) if state_letter == "T" else None
    progress = msgspec.structs.replace(progress, reading=reading, stopped_since=stopped)
    if before is not None and _mark(before) == _mark(reading):
        return progress
    steps, phases = progress.steps, progress.phases
    if before is not None and reading.step > before.step != NO_STEP and before.phase is LoopPhase.TRAINING:
        took = max(0.0, reading.step_at - max(before.step_at, before.phase_at))
        steps = (*steps, took / (reading.step - before.step))[-STEPS_KEPT:]
    if before is not None and reading.phase_at > before.phase_at > 0:
        phases = (*phases, (before.phase.name.lower(), reading.phase_at - before.phase_at))[-PHASES_KEPT:]
    return msgspec.structs.replace(progress, since=now, steps=steps, phases=phases, told_stalled=False)


def _mark(reading: SlotReading) -> tuple[int, int, float, int, int]:
    return reading.step, reading.phase, reading.phase_at, reading.saves, reading.beats


def worked(progress: Progress, work: Work, now: Instant) -> Progress:
    """Take in the counters of the process; call it about once a second."""
    before, elapsed = progress.work, now - progress.work_read_at
    # Counters that were read before the silence began say nothing of it: they are a new baseline only.
    is_working = (before is not None and progress.work_read_at >= progress.since) and (
        work.cpu_seconds - before.cpu_seconds > BUSY_CPU_SHARE * elapsed
        or work.faults - before.faults > 100 * elapsed
        or work.io_bytes - before.io_bytes > 4096 * elapsed
        or work.children != before.children
    )
    worked_at = now if is_working else progress.worked_at
    return msgspec.structs.replace(progress, work=work, work_read_at=now, worked_at=worked_at)


def wants_evidence(progress: Progress, now: Instant, rules: StallRules) -> bool:
    """Whether the counters should be read now: only of a worker that has been silent for a good part of its limit."""
    if now - progress.since < shortest_limit(rules) / 4:
        return False
    limit = limit_of(progress, rules)
    if limit is None or now - progress.since < limit.quiet / 4:
        return False
    return now - progress.work_read_at >= max(0.25, limit.quiet / 8)


def is_stopped(progress: Progress, now: Instant, rules: StallRules) -> bool:
    """Whether the worker has been in state T for long enough to act."""
    since = progress.stopped_since
    return since is not None and now - since >= rules.stopped_after


def limit_of(progress: Progress, rules: StallRules) -> Limit | None:
    name = progress.phase.name.lower()
    lengths = [seconds for phase, seconds in progress.phases if phase == name]
    return stall_limit(name, tells=progress.tells, steps=progress.steps, phases=lengths, rules=rules)


def stall(progress: Progress, state_letter: str, now: Instant, rules: StallRules) -> Limit | None:
    """The limit that has passed without progress; None: all is well, or it is waited for.

    A process in state D waits for a device: whatever it waits for has its own limits, and SIGKILL would not help.
    """
    silent = now - progress.since
    if silent < shortest_limit(rules) or state_letter in ("D", "t", "T"):
        return None  # asked 20 times a second: what the limit is need not be found out yet
    limit = limit_of(progress, rules)
    if limit is None:
        return None
    if progress.worked_at is not None and progress.worked_at > progress.since:
        quiet_for = now - progress.worked_at
        if limit.busy is not None and silent > limit.busy:
            return limit
        return limit if quiet_for > limit.quiet and silent > limit.quiet else None
    return limit if silent > limit.quiet else None
