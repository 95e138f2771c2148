"""A worker in plain Python that tells a benchmark that it runs, and then waits to be ended. It imports no torch."""

import json
import os
import signal
import socket
import sys
import time


def main() -> None:
    report = {
        "rank": int(os.environ["RANK"]),
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "time": time.time(),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(json.dumps(report).encode(), sys.argv[sys.argv.index("--report") + 1])
    signal.pause()


if __name__ == "__main__":
    main()
