"""How a process of ours settles in: its parent, its signals, its descriptors, its random numbers; and if it may fork.

Knows Linux; knows nothing of what the process then does.
"""

import contextlib
import ctypes
import io
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What Python itself ignores from its start on (Python/pylifecycle.c), so that writes fail with an exception instead.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def die_with(parent: int) -> None:
    """Be killed when `parent`, which must be this process's parent, ends; end now if it is gone already.

    The kernel watches the thread of the parent that started this process (prctl(2)), or that adopted it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def wait_for_adoption(between: int, parent: int) -> None:
    """Return when `between`, which forked this process, has ended and `parent` has adopted it; then die with that."""
    while os.getppid() == between:
        time.sleep(0.0002)  # it ends at once; there is nothing to wait on that comes after the new parent is set
    die_with(parent)


def default_signals() -> None:
    """As in a fresh Python: nothing blocked, nothing ignored that was inherited, Ctrl-C is KeyboardInterrupt.

    Handlers that a library installed stay, as they would if the library had been imported by the program.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_interrupts() -> None:
    """Ctrl-C and a lost terminal are the agent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def close_inherited(keep: set[int]) -> None:
    """Close every descriptor but 0, 1, 2 and `keep`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):  # the one that listed the folder
                os.close(int(name))


def redirect(stdout: int, stderr: int) -> None:
    """Write to these, read from nowhere, unbuffered as `python -u`."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    os.close(null)
    if not isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):  # started without -u
        sys.stdout = sys.__stdout__ = _unbuffered(1, sys.stdout.encoding, "strict")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(2, sys.stderr.encoding, "backslashreplace")  # type: ignore[misc]


def _unbuffered(fd: int, encoding: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding, errors, newline="\n", line_buffering=raw.isatty(), write_through=True)


def fresh_randomness() -> None:
    """New seeds for what was seeded from the system's entropy in the process that forked this one.

    torch's default generator has a fixed seed at its import and so is as always.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def judge_threads(python_threads: Sequence[str], tasks: int, openblas: int, cpus: int) -> str:
    """Why forking is unsafe with these threads, "" if it is safe.

    OpenBLAS starts cpus - 1 threads per loaded copy at its import and knows how to survive a fork; nobody else does.
    """
    if python_threads:
        return f"an imported library has started Python threads ({', '.join(python_threads)})"
    unexplained = tasks - 1 - openblas * (cpus - 1)
    return f"an imported library has started {tasks - 1} native threads" if unexplained > 0 else ""


def unsafe_to_fork() -> str:
    """One clause that says why this process must not be forked, "" if it may."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an imported library has made a CUDA context"
    if any(_link(fd).startswith("/dev/nvidia-uvm") for fd in os.listdir("/proc/self/fd")):
        return "an imported library has initialised CUDA"  # cuInit alone, which torch does not know of
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        openblas = {line.split(maxsplit=5)[-1].strip() for line in maps if "openblas" in line}
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return judge_threads(others, len(os.listdir("/proc/self/task")), len(openblas), os.cpu_count() or 1)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
