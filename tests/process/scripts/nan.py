"""Saves every step, and finds in its second life that what it has restored is bad: `nan.py STEPS`."""

import sys
import time

import torch
from torch import nn

import perdure

torch.set_num_threads(1)
model = nn.Linear(8, 8)
run = perdure.current_run()


def check(step: int) -> str | None:
    return f"the loss of step {step} is nan" if run.restarts == 1 and run.rank == 0 else None


policy = perdure.CheckpointPolicy(every=1, slots=3, check_steps=2)
checkpoint = run.checkpoint(model=model, policy=policy, check=check)
for step in run.steps(start=checkpoint.restore(), stop=int(sys.argv[1])):
    try:
        saved = checkpoint.save_if_due(step)
    except perdure.BadCheckpointError as bad:
        sys.exit(str(bad))
    until = time.monotonic() + 30
    while saved and checkpoint.committed < step and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.1)
checkpoint.close()
