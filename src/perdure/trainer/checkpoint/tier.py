"""`Checkpoint`: what a script calls. Asks the page whether a save is due, copies once, tells the memory server.

The order of a save is the protocol: WRITING, bytes, tail, WRITTEN, Written. Whatever becomes of the memory server, a
save gives False and training goes on.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import BadCheckpointError, ConfigError, PerdureError, WireError
from perdure.trainer.checkpoint import device, restore, slowness
from perdure.trainer.checkpoint.copy import Copiers, default_threads
from perdure.trainer.checkpoint.layout import Bound, bind, reasons_of_slowness
from perdure.trainer.checkpoint.line import Line
from perdure.trainer.checkpoint.positions import Merge
from perdure.trainer.checkpoint.seat import Copying, Place
from perdure.trainer.checkpoint.state import Gathered, State
from perdure.trainer.checkpoint.tail import Tail, encode_tail
from perdure.trainer.heartbeat import Heartbeat
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.layouts import NO_STEP
from perdure.wire.memory import NO_SLOT, Policy, RestorePlan, SavePage
from perdure.wire.slots import TAIL_LIMIT, page_up

if TYPE_CHECKING:
    from perdure.trainer.checkpoint.tiers import Tiers

Check = Callable[[int], str | None]
"""Given a step that has been done: why what was restored is bad, None where it is not."""
RESTORE_WITHIN: Seconds = 600.0
"""All ranks must have asked by then."""
DISCARD_WITHIN: Seconds = 60.0
DRAINED_WITHIN: Seconds = 1800.0
SLOT_WITHIN: Seconds = 60.0
"""For a slot that the last step can be saved in."""
_POLL: Seconds = 0.005
_FLUSH_TRIES = 3
_MOST_SKIPS = 64
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


class Checkpoint(Line):
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
        check: Check | None = None,
    ) -> None:
        """Attaches: when it returns, the slots exist and are faulted in. Raises ConfigError, WireError."""
        super().__init__(place, heartbeat, store=store, policy=policy or Policy(), fresh=fresh)
        self._merge = merge
        self._state = State(objects)
        self._copiers = Copiers(default_threads())
        self._pending: threading.Thread | None = None
        self._stream = device.new_stream()
        self._gate = device.StepGate(self._state.optimizers) if overlap and self._stream is not None else None
        self.saved = self.skipped = 0
        """Checkpoints that this rank has copied, and those that were due and for which there was no slot."""
        self.stall: Seconds = 0.0
        """How long the last save has kept the training thread."""
        self._judge = slowness.Judge(self._copiers)
        self._took: slowness.Took | None = None
        self._newest = NO_STEP
        """Step that was saved, or skipped, last: it is not tried again."""
        self.restored: restore.Restored | None = None
        self._check = check
        self._trial_end: int | None = None
        """While what was restored is on trial: the step from which on it is trusted."""
        self._is_bad = False
        """It was set aside: what is made of it is not worth saving."""
        gathered = self._state.gather()
        self._bound = self._bind({**gathered.tensors, **self._state.expected()}, None)
        self._tail_room = _room_for(len(self._tail(gathered)))
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
        if self._trial_end is not None and self._is_on_trial(step, is_last=is_last):
            return False
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
        if self._is_bad:
            return False
        if self._trial_end is not None:
            self._trust()
        self._finish_pending()
        checkpoint = self._turns.name(step)
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
        slow = self._judge.hear(self._took)
        if slow:
            self._say("stall", slow)
        return True

    def _write(self, checkpoint: CheckpointId, begin: float) -> bool:
        if not self._is_attached():
            return False
        watch = slowness.Stopwatch()
        gathered = self._state.gather()
        before, self._bound = self._bound, self._bind(gathered.tensors, self._bound)
        tail = self._tail(gathered)
        watch.gathered()
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
        self._took = watch.stop(self._bound) if self._bound.hash == before.hash else None
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
        self._skips = (*self._skips[1 - _MOST_SKIPS :], checkpoint)
        with contextlib.suppress(WireError):
            self._client.skipped(checkpoint)

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None, *, strict: bool = True) -> int:
        """Put everything back as it was after the newest complete checkpoint; gives the next step to do, 0 at first.

        `step`: exactly this one. Not `strict`: what the checkpoint has too many or too few of is left alone, and is
        in `restored`. All ranks get the same one; it is waited for all of them. It may be called again later, on all
        ranks, to go back: what was saved before has been hashed when the answer comes, and counts. Raises
        NoCheckpointError where checkpoints exist and none is readable, ConfigError where it does not fit, WireError.
        """
        plan, start = self._choose(step)
        if plan.chosen.checkpoint is None:
            return start
        world = restore.World(self._place.rank, self._place.world_size, self._store)
        self.restored = restore.fill(
            self._state,
            plan,
            self._client,
            world,
            self._copiers,
            strict=strict,
            merge=self._merge,
            mapped=None if self._seat is None else self._seat.mapped,
            known=self._bound,
        )
        with contextlib.suppress(WireError):
            self._client.restored(self.restored.checkpoint, self.restored.seconds, self.restored.sources)
        if self._check is not None:
            self._trial_end = start + self._policy.check_steps
        return start

    def tiers(self, step: int | None = None) -> tuple[int, "Tiers | None"]:
        """As `restore`, but nothing is read yet: (the next step to do, what a `TierReader` reads; None: nothing)."""
        from perdure.trainer.checkpoint.tiers import Tiers

        plan, start = self._choose(step)
        if plan.chosen.checkpoint is None:
            return start, None
        place = self._place
        return start, Tiers(plan, self._client, self._store, rank=place.rank, world_size=place.world_size)

    def _choose(self, step: int | None) -> tuple[RestorePlan, int]:
        """What all ranks restore, and the next step to do."""
        self._finish_pending()
        done, self._words[_STEP] = self._words[_STEP], NO_STEP  # the server is not to take it for where we are
        question = self._turns.ask(has_saved=self._newest != NO_STEP, step=step, hold=self._check is not None)
        plan = self._insist(partial(self._client.restore, question), RESTORE_WITHIN)
        self._newest, self.restored, self._trial_end, self._is_bad = NO_STEP, None, None, False
        return plan, self._turns.begin(plan, done)

    def discard(self, reason: str) -> None:
        """Set aside what was restored last, and all that was saved since: it is bad, as a loss that is no number shows.

        It is not restored again unless by its step: the next restore(), on all ranks or in the job's next life, gives
        an older one. One rank is enough to call it. Until then nothing is saved. Raises ConfigError where nothing has
        been restored, WireError.
        """
        if self.restored is None:
            raise ConfigError("discard(): nothing has been restored that could be set aside")
        self._finish_pending()
        aside = self._turns.aside(self.restored.checkpoint, reason)
        self._insist(partial(self._client.discard, aside), DISCARD_WITHIN)
        self._is_bad, self._trial_end = True, None

    def _is_on_trial(self, step: int, *, is_last: bool) -> bool:
        """Whether nothing is to be saved yet, for what was restored may turn out to be bad.

        Raises BadCheckpointError where the script's check says so: this life of the job ends.
        """
        reason = self._check(step) if self._check is not None else None
        if reason:
            what = None if self.restored is None else self.restored.checkpoint
            self.discard(str(reason))
            raise BadCheckpointError(f"{what} was restored and is bad: {reason}; it is set aside, restart the job")
        if not is_last and self._trial_end is not None and step + 1 < self._trial_end:
            return True
        self._trust()
        return False

    def _trust(self) -> None:
        self._trial_end = None
        with contextlib.suppress(WireError):
            self._client.trusted()

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, within: Seconds = DRAINED_WITHIN) -> bool:
        """Wait until the last step is in storage, and leave; gives whether it is there: never without a `store`.

        A last step that was not due is saved now: call it when the loop has ended, on all ranks, before anything else
        changes what is kept.
        """
        if self._closed:
            return self._stored
        self._finish_pending()
        if self._store and self._words[_STEP] not in (NO_STEP, self._newest):
            self._save_last(self._words[_STEP])
        if self._store:
            self._stored = self._flush(within)
        self._closed = True
        self._client.close()
        self._drop_seat()
        if self._gate is not None:
            self._gate.remove()
        return self._stored

    def _save_last(self, step: int) -> None:
        """As soon as a slot is free: nothing is to be trained meanwhile."""
        until = time.monotonic() + SLOT_WITHIN
        while self._words[_GRANT] == NO_SLOT and time.monotonic() < until:
            time.sleep(_POLL)
        self._save(step)

    def _flush(self, within: Seconds) -> bool:
        until, problem = time.monotonic() + within, ""
        with self._phase(is_long=True):
            for _ in range(_FLUSH_TRIES):  # a server that has died is followed by another one
                try:
                    if not self._is_attached():
                        self._attach()
                    problem = self._client.flush(max(until - time.monotonic(), 1.0)).error
                    break
                except ConfigError as refused:
                    problem = str(refused)
                    break
                except WireError as lost:
                    problem = str(lost)
        if problem:
            self._say("flush", f"the last checkpoint is not known to be in storage: {problem}")
        return not problem

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


def _room_for(nbytes: int) -> Bytes:
    """Twice what is needed now: lists in it may grow."""
    return min(max(page_up(2 * nbytes), _SMALLEST_TAIL_ROOM), TAIL_LIMIT)
