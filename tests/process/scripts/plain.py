"""Steps without torch and without collectives, telling them; with the faults that a test asks for built in.

Every rank goes at its own pace: for tests in which what counts is who runs, not what is computed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--save-every", type=int, default=0, help="tell of a checkpoint after so many steps")
parser.add_argument("--exit-at", type=int, default=-1, help="--exit-ranks end by --exit-code at this step, each life")
parser.add_argument("--exit-ranks", default="1")
parser.add_argument("--exit-code", type=int, default=1)
parser.add_argument("--stagger", type=float, default=0.0, help="rank r ends after r times as long, in the first life")
parser.add_argument("--late-save", type=float, default=0.0, help="rank 0 saves for so long when the others have ended")
parser.add_argument("--hang-at", type=int, default=-1, help="rank 1 sleeps for ever at this step")
parser.add_argument("--hang-lives", type=int, default=1, help="in so many lives")
parser.add_argument("--slow", type=float, default=0.0, help="rank 0's first step, 1's evaluation, 2's save")
parser.add_argument("--eat", action="store_true", help="rank 1 takes memory without end from step 5 on")
parser.add_argument("--child", action="store_true", help="leave a child in a session of its own behind")
args = parser.parse_args()

run = perdure.current_run()
rank, life = run.rank, run.restarts
args.out.mkdir(parents=True, exist_ok=True)


def note(**what: object) -> None:
    with (args.out / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"life": life, "pid": os.getpid(), "world": run.world_size, **what}) + "\n")


def misbehave(step: int) -> None:
    if step == args.exit_at and str(rank) in args.exit_ranks.split(","):
        os._exit(args.exit_code)
    if args.stagger and life == 0 and step == 3:
        time.sleep(rank * args.stagger)
        os._exit(1)
    if rank == 1 and step == args.hang_at and life < args.hang_lives:
        time.sleep(3600)
    if args.eat and rank == 1 and step == 5:
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)))


def slow_phase(step: int) -> None:
    if args.slow and rank == 0 and step == 0:
        time.sleep(args.slow)
    if args.slow and rank in (1, 2) and step == 12:
        with run.phase({1: "evaluation", 2: "checkpoint"}[rank]):
            time.sleep(args.slow)


if args.child:
    # Away from our process group and session, as data loaders of some libraries are; never waited for.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    note(child=child.pid)
note(start=True)
step = -1
for step in run.steps(stop=args.steps):
    misbehave(step)
    slow_phase(step)
    time.sleep(args.pause)
    if args.save_every and step % args.save_every == args.save_every - 1:
        with run.phase("checkpoint"):
            note(saved=step)
if args.late_save and rank == 0:
    time.sleep(args.late_save)
    (args.out / "saved").write_text(str(step))
note(end=step, stopping=run.stopping)
