"""Steps of a script that tells nothing: counted by torch's own hook after an optimizer's step.

Installed when torch's optimizer module has been imported, at once or later, so that a script without torch pays
nothing. Knows nothing of the agent.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from perdure.trainer.heartbeat import current

TYPE_CHECKING = False  # importing typing in every worker would cost more than all of this module
if TYPE_CHECKING:
    from typing import Any

_MODULE = "torch.optim.optimizer"


class StepCounter:
    """Counts 1, 2, 3 … for one optimizer, the first seen that still lives; others count as signs of life.

    A compiled `optimizer.step` breaks its graph at this call, as it does in torch's own wrapper (torch 2.13).
    """

    def __init__(self) -> None:
        self._count = 0
        self._counted: weakref.ref[Any] | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if current.tells:
            return
        counted = self._counted() if self._counted is not None else None
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            current.beat()
            return
        self._count += 1
        current.step_done(self._count)


class _Waiter:
    """A finder that finds nothing itself: it lets the module be loaded as always, then installs the hook."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]  # of this one instance
        return spec


def _register(module: ModuleType) -> None:
    module.register_optimizer_step_post_hook(StepCounter())


def count_optimizer_steps() -> None:
    """From now on, or from torch's import on, every optimizer step is progress unless the script tells its steps."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _register(module)
    else:
        sys.meta_path.insert(0, _Waiter())
