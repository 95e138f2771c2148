"""What a training script may say to Perdure: which step it is at, what it is doing, what to keep.

The same script runs unchanged under plain `python` and `torchrun`: there the words go nowhere, and checkpoints have
servers of their own. Restart in process is not here yet.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from perdure.errors import ConfigError
from perdure.trainer.heartbeat import Heartbeat, current
from perdure.wire.layouts import NEVER_STOP, LoopPhase

TYPE_CHECKING = False  # the names below bring torch and msgspec
if TYPE_CHECKING:
    from typing import Any

    from perdure.trainer.checkpoint.positions import Merge
    from perdure.trainer.checkpoint.tier import Checkpoint
    from perdure.wire.memory import Policy

T = TypeVar("T")

_PHASES = {"checkpoint": LoopPhase.CHECKPOINT, "evaluation": LoopPhase.EVALUATION}


class Run:
    """This rank's part of the job. Got by `perdure.current_run()`, or given by `perdure.train`."""

    def __init__(self, heartbeat: Heartbeat, environ: Mapping[str, str]) -> None:
        self._heartbeat = heartbeat
        self._stopping = False
        self.rank = int(environ.get("RANK", "0"))
        self.world_size = int(environ.get("WORLD_SIZE", "1"))
        self.restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        """How often the workers have been started anew."""

    @property
    def generation(self) -> int:
        """1, 2, 3 … of the job's agreements on who is which rank; 0 outside Perdure."""
        return self._heartbeat.generation

    @property
    def stopping(self) -> bool:
        """`steps` ended early, because the job is to save and end."""
        return self._stopping

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """The steps to do: `start` (0, or where the script resumes) up to, not including, `stop` (None: no end).

        A step is finished when the next one is asked for. Ends early, on every rank after the same step, when the job
        is to save and end; `stopping` is True then. Raises ConfigError for a negative start.
        """
        if start < 0:
            raise ConfigError(f"run.steps(start={start}): the first step to do cannot be negative")
        heartbeat = self._heartbeat
        heartbeat.tell_from(start)
        step = start
        is_finalizing = sys.is_finalizing  # at Python's end the module's own names are gone before this generator is
        try:
            while stop is None or step < stop:
                if heartbeat.stop_after != NEVER_STOP and step > heartbeat.stop_after:
                    self._stopping = True
                    break
                yield step
                heartbeat.step_done(step)
                step += 1
        finally:
            if not is_finalizing():
                heartbeat.set_phase(LoopPhase.DONE)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that what is in the `with` block is no step: "checkpoint", "evaluation", or a name of your own.

        Each kind has its own limit before silence counts as a stall. May be nested. A checkpoint that ends without an
        exception is also noted as a good moment to change the number of nodes.
        """
        heartbeat = self._heartbeat
        before = heartbeat.phase
        phase = _PHASES.get(name, LoopPhase.OTHER)
        heartbeat.set_phase(phase)
        try:
            yield
            if phase is LoopPhase.CHECKPOINT:
                heartbeat.saved()
        finally:
            heartbeat.set_phase(before)

    def checkpoint(
        self,
        *,
        store: str | os.PathLike[str] = "",
        policy: "Policy | None" = None,
        fresh: bool = False,
        overlap: bool = False,
        merge: "Merge | None" = None,
        check: "Callable[[int], str | None] | None" = None,
        **objects: "Any",
    ) -> "Checkpoint":
        """Checkpoints of `objects`: modules, optimizers, schedulers, data loaders, all with `state_dict`.

        One object, or a list or dictionary of them, under each keyword (`model=`, `optimizer=`, `data=` …). `store`:
        a folder or an fsspec address for what is to survive everything. `fresh`: never restore. `overlap`: copies from
        a GPU go on behind the next step; only for states that nothing but the optimizers' steps changes. `merge`: how
        positions of data loaders are put together when the number of ranks has changed. `check`: called with each of
        the first `CheckpointPolicy.check_steps` steps after a restore; a sentence from it says that what was restored
        is bad ("the loss is nan"): it is set aside, this process ends by BadCheckpointError, and the job's next life
        restores an older one. Nothing is saved before these steps are done.

        Call it on every rank, when the model is in its final form. Raises ConfigError, HostError, WireError.
        """
        if not objects:
            raise ConfigError("run.checkpoint() was given nothing to keep; give model=…, optimizer=…, data=…")
        from perdure.trainer.checkpoint.here import place_of
        from perdure.trainer.checkpoint.tier import Checkpoint

        address = os.fspath(store)
        if address and "://" not in address and "::" not in address:
            address = os.path.abspath(os.path.expanduser(address))
        if address:
            from perdure.store.address import open_medium

            open_medium(address)  # an address that can never be is told here, not by silence later
        if policy is not None:
            _check_policy(policy)
        place = place_of(self.rank, self.world_size, address, os.environ)
        return Checkpoint(
            objects,
            place,
            self._heartbeat,
            store=address,
            policy=policy,
            fresh=fresh,
            overlap=overlap,
            merge=merge,
            check=check,
        )


def _check_policy(policy: "Policy") -> None:
    """Raises ConfigError for what can never be kept."""
    least = {
        "every": 1,
        "store_every": 1,
        "replicas": 0,
        "xor": 0,
        "keep": 1,
        "slots": 0,
        "check_steps": 1,
        "discards": 0,
    }
    for name, value in ((name, getattr(policy, name)) for name in least):
        if value is not None and value < least[name]:
            raise ConfigError(f"CheckpointPolicy({name}={value}): it must be at least {least[name]}")
    if policy.xor and policy.replicas:
        raise ConfigError("CheckpointPolicy: replicas and xor protect from the same loss; give one of the two")
    if not 0 < policy.overhead < 1:
        raise ConfigError(f"CheckpointPolicy(overhead={policy.overhead}): a share of the time, between 0 and 1")


_run: Run | None = None


def current_run() -> Run:
    """This process's Run, always the same one."""
    global _run
    if _run is None:
        _run = Run(current, os.environ)
    return _run


def train(function: Callable[[Run], T]) -> T:
    """Call `function` with this process's Run and give what it returns."""
    return function(current_run())
