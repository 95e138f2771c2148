"""Copies from CUDA devices into a slot: on a side stream, into memory that the driver knows; and hidden, if wished.

Knows streams and events; does not know slots' states. Nothing here is reached without CUDA tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch

from perdure.trainer.checkpoint.copy import PIECE, SlotMap
from perdure.vocab.checkpoint import TensorPart

Rest = Sequence[tuple[TensorPart, Any]]


def split(rest: Rest) -> tuple[list[tuple[TensorPart, Any]], list[tuple[TensorPart, Any]]]:
    """(what is on the host, what is on a CUDA device)."""
    host = [(part, tensor) for part, tensor in rest if tensor.device.type != "cuda"]
    device = [(part, tensor) for part, tensor in rest if tensor.device.type == "cuda"]
    return host, device


class DeviceCopy:
    """Copies that are under way. `wait` returns when the bytes are in the slot."""

    def __init__(self, slot: SlotMap, rest: Rest, stream: Any) -> None:
        """Enqueue everything; the values are those after all that the current stream has been given so far."""
        slot.pin()
        stream.wait_stream(torch.cuda.current_stream())
        self._kept = []  # their memory must not be given to others before it has been read
        with torch.no_grad(), torch.cuda.stream(stream):
            for part, tensor in rest:
                source = tensor.resolve_conj().resolve_neg().contiguous()
                self._kept.append(source)
                to, start = slot.view(part).reshape(-1), source.reshape(-1)
                step = max(1, PIECE // max(1, source.element_size()))
                for at in range(0, start.numel(), step):
                    to[at : at + step].copy_(start[at : at + step], non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def wait(self) -> None:
        """Releases the GIL meanwhile."""
        self.event.synchronize()
        self._kept.clear()


class StepGate:
    """Lets optimizers' steps wait, on the device, for a copy: so it may go on behind forward and backward."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._under_way: DeviceCopy | None = None
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def hold(self, copy: DeviceCopy | None) -> None:
        """No optimizer's step begins before this copy has ended."""
        self._under_way = copy

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        copy, self._under_way = self._under_way, None
        if copy is not None:
            torch.cuda.current_stream().wait_event(copy.event)


def new_stream() -> Any:
    """One per process; None without CUDA."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None
