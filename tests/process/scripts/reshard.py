"""One rank of a real FSDP2 model on gloo: trains, writes its slot, reads slots of another world, says what it has.

argv: rendezvous file, folder to read slots from ("" to begin anew), their world size, folder to write to, more steps.
Prints one line of JSON: digests of all whole tensors after loading (or training), and after the further steps.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure.trainer.checkpoint.reader import load
from tests.unit.trainer.tier_slots import a_plan, write_slot

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def a_model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.LayerNorm(13), torch.nn.Linear(13, 3, bias=False)
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        data = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + RANK))
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        optimizer.step()


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return flatten_state_dict({"model": model_state, "optimizer": optimizer_state})


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def digests(state: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in sorted(tensors(state).items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()[:16]
    return found


def main(rendezvous: str, source: str, writers: int, target: str, more: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=RANK, world_size=WORLD)
    model, optimizer = a_model(seed=1 if not source else 99)
    if source:
        state, paths = flat(model, optimizer)
        values = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        plan = a_plan(writers, here={rank: Path(source) / f"{rank}.slot" for rank in range(writers)})
        loaded = load(plan, None, tensors(state), rank=RANK, world_size=WORLD, values=values)
        nested = unflatten_state_dict({**tensors(state), **loaded.shared}, paths)
        set_state_dict(model, optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optimizer"])
    else:
        train(model, optimizer, 0, 3)
    state, _ = flat(model, optimizer)
    values = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    if target:
        write_slot(Path(target) / f"{RANK}.slot", tensors(state), RANK, WORLD, shared=values)
    before = digests(state)
    train(model, optimizer, 3, more)
    print(json.dumps({"loaded": before, "later": digests(flat(model, optimizer)[0])}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
