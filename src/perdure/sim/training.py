"""The made-up workers and their steps. A step is a collective: it advances when every rank of a generation runs.

It knows ranks, steps and saves of one generation; it knows nothing of agents, control or why a worker ends.
"""

import math
import random
from collections.abc import Callable
from itertools import count

from perdure.sim.agenda import Agenda, Alarm
from perdure.sim.scenario import Script
from perdure.vocab.event import WorkerError
from perdure.vocab.ids import GenerationNumber, Incarnation, NodeId, Rank
from perdure.vocab.units import Instant
from perdure.wire.layouts import NO_STEP, LoopPhase
from perdure.wire.reading import SlotReading

STEPS_WATCHED = 12
"""First steps of a life that are looked at one by one, so that limits are learned; later ones pass unseen."""
PEER_NOTICES = (0.005, 0.25)
LOST_PEER = WorkerError(
    type="RuntimeError",
    message="[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:41234",
    where="train.py:41",
    traceback="Traceback (most recent call last): …",
)


class Worker:
    """One process."""

    def __init__(
        self, pid: int, node: NodeId, life: Incarnation, local_rank: int, rank: Rank, generation: GenerationNumber
    ) -> None:
        self.pid, self.node, self.life = pid, node, life
        self.local_rank, self.rank, self.generation = local_rank, rank, generation
        self.is_alive = True
        self.is_ready = False
        """It has reached the point where it waits for the other ranks."""
        self.stopped = False
        self.stalled = False
        self.blocked = False
        """State D: signals wait."""
        self.killed = False
        """SIGKILL has been sent."""
        self.was_oom = False

    @property
    def runs(self) -> bool:
        return self.is_alive and self.is_ready and not (self.stopped or self.stalled or self.blocked)

    @property
    def letter(self) -> str:
        return "D" if self.blocked else "T" if self.stopped else "S"


class Saves:
    """What the job has saved: the step from which a new generation goes on."""

    def __init__(self) -> None:
        self.step = 0


