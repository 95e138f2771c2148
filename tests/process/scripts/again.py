"""Restores more than once in one process: `again.py`; prints what restore() gives each time, and if it is right."""

import time

import torch
from torch import nn

import perdure

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = perdure.current_run()
checkpoint = run.checkpoint(model=model, optimizer=optimizer, policy=perdure.CheckpointPolicy(every=1000, slots=3))
print("first", checkpoint.restore())
weights: dict[int, torch.Tensor] = {}


def train(step: int, *, save: bool = False) -> None:
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save_if_due(step)
    if save:
        assert checkpoint.save(step)
        weights[step] = model.weight.detach().clone()


def is_back_at(step: int) -> bool:
    return torch.equal(model.weight, weights[step])


for step in range(9):
    train(step, save=step == 4)
until = time.monotonic() + 20
while checkpoint.committed < 4 and time.monotonic() < until:
    time.sleep(0.005)
train(9, save=True)
train(10)
print("second", checkpoint.restore(), is_back_at(9), checkpoint.committed)
train(10)
train(11, save=True)
print("third", checkpoint.restore(), is_back_at(11), checkpoint.restored)
checkpoint.discard("the loss is nan")
assert not checkpoint.save(12), "what came of a bad checkpoint was saved"
print("fourth", checkpoint.restore(), is_back_at(9), checkpoint.restored)
checkpoint.close()
