"""`torch.distributed.checkpoint.save` and `async_save` into the memory tier: one copy into a slot, nothing else.

The names in the slot are DCP's own, so that `TierReader`, and `dcp.load` from what was drained, find them.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.naming import step_in

if TYPE_CHECKING:
    from perdure.trainer.checkpoint.tiers import Tiers


class Saver(Protocol):
    """What is used of `tier.Checkpoint`."""

    def save(self, step: int) -> bool:
        """Whether a slot was free."""

    def tiers(self, step: int | None = None) -> "tuple[int, Tiers | None]":
        """(the next step to do, what can be read; None: nothing)"""

    def close(self) -> bool:
        """Whether the last step is in storage."""


class Held:
    """One entry of the state that DCP was given, as an object with a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class TierWriter(StorageWriter):
    """For `dcp.save(state, checkpoint_id=str(step), storage_writer=TierWriter(state, store=…))`.

    Every rank saves all that it has, replicas too: DCP's division among ranks is not used, for a node that is lost must
    not take the only copy with it. Where no slot is free the step is skipped, as `saved` tells; nothing waits.
    Entries of the state called `data`, `loader`, `sampler` … are taken for a rank's own, and not read back by DCP.
    """

    def __init__(
        self, state: Mapping[str, Any] | None = None, *, opener: Callable[..., Saver] | None = None, **options: Any
    ) -> None:
        """`state`: as it will be saved; with it slots are made now, and a `TierReader` can read; else with a save.

        `options` are those of `run.checkpoint` (`store`, `policy` …); `opener` stands for it, for another run than
        `perdure.current_run()`.
        """
        self._open = opener or _current_checkpoint
        self._options = options
        self._held: dict[str, Held] = {}
        self._step: int | None = None
        self.checkpoint: Saver | None = None
        self.saved = False
        """Whether the last save found a slot."""
        if state is not None:
            self._saver(state)

    def tiers(self, step: int | None = None) -> "tuple[int, Tiers | None]":
        """For `TierReader`. Raises ConfigError where no state was given yet."""
        if self.checkpoint is None:
            raise ConfigError(
                "nothing can be read before the state is known: give it, as in TierWriter(state, store=…)"
            )
        return self.checkpoint.tiers(step)

    def close(self) -> bool:
        """As `Checkpoint.close`: wait until the last step is in storage."""
        return self.checkpoint is not None and self.checkpoint.close()

    # DCP calls these in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """The step is the last number in `checkpoint_id`. Raises ConfigError where there is none."""
        self._step = step_in(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.saved = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        """Raises ConfigError for a planner whose state cannot be seen, and for a state that cannot be kept."""
        if not isinstance(planner, DefaultSavePlanner) or self._step is None:
            raise ConfigError("TierWriter needs DCP's default planner (or a subclass of it), and a step")
        self.saved = self._saver(_nested(planner)).save(self._step)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Sealed, replicated and committed by the memory servers."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _saver(self, state: Mapping[str, Any]) -> Saver:
        if self._held and set(state) != set(self._held):
            raise ConfigError(f"the state has the entries {sorted(state)}, it had {sorted(self._held)} before")
        for name, value in state.items():
            self._held.setdefault(name, Held()).value = value
        if self.checkpoint is None:
            self.checkpoint = self._open(**self._options, **self._held)
        return self.checkpoint


def _current_checkpoint(**options: Any) -> Saver:
    import perdure  # its public name: the session knows the checkpoint, not the other way round

    return perdure.current_run().checkpoint(**options)


def _nested(planner: DefaultSavePlanner) -> dict[str, Any]:
    """The state as it was given: the planner has it flat, with the path of each leaf."""
    if not planner.flatten_state_dict:
        return dict(planner.state_dict)
    nested: dict[str, Any] = unflatten_state_dict(planner.state_dict, planner.mappings)
    return nested
