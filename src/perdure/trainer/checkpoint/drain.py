"""`python -m perdure.trainer.checkpoint.drain`: writes sealed slots into storage as torch.distributed.checkpoint does.

A child of the memory server, which may not import torch. Reads DrainRequests from stdin and writes DrainReplies to
stdout, a line of JSON each; ends at once, whatever it does, when stdin ends. It has a small share of processor and
disk. What it is asked twice it does once, and what it leaves half done nobody takes for a checkpoint.
"""

import contextlib
import ctypes
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from perdure.errors import PerdureError
from perdure.wire.memory import DrainReply, DrainRequest

NICE = 10
"""A tenth of a core on a busy machine. At 19 importing torch alone took two minutes beside two busy ones (2026-12-01),
while a slot was pinned and somebody waited for the last checkpoint; and who is not root cannot be less nice again."""
TELL_EVERY = 5.0
"""Seconds between two words on how far it has got."""
UNREADABLE = -1
"""`DrainReply.id` for a line that is no request."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # the system call's number
_IOPRIO_IDLE, _IOPRIO_USUAL = 3 << 13, 0  # linux/ioprio.h: class idle, and what the nice value gives, of this process


def main() -> None:
    replies = _take_stdout()
    _settle()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, lines), name="stdin", daemon=True).start()
    import torch

    from perdure.trainer.checkpoint import part  # noqa: F401  imports all that is needed later

    torch.set_num_threads(1)
    _say(replies, DrainReply(id=0))
    while True:
        _say(replies, answer(lines.get(), lambda reply: _say(replies, reply)))


def answer(line: bytes, tell: Callable[[DrainReply], None] = lambda reply: None) -> DrainReply:
    """Do what one line asks. Every failure is a reply; `tell` hears of each part that is written before the last."""
    try:
        request = msgspec.json.decode(line, type=DrainRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return DrainReply(id=UNREADABLE, error=f"that is no request for the drain: {exc}")
    started = time.monotonic()
    try:
        nbytes = _drain(request, lambda written: tell(DrainReply(id=request.id, nbytes=written, is_done=False)))
    except Exception as exc:
        took = time.monotonic() - started
        return DrainReply(id=request.id, seconds=took, error=_words(request, exc), lasting=_is_lasting(exc))
    return DrainReply(id=request.id, nbytes=nbytes, seconds=time.monotonic() - started)


def _drain(request: DrainRequest, tell: Callable[[int], None]) -> int:
    """Bytes of this node's parts; `tell` hears how many there are so far."""
    from perdure.trainer.checkpoint import part

    _yield(nice=0 if request.hurry else NICE)
    passed, told = 0, time.monotonic()

    def count(more: int) -> None:
        nonlocal passed, told
        passed += more
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            tell(passed)

    nbytes = sum(part.write(request, rank, count) for rank in sorted(request.slots))
    if request.finish:
        part.finish(request)
    return nbytes


def _is_lasting(exc: Exception) -> bool:
    from perdure.store.medium import is_lasting

    return is_lasting(exc)


def _words(request: DrainRequest, exc: Exception) -> str:
    from perdure.store.medium import reason_of

    if isinstance(exc, PerdureError):
        return str(exc)
    where = f"{request.checkpoint} cannot be written to {request.store}"
    if isinstance(exc, OSError):
        return f"{where}: {reason_of(exc)}"
    return f"{where}: {type(exc).__name__}: {' '.join(str(exc).split())[:300]}"


# --- the process -----------------------------------------------------------------------------------------------------


def _take_stdout() -> BinaryIO:
    """Replies go where stdout went; what a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return replies


def _settle() -> None:
    """At the back of every queue, without a GPU, deaf to the terminal and to schedulers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to every process; ours ends with its input
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # was held back until now
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _yield(nice=max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _yield(*, nice: int) -> None:
    """Take this place in the queues for processor and disk. Forward in the first only who may (root, RLIMIT_NICE)."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        place = _IOPRIO_IDLE if nice else _IOPRIO_USUAL
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, place)  # a hint; not every disk has queues


def _listen(source: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    while line := source.readline():
        lines.put(line)
    os._exit(0)  # who asked is gone, and its slots may be given to others


def _say(replies: BinaryIO, reply: DrainReply) -> None:
    try:
        replies.write(msgspec.json.encode(reply) + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
