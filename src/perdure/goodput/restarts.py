"""`RestartBook`: each change of generation, what caused it and what it cost in wall time.

It is told moments by the fold in `ledger`; it knows no events, and nothing of nodes.
"""

import msgspec

from perdure.goodput.phases import to_seconds
from perdure.vocab.decision import Decision
from perdure.vocab.ids import EventId, GenerationNumber
from perdure.vocab.units import Instant, Seconds


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One change of generation. Its seconds are wall time, not node-seconds."""

    at: Instant
    """When the event came that was answered."""
    answers: EventId
    cause: str
    """The fault's id, as in `worker.killed`; the action's name where no fault caused it, as in `grow`."""
    what: str
    """What happened, in one sentence."""
    actions: tuple[str, ...]
    generation: GenerationNumber | None
    """That came of it; None: none did."""
    recovered: bool
    """That generation made its first step (of every member)."""
    detection_s: Seconds
    """From the fault's begin to its event."""
    running_s: Seconds | None
    """From the event to all workers started, less `held_s`; None: it did not come to that."""
    recovery_s: Seconds
    """From the event to the first step of every member, or to what cut the recovery short; less `held_s`."""
    held_s: Seconds
    redone_s: Seconds
    """From the first step until the work of the generations before was done again."""


class _Open:
    """A restart that is not over. Times in microseconds."""

    def __init__(self, decision: Decision, began: int, at: int) -> None:
        self.decision, self.began, self.at = decision, min(began, at), at
        self.actions: list[str] = []
        self.generation: GenerationNumber | None = None
        self.running: int | None = None
        self.first_step: int | None = None
        self.held = 0
        self.held_since: int | None = None
        self.redo_begin: int | None = None
        self.redo_end: int | None = None

    def end_hold(self, at: int) -> None:
        if self.held_since is not None:
            self.held += max(at - self.held_since, 0)
            self.held_since = None

    def close(self, at: int) -> Restart:
        self.end_hold(at)
        recovered_at = at if self.first_step is None else self.first_step
        redo_end = at if self.redo_end is None else self.redo_end
        redone = 0 if self.redo_begin is None else redo_end - self.redo_begin
        diagnosis = self.decision.diagnosis
        return Restart(
            at=to_seconds(self.at),
            answers=self.decision.answers,
            cause=self.actions[0] if diagnosis is None else diagnosis.fault.id,
            what=self.decision.because if diagnosis is None else diagnosis.what,
            actions=tuple(self.actions),
            generation=self.generation,
            recovered=self.first_step is not None,
            detection_s=to_seconds(self.at - self.began),
            running_s=None if self.running is None else to_seconds(max(self.running - self.at - self.held, 0)),
            recovery_s=to_seconds(max(recovered_at - self.at - self.held, 0)),
            held_s=to_seconds(self.held),
            redone_s=to_seconds(max(redone, 0)),
        )


class RestartBook:
    """Restarts in order; at most the last is open. Times in microseconds."""

    def __init__(self) -> None:
        self._done: list[Restart] = []
        self._open: _Open | None = None

    def opened(self, decision: Decision, began: int, at: int) -> None:
        """Something ends the current generation, or the attempt to make one."""
        self.over(at)
        self._open = _Open(decision, began, at)

    def decided(self, decision: Decision) -> None:
        if self._open is not None:
            self._open.actions += [str(type(action).__struct_config__.tag) for action in decision.actions]

    def held(self, at: int) -> None:
        if self._open is not None and self._open.held_since is None:
            self._open.held_since = at

    def began(self, generation: GenerationNumber, at: int) -> None:
        if self._open is not None:
            self._open.end_hold(at)
            if self._open.first_step is None:
                self._open.generation = generation

    def running(self, at: int) -> None:
        if self._open is not None and self._open.running is None:
            self._open.running = at

    def first_step(self, at: int) -> None:
        """Every member has made a step."""
        if self._open is not None and self._open.first_step is None:
            self._open.first_step = at

    def redoing(self, at: int) -> None:
        """A member does again what was done."""
        if self._open is not None:
            self._open.redo_begin = at if self._open.redo_begin is None else min(at, self._open.redo_begin)

    def caught_up(self, at: int) -> None:
        """A member has done all of it again."""
        if self._open is not None:
            self._open.redo_end = at if self._open.redo_end is None else max(at, self._open.redo_end)

    def over(self, at: int) -> None:
        """What follows has nothing to do with the open restart."""
        if self._open is not None:
            self._done.append(self._open.close(at))
            self._open = None

    def close(self, at: int) -> tuple[Restart, ...]:
        self.over(at)
        return tuple(self._done)
