"""The state that is saved, what every way to save it must be able to do, and their names. Nothing about measuring."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

LAYERS = 48
TENSORS_EACH = 3  # a parameter and Adam's two moments

METHODS = {
    "nothing": "checkpoint_methods:Nothing",
    "perdure memory": "checkpoint_ours:InMemory",
    "perdure storage": "checkpoint_ours:InStorage",
    "torch.save + fsync": "checkpoint_peers:TorchSave",
    "DCP save": "checkpoint_peers:DcpSave",
    "DCP async, thread": "checkpoint_peers:DcpThread",
    "DCP async, process": "checkpoint_peers:DcpProcess",
    "dlrover memory": "checkpoint_peers:DlroverMemory",
    "dlrover storage": "checkpoint_peers:DlroverStorage",
    "nvrx local": "checkpoint_peers:NvrxLocal",
    "nvrx local, stubbed": "checkpoint_peers:NvrxLocalStubbed",
    "lm-resiliency memory": "checkpoint_peers:LmResiliency",
}


def method_named(name: str) -> "type[Method]":
    """The class of that name; raises ImportError where the peer is not installed."""
    module, _, attribute = METHODS[name].partition(":")
    kind: type[Method] = getattr(importlib.import_module(module), attribute)
    kind.require()
    return kind


@dataclass(frozen=True)
class Place:
    """Where a rank is, and the folder of the trial (on storage)."""

    rank: int
    world: int
    folder: Path

    @classmethod
    def from_environment(cls, folder: Path) -> "Place":
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder)


class State:
    """A model and its Adam, `nbytes` in all, of which no other rank has anything: as with pipeline parallelism.

    Every tensor has one value in all its elements, told from its number and the step.
    """

    def __init__(self, rank: int, nbytes: int) -> None:
        columns = 1024
        rows = nbytes // (TENSORS_EACH * LAYERS * columns * 4)
        layer = torch.nn.ParameterDict()
        for number in range(LAYERS):
            layer[f"layer{number:02d}"] = torch.nn.Parameter(torch.zeros(rows, columns))
            layer[f"norm{number:02d}"] = torch.nn.Parameter(torch.zeros(columns))
        self.model = torch.nn.ModuleDict({f"stage{rank}": layer})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Names and live tensors, as a script would collect them for a library that wants one flat dict."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def set(self, step: int, more: float = 0.0) -> None:
        for number, tensor in enumerate(self.tensors().values()):
            tensor.fill_(number + step + more)

    def wipe(self) -> None:
        for tensor in self.tensors().values():
            tensor.fill_(-1.0)

    def is_of(self, step: int) -> bool:
        return all(bool((tensor == number + step).all()) for number, tensor in enumerate(self.tensors().values()))

    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Copy `values` into the live tensors."""
        for name, tensor in self.tensors().items():
            tensor.copy_(values[name])


class Method:
    """One way to save. `save` returns when training may go on; `is_complete` is polled after it, between steps."""

    saves = True
    in_background = True
    """Whether anything is left to do when `save` returns."""

    def __init__(self, place: Place, state: State) -> None:
        self.place, self.state = place, state

    @classmethod
    def require(cls) -> None:
        """Raise ImportError where it is not installed."""

    def version(self) -> str:
        return str(torch.__version__)

    def open(self) -> None:
        """What is done once, before the first step."""

    def save(self, step: int) -> None:
        raise NotImplementedError

    def is_complete(self) -> bool:
        """As safe as the method makes it: copied, replicated, or on the disk."""
        return True

    def restore(self, step: int) -> None:
        """All values of `step` are in the live tensors again."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Remove an old checkpoint, where the method does not do that by itself."""

    def close(self) -> None:
        pass


class Nothing(Method):
    """Saves nothing, for a while: what it shows as drag is what the machine does."""

    saves = False

    def save(self, step: int) -> None:
        self._polls = 0

    def is_complete(self) -> bool:
        self._polls += 1
        return self._polls > 20
