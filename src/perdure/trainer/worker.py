"""Runs the user's program as `__main__`, so that it ends as under plain Python: exit code, traceback, atexit, threads.

`python -u -m perdure.trainer.worker --heartbeat-fd N --slot S --generation G --kind script|module --target T -- args…`
is a worker by plain spawn; a fork server calls `run_program` in a process that it has prepared. Must import in
milliseconds: no msgspec, no torch.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = "/dev/null"  # -m put the current folder there, and a random.py in it is the user's, not ours

import builtins
import os
from collections.abc import Sequence
from types import ModuleType

from perdure.errors import HostError
from perdure.trainer import heartbeat, process, progress
from perdure.wire.layouts import LoopPhase

SCRIPT, MODULE = "script", "module"


def first_path(kind: str, target: str) -> str:
    """What Python puts at sys.path[0] for this program: the script's folder, links resolved, or the current one."""
    if kind == MODULE:
        return os.getcwd()
    real = os.path.realpath(target)
    return real if os.path.isdir(real) or _is_archive(real) else os.path.dirname(real)


def _is_archive(path: str) -> bool:
    return path.endswith((".zip", ".pyz", ".egg", ".whl"))


def set_first_path(kind: str, target: str) -> None:
    """Replace the entry that `python -m perdure…` brought by the program's own."""
    if not sys.flags.safe_path:
        sys.path[0] = first_path(kind, target)


def _forget_shadowed(folder: str) -> None:
    """Let the program import its own `random` although ours has been imported already, as under plain Python.

    What Python has built in or frozen comes before any folder, so it cannot be shadowed there either.
    """
    from importlib.machinery import PathFinder

    at_start = {"encodings", "perdure", "__main__"}  # Python's own start-up, and what runs here
    try:
        own = {name.partition(".")[0] for name in os.listdir(folder)} - at_start
    except OSError:  # an archive, or a folder that may not be read: importing from it will tell
        return
    for name in own & sys.modules.keys():
        loaded = getattr(sys.modules[name].__spec__, "origin", None)
        found = PathFinder.find_spec(name, [folder])
        if loaded in (None, "built-in", "frozen") or found is None or found.origin in (None, loaded):
            continue
        for loaded_name in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[loaded_name]


def run_program(kind: str, target: str, args: Sequence[str]) -> None:
    """Run the program; what it raises comes out, for the interpreter to end by as always.

    Writes the error files where TORCHELASTIC_ERROR_FILE says, and sees to it that the traceback shows no frame of ours.
    """
    error_file, pid = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.getpid()
    main = _new_main()
    sys.argv[:] = [target if kind == SCRIPT else "-m", *args]
    sys.orig_argv[:] = [sys.executable, "-u", *(() if kind == SCRIPT else ("-m",)), target, *args]
    set_first_path(kind, target)
    _forget_shadowed(sys.path[0])
    try:
        if kind == MODULE:
            _run_module(target, alter_argv=True)
        elif os.path.isdir(target) or _is_archive(target):
            _run_module("__main__", alter_argv=False)
        else:
            _run_script(target, main)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error, error_file if os.getpid() == pid else None)  # a child that the program forked is no worker
        raise
    finally:
        heartbeat.current.set_phase(LoopPhase.DONE)


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    return main


def _run_script(target: str, main: ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(target)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:  # the words and the code of Python itself
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, *, alter_argv: bool) -> None:
    # The function that the interpreter itself calls for -m, folders and archives (Modules/main.c): no second truth.
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _report(error: BaseException, error_file: str | None) -> None:
    from perdure.trainer import failure

    program = failure.program_traceback(error)
    failure.hide_own_frames(error, program)
    if error_file and not isinstance(error, KeyboardInterrupt):
        failure.write_error_files(error, program, error_file)


def main() -> None:
    """Settle in as a plainly spawned worker and run the program."""
    import argparse

    parser = argparse.ArgumentParser(prog="perdure.trainer.worker")
    parser.add_argument("--heartbeat-fd", type=int)
    parser.add_argument("--slot", type=int, default=0)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--agent", type=int, help="pid of the parent, to notice that it has ended before we looked")
    parser.add_argument("--kind", choices=(SCRIPT, MODULE), required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    process.die_with(options.agent or os.getppid())
    process.default_signals()
    if options.heartbeat_fd is not None:
        try:
            heartbeat.attach(options.heartbeat_fd, options.slot, options.generation)
        except (HostError, OSError) as error:
            raise SystemExit(f"perdure: no heartbeat: {error}") from None
        os.close(options.heartbeat_fd)
        progress.count_optimizer_steps()
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    run_program(options.kind, options.target, args)


if __name__ == "__main__":
    main()
