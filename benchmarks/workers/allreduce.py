"""A worker that does nothing but small all-reduces, and tells a benchmark when the first one of its life is over.

It knows no launcher: ours and the peers start this very file.
"""

import argparse
import datetime
import importlib
import json
import os
import socket
import time

import torch
import torch.distributed as dist


def tell(path: str) -> None:
    """Send one datagram to the benchmark: who we are, and that our first all-reduce is over, now."""
    report = {
        "rank": dist.get_rank(),
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "time": time.time(),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(json.dumps(report).encode(), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", required=True, help="Unix datagram socket of the benchmark")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds after which a collective fails")
    parser.add_argument("--library", help="module to import first, as a script imports its framework")
    args = parser.parse_args()
    if args.library:
        importlib.import_module(args.library)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    value = torch.ones(1)
    dist.all_reduce(value)
    tell(args.report)
    while True:
        time.sleep(0.005)
        value.fill_(1.0)
        dist.all_reduce(value)
        if value.item() != dist.get_world_size():
            raise SystemExit(f"all-reduce gave {value.item()}, not {dist.get_world_size()}")


if __name__ == "__main__":
    main()
