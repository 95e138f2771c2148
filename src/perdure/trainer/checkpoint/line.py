"""A trainer's line to its memory server, and what hangs on it: the slots, the page, and how it is attached again.

Knows when a server is gone and does not wait for it; does not know what is saved, nor when.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from perdure.errors import ConfigError, WireError
from perdure.host.proc import incarnation
from perdure.trainer.checkpoint import device
from perdure.trainer.checkpoint.client import MemoryClient
from perdure.trainer.checkpoint.layout import Bound
from perdure.trainer.checkpoint.seat import Place, Seat
from perdure.trainer.checkpoint.turns import Turns
from perdure.trainer.heartbeat import Heartbeat
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber, Rank
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.layouts import LoopPhase
from perdure.wire.memory import SAVE_PAGE_WORDS, Attach, Policy, SavePage

T = TypeVar("T")
_LOOK_EVERY = 1_000_000_000
"""Nanoseconds between two looks at whether the server lives."""
_WIRE_TRIES = 3
_VERSION, _FIRST, _EVERY, _ONCE = (
    int(word) for word in (SavePage.VERSION, SavePage.FIRST, SavePage.EVERY, SavePage.ONCE)
)


class Line:
    """Of one trainer. `_bound` and `_tail_room` say which slots it needs; they are set before `_attach`."""

    _bound: Bound
    _tail_room: Bytes

    def __init__(self, place: Place, heartbeat: Heartbeat, *, store: str, policy: Policy, fresh: bool) -> None:
        self._place, self._heartbeat = place, heartbeat
        self._store, self._policy, self._fresh = store, policy, fresh
        self._client = MemoryClient(place.socket, lambda text: self._say(text, text))
        self._turns = Turns(place.attempt, place.generation)
        self._me = incarnation(os.getpid())
        self._said: set[str] = set()
        self._look_at = 0
        self._closed = self._stored = False
        self._seat: Seat | None = None
        self._words = memoryview(bytearray(8 * SAVE_PAGE_WORDS)).cast("q")
        self._calling: Attach | None = None
        self._cadence = (0, 0, -1)
        self._skips: tuple[CheckpointId, ...] = ()
        """The last ones, told again to every server: one that died may not have passed them on, and until control
        hears of them the other ranks' parts of them fill up the places of what could be committed."""

    def _attach(self) -> None:
        """Waits for the slots. Raises ConfigError, WireError."""
        granted = self._client.attach(self._question(), self._bound.text)
        self._take(granted)

    def _question(self) -> Attach:
        place = self._place
        return Attach(
            job=place.job,
            attempt=place.attempt,
            generation=GenerationNumber(place.generation),
            rank=Rank(place.rank),
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            trainer=self._me,
            layout=self._bound.hash,
            shards=self._bound.shards,
            tail_room=self._tail_room,
            store=self._store,
            policy=self._policy,
            fresh=self._fresh,
            turn=self._turns.turn,
        )

    def _take(self, granted: Any) -> None:
        self._seat = Seat(granted, self._seat)
        self._words = self._seat.words
        if device.split(self._bound.rest)[1]:
            self._seat.pin()  # now: the first save is to take no longer than the others
        self._calling = None
        with contextlib.suppress(WireError):
            for skipped in self._skips:
                self._client.skipped(skipped)

    def _drop_seat(self) -> None:
        """The old page's words stay readable: `save_if_due` may be asked before there are new ones."""
        self._words = memoryview(bytearray(self._words)).cast("B").cast("q")
        if self._seat is not None:
            self._seat.close()
        self._seat = None

    def _look(self, now: int) -> None:
        self._look_at = now + _LOOK_EVERY
        if not self._closed:
            self._is_attached()

    def _is_attached(self) -> bool:
        """Whether a save can go through; where not, a step towards it that does not wait."""
        try:
            if self._calling is None and self._client.look():
                return self._seat is not None
            if self._calling is None:
                self._say("lost", "the memory server is gone; training goes on without checkpoints until it is back")
                self._calling = self._question()
                self._client.call(self._calling, self._bound.text)
            granted = self._client.granted(0.0)
            if granted is not None:
                self._take(granted)
                self._said.discard("lost")
                return True
        except (WireError, ConfigError, OSError) as problem:
            self._calling = None
            if isinstance(problem, ConfigError):
                self._say("refused", str(problem))
        return False

    def _read_again(self) -> tuple[int, int, int]:
        """The server is just writing; or it has died while it was, and then what was read last holds."""
        words = self._words
        for _ in range(1000):
            version = words[_VERSION]
            read = words[_FIRST], words[_EVERY], words[_ONCE]
            if not version & 1 and words[_VERSION] == version:
                self._cadence = read
                break
        return self._cadence

    def _insist(self, ask: Callable[[Seconds], T], within: Seconds) -> T:
        """An answer, also from a memory server that is started again meanwhile. Raises what `ask` does."""
        until = time.monotonic() + within
        for _ in range(_WIRE_TRIES):
            try:
                if self._seat is None or not self._client.is_connected:
                    self._attach()
                return ask(max(until - time.monotonic(), 1.0))
            except WireError as problem:
                if time.monotonic() > until:
                    raise
                self._say("lost", f"{problem}; trying again")
        raise WireError(f"the memory server at {self._place.socket} ends while it is asked")

    # --- what is told ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _phase(self, *, is_long: bool) -> Iterator[None]:
        before = self._heartbeat.phase
        if not is_long or before < LoopPhase.TRAINING:
            yield
            return
        self._heartbeat.set_phase(LoopPhase.CHECKPOINT)
        try:
            yield
        finally:
            self._heartbeat.set_phase(before)

    def _say(self, about: str, text: str) -> None:
        """Once for each thing: a line per step would hide everything else."""
        if about in self._said:
            return
        self._said.add(about)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"perdure: checkpoints: rank {self._place.rank}: {text}\n")
            sys.stderr.flush()
