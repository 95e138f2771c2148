"""The TCPStore server of one generation: torch's own, on one address, in a process of its own.

`python -m perdure.trainer.store --host H --port P` prints one JSON line {"port": …} when it is bound; a fork server
calls `bind` in a process that it has forked. Knows nothing of generations or ranks.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = "/dev/null"  # -m put the current folder there, and a random.py in it is the user's, not ours

import json
import os
import signal
import socket
from datetime import timedelta
from typing import NoReturn

from perdure.errors import HostError
from perdure.trainer import process

LIBUV_TAKES_SOCKETS = (2, 8)
"""torch's release whose libuv server takes a listening socket first (pytorch 150215); the older server always did."""
_BACKLOG = 4096  # every rank connects at once; the kernel cuts it to net.core.somaxconn


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` only (port 0: a free one). Raises HostError.

    Given none, torch's server listens on all interfaces (torch 2.13), and its protocol has no authentication.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # A fixed port must be usable again at once by the next generation.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        advice = "give another --local-addr or --master-port"
        raise HostError(f"the store cannot listen on {host}:{port}: {error.strerror or error}; {advice}") from error
    return listener


def bind(host: str, port: int) -> tuple[object, int]:
    """The store, which serves in threads of its own as long as it is referred to, and its port. Raises HostError."""
    try:
        import torch
        from torch.distributed import TCPStore
    except ImportError as error:
        raise HostError(f"there is no store without torch.distributed: {error}") from error
    listener = listen(host, port)
    address, bound = listener.getsockname()[:2]
    try:
        store = TCPStore(
            address,
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
            use_libuv=tuple(map(int, torch.__version__.split(".")[:2])) >= LIBUV_TAKES_SOCKETS,
        )
    except RuntimeError as error:
        raise HostError(f"torch's store did not start on {address}:{bound}: {error}") from error
    return store, bound


def serve(host: str, port: int, report: int) -> NoReturn:
    """Bind, write {"port": …} or {"error": …} to descriptor `report` and close it, then serve until SIGTERM."""
    process.ignore_interrupts()
    try:
        store, bound = bind(host, port)
    except HostError as error:
        os.write(report, json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)
    os.write(report, json.dumps({"port": bound}).encode() + b"\n")
    os.close(report)
    while store is not None:  # which keeps it referred to
        signal.pause()
    raise AssertionError("unreachable")


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="perdure.trainer.store")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--agent", type=int, help="pid of the parent, to notice that it has ended before we looked")
    options = parser.parse_args()
    process.die_with(options.agent or os.getppid())
    process.default_signals()
    report = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever torch prints must not be taken for the answer
    serve(options.host, options.port, report)


if __name__ == "__main__":
    main()
