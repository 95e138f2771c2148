"""Loads a DCP folder with torch alone, in one process or several, and compares it with whole tensors bit by bit."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main() -> None:
    folder, expected, world = sys.argv[1], torch.load(sys.argv[2]), int(sys.argv[3])
    mesh = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=int(sys.argv[5]), world_size=world)
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    state: dict[str, dict[str, object]] = {"model": {}, "optimizer": {"state": {"embed.weight": {}}}}
    flat = {}
    for name, tensor in expected["tensors"].items():
        empty = torch.zeros_like(tensor)
        if mesh is not None and tensor.dim() == 2:
            empty = distribute_tensor(empty, mesh, [Shard(0)])
        flat[name] = empty
        first, _, rest = name.partition(".")
        if first == "model":
            state["model"][rest] = empty
        else:
            state["optimizer"]["state"]["embed.weight"][rest.rpartition(".")[2]] = empty
    state["optimizer"]["param_groups"] = [{"lr": 0.0, "betas": None, "params": ["embed.weight"]}]
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in expected["tensors"].items():
        got = flat[name].full_tensor() if isinstance(flat[name], DTensor) else flat[name]
        assert got.dtype == tensor.dtype, name
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert state["optimizer"]["param_groups"][0] == expected["group"], state["optimizer"]["param_groups"]
    assert not [name for name in sys.modules if name.startswith("perdure")]
    if world > 1:
        dist.destroy_process_group()


main()
