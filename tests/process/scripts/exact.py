"""Trains what can be checked to the last bit: parameters and momentum are a plain function of the step.

`exact.py FOLDER STORE`; ends when FOLDER/stop exists. Every rank appends to FOLDER/told.txt, a line each:
`restored GENERATION RANK START DIGEST` and `committed GENERATION RANK STEP`. It fails where what was restored is not
exact. FOLDER/step has the step that is done last, as text of ten places.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import perdure

folder, store = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
told = os.open(folder / "told.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
at = os.open(folder / "step", os.O_WRONLY | os.O_CREAT, 0o600)
run = perdure.current_run()


def tell(*words: object) -> None:
    os.write(told, (" ".join(map(str, words)) + "\n").encode())


class Model(nn.Module):
    """One tensor of which each rank has a part, and one that all have."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(1021, dtype=torch.float64)
        self.shared = nn.Parameter(distribute_tensor(rows, mesh, [Shard(0)]))
        self.whole = nn.Parameter(torch.arange(300, dtype=torch.float64))


def moved(steps: int) -> tuple[float, float]:
    """(what has been taken from every parameter, the momentum) after so many steps."""
    total = momentum = 0.0
    for step in range(steps):
        momentum += step % 7  # whole numbers: no order of additions rounds
        total += momentum
    return total, momentum


def plain(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0, foreach=False)
policy = perdure.CheckpointPolicy(every=1, store_every=int(os.environ.get("STORE_EVERY", "8")), replicas=1, keep=2)
checkpoint = run.checkpoint(model=model, optimizer=optimizer, store=store, policy=policy)
start = checkpoint.restore()
total, momentum = moved(start)
digest = hashlib.sha256()
for parameter in model.parameters():
    value = plain(parameter)
    assert torch.equal(value, torch.arange(len(value), dtype=torch.float64) - total), f"step {start} is not exact"
    digest.update(value.numpy().tobytes())
    if start:
        kept = plain(optimizer.state[parameter]["momentum_buffer"])
        assert torch.equal(kept, torch.full_like(kept, momentum)), f"the momentum of step {start} is not exact"
        digest.update(kept.numpy().tobytes())
generation = run.generation
tell("restored", generation, rank, start, digest.hexdigest()[:16])
seen, step = -1, start
for step in run.steps(start=start, stop=1_000_000_000):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(step % 7))
    optimizer.step()
    ends = torch.tensor([(folder / "stop").exists()], dtype=torch.int64)
    dist.all_reduce(ends)
    os.pwrite(at, b"%10d" % step, 0)
    checkpoint.save_if_due(step)
    if checkpoint.committed > seen:
        seen = checkpoint.committed
        tell("committed", generation, rank, seen)
    if ends.item():
        break
    time.sleep(0.02)
checkpoint.close()
