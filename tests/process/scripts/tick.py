"""Writes a line a step and talks to no other rank, so that only Perdure can keep two of a kind from writing at once.

Each line has the monotonic clock, which all namespaces of one machine share.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--pause", type=float, default=0.01)
parser.add_argument("--name", default="", help="changes the command, and nothing else")
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
run = perdure.current_run()
who = {"node": os.environ["PERDURE_NODE"], "generation": run.generation, "rank": run.rank, "pid": os.getpid()}
who |= {"restarts": run.restarts, "master": os.environ["MASTER_ADDR"]}
with (args.out / f"{run.rank}-{os.getpid()}.jsonl").open("a", buffering=1) as trace:
    for step in run.steps(start=0, stop=args.steps):
        trace.write(json.dumps({**who, "step": step, "at": time.monotonic()}) + "\n")
        time.sleep(args.pause)
sys.exit(0)
