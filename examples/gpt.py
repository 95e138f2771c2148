"""A small byte-level GPT, trained on the source text of Python's standard library.

Plain PyTorch and DDP, and Perdure's checkpoints: it knows nothing of nodes, launchers or faults. The same file runs
under

    perdure run --nproc-per-node 2 examples/gpt.py
    torchrun --standalone --nproc-per-node 2 examples/gpt.py
    python examples/gpt.py

and goes on from its newest checkpoint whenever it is started again: from memory after a fault, from the folder later.
Which bytes a rank sees at a step depends on seed, step and rank alone, so a resumed run follows the very curve of one
that was never interrupted.
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import perdure

VOCABULARY = 256  # bytes
HELD_OUT_EVERY = 10  # every tenth file is kept for validation


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; about a million parameters."""

    def __init__(self, context: int, width: int = 128, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight  # tied, as in GPT-2
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1], device=inputs.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> tuple[Tensor, Tensor]:
    """Training and validation bytes: the standard library's top-level modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::HELD_OUT_EVERY]
    training = [file for file in files if file not in set(held_out)]
    return join_bytes(training), join_bytes(held_out)


def join_bytes(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: Tensor, args: argparse.Namespace, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bytes of `rank` at `step`, and the bytes that follow each: both batch x context."""
    # The step is the whole position in the data: no reader's state has to be saved, and none can be saved wrongly.
    dice = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 65_537 + rank)
    starts = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=dice)
    windows = text[starts + torch.arange(args.context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def restore(checkpoint: perdure.Checkpoint) -> int:
    """The next step to do, 0 at first; each rank says what it has read, and where."""
    following = checkpoint.restore()
    if (found := checkpoint.restored) is not None:
        sources = " and ".join(sorted(found.sources)) or "nowhere"
        size, seconds = found.nbytes / 1e6, found.seconds
        rank = dist.get_rank()
        print(f"rank {rank} restored step {following - 1} from {sources}: {size:.1f} MB in {seconds:.3f} s", flush=True)
    return following


@torch.no_grad()
def validate(model: GPT, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over the held-out files: 4 batches for each rank, the same ones every time."""
    model.eval()
    rank = dist.get_rank()
    total = sum((model(*draw(text, args, batch, rank, device)) for batch in range(4)), torch.zeros((), device=device))
    dist.all_reduce(total)
    model.train()
    return total.item() / (4 * dist.get_world_size())


def tell(out: Path, step: int, loss: float, seconds: float, run: perdure.Run) -> None:
    """One line in the record for each step, and one on the terminal for every tenth."""
    generation = run.generation or run.restarts + 1  # under torchrun there are restarts only
    line = {"time": time.time(), "step": step, "loss": loss, "generation": generation}
    with open(out / "losses.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    if step % 10 == 0:
        print(f"step {step}  loss {loss:.2f}  {seconds * 1000:.0f} ms", flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text, held_out = read_text()
    torch.manual_seed(args.seed)
    model = GPT(args.context).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warm_up))

    run = perdure.current_run()
    checkpoint = run.checkpoint(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        store=args.out / f"checkpoints-{args.seed}",  # another seed draws other data: never go on from its state
        policy=perdure.CheckpointPolicy(every=args.save_every, replicas=args.replicas),
    )
    first = restore(checkpoint)
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"{size / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {world} ranks, from step {first}")

    done = first
    for step in run.steps(start=first, stop=args.steps):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = parallel(*draw(text, args, step, rank, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        done = step + 1
        if rank == 0:
            tell(args.out, step, mean.item(), time.perf_counter() - began, run)
        checkpoint.save_if_due(step)

    stored = checkpoint.close()  # the last step, too, and it is in the folder
    if run.stopping:  # asked to end early: that is all there is time for
        if rank == 0:
            print(f"asked to stop: step {done - 1} is {'saved' if stored else 'NOT saved'}", flush=True)
        return
    with run.phase("evaluation"):
        loss_there = validate(model, held_out, args, device)
    if rank == 0:
        print(f"done: {done} steps, loss on held-out text {loss_there:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint in memory to the next")
    parser.add_argument("--replicas", type=int, default=0, help="other nodes whose memory keeps a copy, too")
    parser.add_argument("--out", type=Path, default=Path("gpt-out"), help="folder for checkpoints and losses.jsonl")
    parser.add_argument("--batch", type=int, default=4, help="sequences for each rank and step")
    parser.add_argument("--context", type=int, default=96, help="bytes that the model sees")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--warm-up", type=int, default=20, help="steps until the full learning rate")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)  # several ranks share the cores of one machine
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)  # plain `python examples/gpt.py`
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    dist.destroy_process_group()  # not after an exception: whoever waits for a dead peer would hide the first failure


if __name__ == "__main__":
    main()
