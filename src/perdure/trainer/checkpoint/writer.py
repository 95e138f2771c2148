"""`torch.distributed.checkpoint.save` and `async_save` into the memory tier: one copy into a slot, nothing else.

The names in the slot are DCP's own, so that `TierReader`, and `dcp.load` from what was drained, find them.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from perdure.errors import ConfigError

_STEP = re.compile(r"(\d+)\D*\Z")


class Saver(Protocol):
    """What is used of `tier.Checkpoint`."""

    def save(self, step: int) -> bool:
        """Whether a slot was free."""


class Held:
    """One entry of the state that DCP was given, as an object with a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class TierWriter(StorageWriter):
    """For `dcp.save(state, checkpoint_id=step, storage_writer=TierWriter(run.checkpoint, store=…))`.

    Every rank saves all that it has, replicas too: DCP's division among ranks is not used, for a node that is lost must
    not take the only copy with it. Where no slot is free the step is skipped, as `saved` tells; nothing waits.
    Entries of the state called `data`, `loader`, `sampler` … are taken for a rank's own, and not read back by DCP.
    """

    def __init__(self, opener: Callable[..., Saver], **options: Any) -> None:
        """`opener`: `run.checkpoint`, called at the first save with the entries of the state and `options`."""
        self._open = opener
        self._options = options
        self._held: dict[str, Held] = {}
        self._step: int | None = None
        self.checkpoint: Saver | None = None
        self.saved = False
        """Whether the last save found a slot."""

    # DCP calls these in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """The step is the last number in `checkpoint_id`. Raises ConfigError where there is none."""
        found = _STEP.search(str(checkpoint_id))
        if checkpoint_id is None or found is None:
            raise ConfigError(
                f"dcp.save(checkpoint_id={checkpoint_id!r}): give the step, as in checkpoint_id=f'{{step}}'"
            )
        self._step = int(found[1])

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
        if self.checkpoint is not None and set(state) != set(self._held):
            raise ConfigError(f"the state has the entries {sorted(state)}, it had {sorted(self._held)} before")
        for name, value in state.items():
            self._held.setdefault(name, Held()).value = value
        if self.checkpoint is None:
            self.checkpoint = self._open(**self._options, **self._held)
        return self.checkpoint


def _nested(planner: DefaultSavePlanner) -> dict[str, Any]:
    """The state as it was given: the planner has it flat, with the path of each leaf."""
    if not planner.flatten_state_dict:
        return dict(planner.state_dict)
    nested: dict[str, Any] = unflatten_state_dict(planner.state_dict, planner.mappings)
    return nested