class Training:
    """One generation's ranks."""

    def __init__(
        self,
        number: GenerationNumber,
        size: int,
        script: Script,
        saves: Saves,
        first_step_extra: float,
        agenda: Agenda,
        rng: random.Random,
        *,
        observe: Callable[[tuple[Worker, ...]], None],
        end: Callable[[Worker, int, WorkerError | None], None],
        is_connected: Callable[[list[NodeId]], bool],
    ) -> None:
        self.number, self.size, self.script = number, size, script
        self._saves, self._extra, self._agenda, self._rng = saves, first_step_extra, agenda, rng
        self._observe, self._end, self._is_connected = observe, end, is_connected
        self.workers: dict[Rank, Worker] = {}
        self.formed_at: Instant | None = None
        self.first = 0
        """Steps done before this generation."""
        self.done = 0
        self.saved = 0
        """Checkpoint phases ended in this generation."""
        self.saved_step = NO_STEP
        self.flows = False
        self.finishing = False
        self.stop_after: int | None = None
        self._since: Instant = agenda.now
        self._partial = 0.0
        self._alarm = Alarm(agenda, self._reach)

    # --- ranks -------------------------------------------------------------------------------------------------------

    def ready(self, worker: Worker) -> None:
        """A worker has started and waits for the others."""
        if not worker.is_alive:
            return
        worker.is_ready = True
        self.update()

    def update(self) -> None:
        """Something about a rank, or about the network between them, may have changed."""
        self._settle()
        ranks = self.workers.values()
        together = len(self.workers) == self.size and all(w.runs for w in ranks)
        if self.formed_at is None and together and self._is_connected([w.node for w in ranks]):
            self._form()
        flows = self.formed_at is not None and together and not self.finishing
        flows = flows and self._is_connected([w.node for w in ranks])
        if flows != self.flows:
            self.flows = flows
            self._since = self._agenda.now
            self._observe(self._all())
        self._plan()
        if self.finishing:
            for worker in ranks:
                self._finish_later(worker)

    def _all(self) -> tuple[Worker, ...]:
        return tuple(worker for _, worker in sorted(self.workers.items()))

    def _form(self) -> None:
        self.formed_at = self._agenda.now
        self.first = self.done = min(self._saves.step, self.script.steps)
        self._partial = -self._extra
        if self.first >= self.script.steps:
            self.finishing = True

    def lost(self, worker: Worker, *, heard: bool) -> None:
        """A worker has ended. `heard`: its sockets were closed, so the others notice."""
        self.update()
        if not heard or self.formed_at is None or self.finishing:
            return
        for other in self.workers.values():
            if other is not worker and other.is_alive:
                self._agenda.after(self._rng.uniform(*PEER_NOTICES), lambda other=other: self._notice(other))  # type: ignore[misc]

    def _notice(self, worker: Worker) -> None:
        if worker.runs:
            self._end(worker, 1, LOST_PEER)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Count the steps up to now."""
        now = self._agenda.now
        if self.flows:
            self._partial += now - self._since
            steps = max(0, math.floor(self._partial / self.script.step_seconds + 1e-6))
            self.done += steps
            self._partial -= steps * self.script.step_seconds
        self._since = now

    def _plan(self) -> None:
        if not self.flows:
            self._alarm.set(None)
            return
        step = self._next_mark()
        self._alarm.set(self._since + (step - self.done) * self.script.step_seconds - self._partial)

    def _next_mark(self) -> int:
        """The next step at which anything happens but the step."""
        script, done = self.script, self.done
        marks = [script.steps, (done // script.save_every + 1) * script.save_every]
        if done - self.first < STEPS_WATCHED:
            marks.append(done + 1)
        marks.extend(mark for mark in (script.fails_at, self.stop_after, *self.watched) if mark is not None)
        return min((mark for mark in marks if mark > done), default=done + 1)

    watched: tuple[int, ...] = ()
    """Further steps at which the agents are to look."""

    def _reach(self) -> None:
        """A mark has been reached."""
        self._settle()
        script = self.script
        last = script.steps if self.stop_after is None else min(self.stop_after, script.steps)
        if self.done % script.save_every == 0 or self.done >= last:
            self._saves.step = max(self._saves.step, self.done)
            self.saved, self.saved_step = self.saved + 1, self.done
        if script.fails_at == self.done:
            self._fail()
            return
        if self.done >= last:
            self.finishing = True
            self.flows = False
        looked_at = self.done - self.first <= STEPS_WATCHED or self.finishing or self.done in self.watched
        self._observe(self._all() if looked_at or script.all_save else (self.workers[Rank(0)],))
        self.update()

    def _fail(self) -> None:
        worker = self.workers[Rank(0)]
        error = WorkerError(type="ValueError", message="bad sample", where="train.py:27", traceback="Traceback …")
        self._end(worker, 1, error)

    def _finish_later(self, worker: Worker) -> None:
        if worker.runs:
            tail = 2.0 if worker.rank == 0 else 0.3  # rank 0 still saves
            self._agenda.after(self._rng.uniform(0.0, tail), lambda: self._finish(worker))

    def _finish(self, worker: Worker) -> None:
        if worker.runs:
            self._end(worker, 0, None)

    # --- the heartbeat page ------------------------------------------------------------------------------------------

    def read(self, worker: Worker) -> SlotReading:
        """The slot of `worker` now."""
        self._settle()
        script, formed = self.script, self.formed_at
        life = self.done - self.first
        if formed is None:
            phase, phase_at = LoopPhase.START_UP, 0.0
        elif life == 0:
            phase, phase_at = (LoopPhase.FIRST_STEP if script.tells else LoopPhase.START_UP), formed
        elif self.finishing:
            phase, phase_at = LoopPhase.DONE if script.tells else LoopPhase.TRAINING, formed
        else:
            phase, phase_at = LoopPhase.TRAINING, formed
        saves = self.saved if script.tells and (script.all_save or worker.rank == 0) else 0
        return SlotReading(
            pid=worker.pid,
            generation=self.number,
            step=NO_STEP if life == 0 else self.done if script.tells else life,
            step_at=self._since - max(0.0, self._partial),
            phase=phase,
            phase_at=phase_at,
            tells=script.tells and formed is not None,
            first_step=self.first + 1 if script.tells and formed is not None else NO_STEP,
            saves=saves,
            saves_step=self.saved_step if saves else NO_STEP,
            beats=0,
        )


def pids() -> Callable[[], int]:
    """A source of process ids."""
    numbers = count(1001)
    return lambda: next(numbers)
