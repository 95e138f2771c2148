"""Ours, as a script uses it. Nothing about measuring.

The one thing that a script does not do: it asks whether a save is complete. In memory `committed` says so; in storage
it is a folder of its final name.
"""

import os
from pathlib import Path

import perdure
from checkpoint_methods import Method


class InMemory(Method):
    """Complete when it is sealed, and with more than one rank (each on a node of its own) replicated."""

    def _folder(self) -> Path | None:
        return None

    def version(self) -> str:
        return perdure.__version__

    def open(self) -> None:
        store = self._folder()
        replicas = 1 if store is None and self.place.world > 1 else 0
        policy = perdure.CheckpointPolicy(every=1, store_every=1 if store else None, replicas=replicas, keep=2)
        self._checkpoint = perdure.current_run().checkpoint(
            model=self.state.model,
            optimizer=self.state.optimizer,
            store=store or "",
            policy=policy,
        )

    def save(self, step: int) -> None:
        self._step = step
        if not self._checkpoint.save(step):
            raise RuntimeError(f"step {step} was skipped: there was no free slot")

    def is_complete(self) -> bool:
        return self._checkpoint.committed >= self._step

    def restore(self, step: int) -> None:
        following = self._checkpoint.restore()
        if following != step + 1:
            raise RuntimeError(f"restore() gave step {following - 1}, not {step}")

    def close(self) -> None:
        self._checkpoint.close()


class InStorage(InMemory):
    """Complete when it is in storage under its final name: everything in it is fsynced by then."""

    def _folder(self) -> Path:
        return self.place.folder / "store"

    def is_complete(self) -> bool:
        try:
            names = os.listdir(self._folder())
        except FileNotFoundError:
            return False
        start = f"step-{self._step:010d}."
        return any(name.startswith(start) and not name.endswith(".tmp") for name in names)
