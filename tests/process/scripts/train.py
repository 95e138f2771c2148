"""All-reduces on gloo, step by step, telling its steps; saves a plain file; stops at --steps, or runs until told.

A script as a user writes it, with the faults that a test asks for built in (--fail-…).
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--pause", type=float, default=0.005)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--untold", action="store_true", help="no run.steps: nothing is told")
parser.add_argument("--raise-at", type=int, default=-1, help="rank 1 raises at this step, in every life")
parser.add_argument("--raise-once-at", type=int, default=-1, help="rank 1 raises at this step, in the first life only")
parser.add_argument(
    "--hang-at", type=int, default=-1, help="rank 1 sleeps for ever at this step, in the first life only"
)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
args.out.mkdir(parents=True, exist_ok=True)
saved = args.out / "saved.json"
weight = torch.zeros(4)
start = 0
if saved.exists():
    state = json.loads(saved.read_text())
    start, weight = state["step"] + 1, torch.tensor(state["weight"])
trace = (args.out / f"rank-{rank}.jsonl").open("a", buffering=1)


def note(**what: object) -> None:
    trace.write(json.dumps({"life": life, "pid": os.getpid(), "world": world, "time": time.time(), **what}) + "\n")


def misbehave(step: int) -> None:
    if rank != 1 % world:
        return
    if step == args.raise_at or (step == args.raise_once_at and life == 0):
        raise ValueError(f"a bad sample at step {step}")
    if step == args.hang_at and life == 0:
        while True:
            time.sleep(3600)


def train_step(step: int) -> None:
    misbehave(step)
    gradient = torch.full((4,), float(step))
    dist.all_reduce(gradient)
    weight.add_(gradient / world)
    note(step=step, weight=weight[0].item())
    time.sleep(args.pause)


def save(step: int) -> None:
    if rank == 0:
        temporary = saved.with_suffix(".new")
        temporary.write_text(json.dumps({"step": step, "weight": weight.tolist()}))
        os.replace(temporary, saved)


note(start=start)
run = perdure.current_run()
steps = range(start, args.steps) if args.untold else run.steps(start=start, stop=args.steps)
for step in steps:
    train_step(step)
    if step % args.save_every == args.save_every - 1:
        if args.untold:
            save(step)
        else:
            with run.phase("checkpoint"):
                save(step)
save(step)
note(end=step, stopping=run.stopping)
dist.destroy_process_group()
sys.exit(0)
