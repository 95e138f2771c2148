"""`Checkpoint`: what a script calls. Asks the page whether a save is due, copies once, tells the memory server.

The order of a save is the protocol: WRITING, bytes, tail, WRITTEN, Written. Whatever becomes of the memory server, a
save gives False and training goes on.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from perdure.errors import ConfigError, PerdureError, WireError
from perdure.host.proc import incarnation
from perdure.trainer.checkpoint import device, restore
from perdure.trainer.checkpoint.client import MemoryClient
from perdure.trainer.checkpoint.copy import Copiers, default_threads
from perdure.trainer.checkpoint.layout import Bound, bind, reasons_of_slowness
from perdure.trainer.checkpoint.positions import Merge
from perdure.trainer.checkpoint.seat import Copying, Place, Seat
from perdure.trainer.checkpoint.state import Gathered, State
from perdure.trainer.checkpoint.tail import Tail, encode_tail
from perdure.trainer.heartbeat import Heartbeat
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import GenerationNumber, Rank
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.layouts import NO_STEP, LoopPhase
from perdure.wire.memory import NO_SLOT, Attach, Policy, RestorePlan, SavePage
from perdure.wire.slots import TAIL_LIMIT, page_up

RESTORE_WITHIN: Seconds = 600.0
"""All ranks must have asked by then."""
DRAINED_WITHIN: Seconds = 1800.0
SLOT_WITHIN: Seconds = 60.0
"""For a slot that the last step can be saved in."""
_POLL: Seconds = 0.005
_LOOK_EVERY = 1_000_000_000
"""Nanoseconds between two looks at whether the server lives."""
_LONG: Seconds = 1.0
"""A save that takes so long is told as a phase of its own: else it would look like a stall."""
_SMALLEST_TAIL_ROOM: Bytes = 256 << 10
_VERSION, _FIRST, _EVERY, _ONCE, _GRANT, _COMMITTED, _STEP, _STEP_AT = (
    int(word)
    for word in (
        SavePage.VERSION,
        SavePage.FIRST,
        SavePage.EVERY,
        SavePage.ONCE,
        SavePage.GRANT,
        SavePage.COMMITTED,
        SavePage.STEP,
        SavePage.STEP_AT,
    )
)
_WIRE_TRIES = 3


class Checkpoint:
    """Got by `run.checkpoint(...)`. Every rank makes one, with the same arguments, and calls the same methods."""

    def __init__(
        self,
        objects: dict[str, Any],
        place: Place,
        heartbeat: Heartbeat,
        *,
        store: str = "",
        policy: Policy | None = None,
        fresh: bool = False,
        overlap: bool = False,
        merge: Merge | None = None,
    ) -> None:
        """Attaches: when it returns, the slots exist and are faulted in. Raises ConfigError, WireError."""
        self._place, self._heartbeat = place, heartbeat
        self._store, self._policy, self._fresh, self._merge = store, policy or Policy(), fresh, merge
        self._state = State(objects)
        self._copiers = Copiers(default_threads())
        self._client = MemoryClient(place.socket)
        self._me = incarnation(os.getpid())
        self._said: set[str] = set()
        self._look_at = 0
        self._pending: threading.Thread | None = None
        self._stream = device.new_stream()
        self._gate = device.StepGate(self._state.optimizers) if overlap and self._stream is not None else None
        self._closed = False
        self.saved = self.skipped = 0
        """Checkpoints that this rank has copied, and those that were due and for which there was no slot."""
        self.stall: Seconds = 0.0
        """How long the last save has kept the training thread."""
        self._newest = NO_STEP
        """Step that was saved, or skipped, last: it is not tried again."""
        self.restored: restore.Restored | None = None
        gathered = self._state.gather()
        self._bound = self._bind({**gathered.tensors, **self._state.expected()}, None)
        self._tail_room = _room_for(len(self._tail(gathered)))
        self._seat: Seat | None = None
        self._words = memoryview(bytearray(8 * 16)).cast("q")
        self._calling: Attach | None = None
        self._cadence = (0, 0, -1)
        self._attach()

    # --- saving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, step: int) -> bool:
        """Save the state after `step` if it is due; gives whether. Costs well below 2 µs when it is not.

        Never raises for the memory server: what cannot be saved is skipped, and said once.
        """
        words = self._words
        words[_STEP_AT] = now = time.monotonic_ns()
        words[_STEP] = step
        if now > self._look_at:
            self._look(now)
        version = words[_VERSION]
        first, every, once = words[_FIRST], words[_EVERY], words[_ONCE]
        if version & 1 or words[_VERSION] != version:
            first, every, once = self._read_again()
        is_last = (
            step == self._heartbeat.stop_after
        )  # of a job that is to save and end: known here before control's word
        if is_last or step == once or (every and step >= first and (step - first) % every == 0):
            return self._save(step)
        return False

    def save(self, step: int) -> bool:
        """Save the state after `step` now, if a slot is free; gives whether. All ranks must do it at the same step."""
        self._words[_STEP_AT] = time.monotonic_ns()
        self._words[_STEP] = step
        return self._save(step)

    @property
    def committed(self) -> int:
        """Step of the newest checkpoint of this life of the job that is complete on all ranks; -1: none yet."""
        return self._words[_COMMITTED]

    def _save(self, step: int) -> bool:
        begin = time.perf_counter()
        self._finish_pending()
        checkpoint = CheckpointId(self._place.attempt, GenerationNumber(self._place.generation), step)
        with self._phase(is_long=self.stall > _LONG):
            try:
                written = self._write(checkpoint, begin)
            except PerdureError as problem:
                if isinstance(problem, ConfigError):
                    self._note_skip(checkpoint)
                    raise
                self._say("save", f"step {step} was not saved: {problem}")
                written = False
            except BaseException:
                self._note_skip(checkpoint)  # the script's own objects failed; the other ranks must not wait for us
                raise
        if not written:
            self._note_skip(checkpoint)
            return False
        self.saved += 1
        self._newest = checkpoint.step
        self._heartbeat.saved()
        return True

    def _write(self, checkpoint: CheckpointId, begin: float) -> bool:
        if not self._is_attached():
            return False
        gathered = self._state.gather()
        before, self._bound = self._bound, self._bind(gathered.tensors, self._bound)
        tail = self._tail(gathered)
        if self._bound.hash != before.hash or len(tail) > self._tail_room:
            self._tail_room = max(self._tail_room, _room_for(len(tail)))
            self._drop_seat()
            try:
                with self._phase(is_long=True):
                    self._attach()  # the layout has changed: other slots
            except ConfigError as refused:  # no room for them, say; training goes on
                self._say("refused", str(refused))
                return False
        seat = self._seat
        if seat is None:
            return False
        index = self._words[_GRANT]
        copying = seat.begin(index, checkpoint, self._me) if index != NO_SLOT else None
        if copying is None:
            self._say("busy", f"step {checkpoint.step} was skipped: all slots are still being sent or stored")
            return False
        under_way = self._copy(copying, self._bound)
        copying.put_tail(tail)
        self.stall = time.perf_counter() - begin
        if under_way is None:
            self._end(copying, checkpoint)
        else:
            self._pending = threading.Thread(
                target=self._end_later, args=(under_way, copying, checkpoint), name="perdure-copy-end", daemon=True
            )
            self._pending.start()
        return True

    def _copy(self, copying: Copying, bound: Bound) -> device.DeviceCopy | None:
        """Everything is in the slot when it returns, but for what is under way from a device."""
        host, on_device = device.split(bound.rest)
        hidden, now = [], on_device
        if self._gate is not None:
            owned = self._state.owned_memory()
            hidden = [(part, tensor) for part, tensor in on_device if tensor.data_ptr() in owned]
            now = [(part, tensor) for part, tensor in on_device if tensor.data_ptr() not in owned]
        at_once = device.DeviceCopy(copying.slot, now, self._stream) if now else None
        under_way = device.DeviceCopy(copying.slot, hidden, self._stream) if hidden else None
        copying.put(bound.flat, host, self._copiers)
        if at_once is not None:
            at_once.wait()
        if self._gate is not None:
            self._gate.hold(under_way)
        return under_way

    def _end(self, copying: Copying, checkpoint: CheckpointId) -> None:
        copying.end()
        self._client.written(copying.index, checkpoint, self.stall)

    def _end_later(self, under_way: device.DeviceCopy, copying: Copying, checkpoint: CheckpointId) -> None:
        try:
            under_way.wait()
            self._end(copying, checkpoint)
        except (PerdureError, OSError, RuntimeError) as problem:
            self._say("save", f"step {checkpoint.step} was not saved: {problem}")

    def _finish_pending(self) -> None:
        if self._pending is not None:
            self._pending.join()
            self._pending = None

    def _note_skip(self, checkpoint: CheckpointId) -> None:
        self.skipped += 1
        self._newest = checkpoint.step
        with contextlib.suppress(WireError):
            self._client.skipped(checkpoint)

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, *, strict: bool = True) -> int:
        """Put everything back as it was after the newest complete checkpoint; gives the next step to do, 0 at first.

        `step`: exactly this one. Not `strict`: what the checkpoint has too many or too few of is left alone, and is
        in `restored`. All ranks get the same one; it is waited for all of them. Raises NoCheckpointError where
        checkpoints exist and none is readable, ConfigError where it does not fit, WireError.
        """
        self._finish_pending()
        plan = self._asked(step)
        if plan.chosen.checkpoint is None:
            return 0
        world = restore.World(self._place.rank, self._place.world_size, self._store)
        self.restored = restore.fill(
            self._state, plan, self._client, world, self._copiers, strict=strict, merge=self._merge
        )
        return plan.chosen.checkpoint.step + 1

    def _asked(self, step: int | None) -> RestorePlan:
        until = time.monotonic() + RESTORE_WITHIN
        for _ in range(_WIRE_TRIES):
            try:
                if self._seat is None or not self._client.is_connected:
                    self._attach()
                return self._client.restore(step, max(until - time.monotonic(), 1.0))
            except WireError as problem:
                if time.monotonic() > until:
                    raise
                self._say("lost", f"{problem}; trying again")
        raise WireError(f"the memory server at {self._place.socket} ends while it is asked for a checkpoint")

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, within: Seconds = DRAINED_WITHIN) -> bool:
        """Wait until the last step is in storage, if there is one, and leave; gives whether it is there.

        A last step that was not due is saved now: call it when the loop has ended, on all ranks, before anything else
        changes what is kept.
        """
        if self._closed:
            return True
        self._finish_pending()
        durable = True
        if self._seat is not None and self._seat.durable and self._words[_STEP] not in (NO_STEP, self._newest):
            self._save_last(self._words[_STEP])
        if self._seat is not None and self._seat.durable:
            durable = self._flush(within)
        self._closed = True
        self._client.close()
        self._drop_seat()
        if self._gate is not None:
            self._gate.remove()
        return durable

    def _save_last(self, step: int) -> None:
        """As soon as a slot is free: nothing is to be trained meanwhile."""
        until = time.monotonic() + SLOT_WITHIN
        while self._words[_GRANT] == NO_SLOT and time.monotonic() < until:
            time.sleep(_POLL)
        self._save(step)

    def _flush(self, within: Seconds) -> bool:
        try:
            with self._phase(is_long=True):
                if not self._is_attached():
                    self._attach()
                flushed = self._client.flush(within)
        except (WireError, ConfigError) as problem:
            self._say("flush", f"the last checkpoint may not be in storage: {problem}")
            return False
        if flushed.error:
            self._say("flush", f"the last checkpoint is not in storage: {flushed.error}")
        return not flushed.error

    # --- the server --------------------------------------------------------------------------------------------------

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
        )

    def _take(self, granted: Any) -> None:
        self._seat = Seat(granted, self._seat)
        self._words = self._seat.words
        self._calling = None

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

    # --- small things ------------------------------------------------------------------------------------------------

    def _bind(self, tensors: dict[str, Any], previous: Bound | None) -> Bound:
        bound = bind(tensors, self._place.rank, self._place.world_size, previous)
        if bound is not previous:
            for reason in reasons_of_slowness(bound):
                self._say("slow", f"saving takes longer than it must: {reason}")
        return bound

    def _tail(self, gathered: Gathered) -> bytes:
        tail = encode_tail(Tail(gathered.shared, gathered.own))
        if len(tail) > TAIL_LIMIT:
            raise ConfigError(
                f"what is no tensor in the state has {len(tail)} bytes, {TAIL_LIMIT} fit: give large things as tensors"
            )
        return tail

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


def _room_for(nbytes: int) -> Bytes:
    """Twice what is needed now: lists in it may grow."""
    return min(max(page_up(2 * nbytes), _SMALLEST_TAIL_ROOM), TAIL_LIMIT)
