"""Perdure keeps large-model training running. These are its public names; each is imported when it is first used, so
that `import perdure` costs next to nothing and never imports torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # as typing.TYPE_CHECKING for type checkers; importing typing would be most of what this costs
if TYPE_CHECKING:
    from perdure.errors import BadCheckpointError, ConfigError, HostError, NoCheckpointError, PerdureError, WireError
    from perdure.trainer.checkpoint.reader import TierReader
    from perdure.trainer.checkpoint.tier import Checkpoint
    from perdure.trainer.checkpoint.writer import TierWriter
    from perdure.trainer.session import Run, current_run, train
    from perdure.wire.memory import Policy as CheckpointPolicy

__version__ = "0.1.0"

__all__ = [
    "BadCheckpointError",
    "Checkpoint",
    "CheckpointPolicy",
    "ConfigError",
    "HostError",
    "NoCheckpointError",
    "PerdureError",
    "Run",
    "TierReader",
    "TierWriter",
    "WireError",
    "__version__",
    "current_run",
    "train",
]

_HOMES = {
    "BadCheckpointError": "perdure.errors",
    "Checkpoint": "perdure.trainer.checkpoint.tier",
    "CheckpointPolicy": "perdure.wire.memory",
    "ConfigError": "perdure.errors",
    "HostError": "perdure.errors",
    "NoCheckpointError": "perdure.errors",
    "PerdureError": "perdure.errors",
    "Run": "perdure.trainer.session",
    "TierReader": "perdure.trainer.checkpoint.reader",
    "TierWriter": "perdure.trainer.checkpoint.writer",
    "WireError": "perdure.errors",
    "current_run": "perdure.trainer.session",
    "train": "perdure.trainer.session",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value: object = getattr(import_module(home), "Policy" if name == "CheckpointPolicy" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
