"""Trains a small model with dropout and checkpoints: `keep.py STEPS [STORE]`; prints `step loss` lines.

Environment: KILL_AT=step kills rank KILL_RANK hard in that step, in its first life; KILL_SERVER_AT=step the memory
server; EVERY, REPLICAS, XOR: the policy; DEVICE: cpu or cuda; PAUSE: seconds per step; ALWAYS: wait for every commit.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import perdure

steps, store = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
torch.manual_seed(1)
device = os.environ.get("DEVICE", "cpu")
model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.2), nn.Linear(128, 8))
model.to(device)
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
torch.manual_seed(100 + rank)


class Data:
    """A stream of numbers that knows where it is."""

    def __init__(self) -> None:
        self.at = rank

    def __iter__(self) -> "Data":
        return self

    def __next__(self) -> int:
        self.at += world
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


data = Data()
run = perdure.current_run()
policy = perdure.CheckpointPolicy(
    every=int(os.environ.get("EVERY", "1")),
    store_every=5 if store else None,
    replicas=int(os.environ.get("REPLICAS", "0")),
    xor=int(os.environ.get("XOR", "0")),
)
checkpoint = run.checkpoint(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, store=store, policy=policy
)
start = checkpoint.restore()
source = dict(checkpoint.restored.sources) if checkpoint.restored else {}
print(f"start {start} {' '.join(source)}", flush=True)
for step in run.steps(start=start, stop=steps):
    x = torch.full((4, 64), float(next(data) % 13)) + torch.rand(4, 64)
    loss = model(x.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"{step} {loss.item()!r}", flush=True)
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if run.restarts == 0 and step == int(os.environ.get("KILL_AT", "-1")):
        if rank == int(os.environ.get("KILL_RANK", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        continue  # the others wait for the dead one in the next step, before they have saved
    if step == int(os.environ.get("KILL_SERVER_AT", "-1")):
        lock = Path(checkpoint._place.socket).with_name("lock")
        server = json.loads(lock.read_bytes())["server"]["pid"]
        descriptor = os.pidfd_open(server)
        os.kill(server, signal.SIGKILL)
        select.select([descriptor], [], [])
    saved = checkpoint.save_if_due(step)
    until = time.monotonic() + 30
    while saved and os.environ.get("ALWAYS") and checkpoint.committed < step and time.monotonic() < until:
        time.sleep(0.002)  # the steps take no time here, and the test wants to know what is in memory
print(f"saved {checkpoint.saved} skipped {checkpoint.skipped} durable {checkpoint.close()}", flush=True)
