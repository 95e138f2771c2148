"""One rank on a CUDA device: `cuda.py CASE`. Saves, spoils everything at once, restores, compares; says what held."""

import sys
import time

import torch
from torch import nn

import perdure

case = sys.argv[1]
overlap = case == "overlap"
torch.manual_seed(3)
width = 2048
model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)).cuda()
model.register_buffer("across", torch.randn(256, 512, device="cuda").t(), persistent=True)  # not contiguous
model.register_buffer("brief", torch.randn(1000, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train_step() -> None:
    loss = model(torch.randn(64, width, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def everything() -> dict[str, torch.Tensor]:
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, each in optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{number}.{name}": value for name, value in each.items()})
    return {name: tensor.detach().clone() for name, tensor in state.items()}


train_step()
checkpoint = perdure.current_run().checkpoint(
    model=model, optimizer=optimizer, overlap=overlap, policy=perdure.CheckpointPolicy(every=1)
)
assert all(slot.is_pinned for slot in checkpoint._seat.slots), "the first save would have to register the slots"
for step in range(4):
    train_step()
    torch.cuda.synchronize()
    kept = everything()
    torch.cuda.synchronize()
    assert checkpoint.save(step), "no slot was free"
    train_step()  # nothing waits for the copy but the optimizer's step
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)
    if not overlap:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    until = time.monotonic() + 60
    while checkpoint.committed < step and time.monotonic() < until:
        time.sleep(0.005)
    assert checkpoint.committed == step, "the save was not committed"
    assert checkpoint.restore() == step + 1
    torch.cuda.synchronize()
    now = everything()
    wrong = [name for name, tensor in kept.items() if not torch.equal(now[name], tensor)]
    assert not wrong, f"step {step}: {wrong} are not as they were when save() was called"
print("stall", checkpoint.stall)
checkpoint.close()
print("held", case)
