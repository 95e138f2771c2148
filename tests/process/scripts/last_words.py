"""Trains with checkpoints that never go to storage by themselves, and never calls close(): `last_words.py STEPS STORE`.

Environment: FAIL_AT=step raises in that step, HANG_AT=step waits there for ever in a collective; BREAK_STORE_AT=step
puts a file where the store was; REPLICAS; PAUSE: seconds per step; ALWAYS: wait for every commit.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import perdure

steps, store = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
model = torch.nn.Linear(64, 64)
if world > 1:
    dist.init_process_group("gloo")


def is_at(what: str, step: int) -> bool:
    return step == int(os.environ.get(what, "-1"))


run = perdure.current_run()
policy = perdure.CheckpointPolicy(
    every=1, store_every=1000000 if store else None, replicas=int(os.environ.get("REPLICAS", "0"))
)
checkpoint = run.checkpoint(model=model, store=store, policy=policy)
start = checkpoint.restore()
print(f"start {start}", flush=True)
for step in run.steps(start=start, stop=steps):
    with torch.no_grad():
        model.weight += 1.0
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if is_at("FAIL_AT", step):
        raise ValueError("the script is wrong")
    if is_at("HANG_AT", step):
        print("hangs", flush=True)
        if rank:
            signal.pause()
        dist.barrier()
    if is_at("BREAK_STORE_AT", step) and rank == 0:
        shutil.rmtree(store, ignore_errors=True)
        Path(store).write_text("no folder")
    saved = checkpoint.save_if_due(step)
    until = time.monotonic() + 30
    while saved and os.environ.get("ALWAYS") and checkpoint.committed < step and time.monotonic() < until:
        time.sleep(0.002)
print("done", flush=True)
