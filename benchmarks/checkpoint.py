"""What a checkpoint costs: ours, the bare memcpy and every peer, in one run and in turns.

  first      seconds that the training thread is kept by the first save of a process, by the slowest rank
  warm       the same of the later saves, each beside a memcpy of as many bytes into faulted shared memory
  total      until the method says that the save is complete (copied, replicated or fsynced), the trainer waiting;
             `…training`: the same while the trainer goes on with steps that use all cores
  drag       how much longer those steps take, all together, than without a save (`nothing` is the noise)
  restore    all values are in the live tensors again; memcpy: the same bytes back, by as many threads
  set-up     what is done once, before the first step

Each trial is a fresh process per rank; in each round every method has one trial. At world 2 ours and lm-resiliency keep
a replica with the other rank. After each save the values change at once, and what is restored is compared: WRONG means
that it was not what had been saved. Last line of output: one JSON object; `ratio` is the peer's time over ours.

The peers that are no dependencies are looked for in the interpreter that --peers names. To make one, with the same
torch (PYTHON is the interpreter that has it):

  python3 -m venv /tmp/peers
  PYTHON -c "import sysconfig; print(sysconfig.get_path('purelib'))" > /tmp/torch.pth
  cp /tmp/torch.pth /tmp/peers/lib/python3.*/site-packages/
  /tmp/peers/bin/pip install --no-deps dlrover==0.6.1 lm-resiliency==0.2.0 nvidia-resiliency-ext==0.4.1
  /tmp/peers/bin/pip install grpcio protobuf deprecated requests psutil pynvml nvidia-ml-py pyyaml defusedxml

The numbers count only where nothing else runs.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from checkpoint_rows import Record, Row, line_of, memcpy_line, rows_of, table
from checkpoint_trial import Size, try_once

OURS = ("perdure memory", "perdure storage")
TIERS = {
    "perdure memory": ("dlrover memory", "lm-resiliency memory", "nvrx local", "nvrx local, stubbed"),
    "perdure storage": ("torch.save + fsync", "DCP save", "DCP async, thread", "DCP async, process", "dlrover storage"),
}
"""Our method → the peers that give the same safety, or claim to."""
METHODS = ("nothing", *(name for ours, peers in TIERS.items() for name in (ours, *peers)))
GIVE_UP = 2  # trials that failed, none that did not
ELSEWHERE = ("dlrover", "lm-resiliency", "nvrx")  # of the interpreter that --peers names

_QUIET = False


def say(text: str) -> None:
    if not _QUIET:
        print(text, file=sys.stderr, flush=True)


def play(size: Size, rounds: int, methods: list[str], peers: str, storage: Path) -> dict[str, Record]:
    """All methods in turns, so that all meet the machine in the same mood."""
    records = {name: Record() for name in METHODS}
    for number in range(rounds):
        for name in methods:
            if len(records[name].errors) >= GIVE_UP and not records[name].numbers:
                continue  # it does not run here
            began = time.monotonic()
            python = peers if name.startswith(ELSEWHERE) else sys.executable
            result = try_once(name, python, size, storage, own_nodes=name in OURS)
            records[name].add(result)
            mine = Record()
            mine.add(result)
            took = f"[round {number + 1}, {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}]"
            say("  ".join([took, *(text for text in line_of(name, mine) if text)]))
    return records


def sizes(args: argparse.Namespace) -> list[Size]:
    mibs = {1: args.mib or (64 if args.quick else 1024), 2: args.mib or (64 if args.quick else 512)}
    saves = args.saves or (2 if args.quick else 8)
    return [
        Size(world, mib, args.threads, saves, 1 if args.quick else 3, args.limit)
        for world, mib in mibs.items()
        if args.world in (None, world)
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--quick", action="store_true", help="64 MiB, one round of two saves: shows that it works")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--world", type=int, choices=(1, 2), help="only this many ranks")
    parser.add_argument("--mib", type=int, help="of each rank's state (1024 at world 1, 512 at world 2)")
    parser.add_argument("--rounds", type=int, help="fresh processes for each method (3)")
    parser.add_argument("--saves", type=int, help="warm saves in each of them (8, so that 24 pairs are compared)")
    parser.add_argument("--only", action="append", help="only methods whose name contains this; may be repeated")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=min(2, cores), help="of the bare memcpy, as many as ours uses")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is the storage")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a trial has failed")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    global _QUIET
    _QUIET = args.json
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what a trial has started is ended, too
    methods = [name for name in METHODS if not args.only or any(part in name for part in args.only)]
    rows: list[Row] = []
    for size in sizes(args):
        say(f"world {size.world}, {size.mib} MiB per rank, memcpy by {size.threads} threads per rank")
        records = play(size, args.rounds or (1 if args.quick else 3), methods, args.peers, Path(args.folder))
        played = {ours: tuple(peer for peer in peers if peer in methods) for ours, peers in TIERS.items()}
        rows.extend(rows_of(size.world, size.mib, played, records))
        if not args.json:
            lines = [memcpy_line(records.values()), *(line_of(name, records[name]) for name in methods)]
            print(f"\nworld {size.world}, {size.mib} MiB per rank, seconds\n{table(lines)}\n", flush=True)
    print(json.dumps({"rows": rows}))
    if any("ours_error" in row or "ours_wrong" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
