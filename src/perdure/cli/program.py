"""The user's program: how it is entered, and how its workers come to life. Looks whether it is there; runs nothing."""

import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Mapping

from perdure.cli.command_line import Values
from perdure.errors import ConfigError
from perdure.wire.messages import Entry, Launch

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def read_launch(values: Values, program: tuple[str, ...], environ: Mapping[str, str]) -> Launch:
    """How the user's program is entered. Raises ConfigError where there is no such program."""
    if not program:
        raise ConfigError("no script is given; name it after the flags, as in perdure run --nproc-per-node 2 train.py")
    target, args = program[0], program[1:]
    module, no_python, run_path = (values.switch(dest) for dest in ("module", "no_python", "run_path"))
    if module and (no_python or run_path):
        other = "run_path" if run_path else "no_python"
        raise ConfigError(
            f"{values.source('module')} and {values.source(other)} contradict each other: "
            f"{target} is a module or a file; leave one out"
        )
    if module:
        return Launch(entry=Entry.MODULE, target=target, args=args)
    if no_python and not run_path:  # --run-path takes precedence, as in torchrun
        _check_program(target, environ)
        return Launch(entry=Entry.PROGRAM, target=target, args=args)
    if run_path and not os.path.isabs(target):
        raise ConfigError(f"--run-path needs an absolute path, not {target}; write {os.path.abspath(target)}")
    _check_script(target)
    return Launch(entry=Entry.SCRIPT, target=target, args=args)


def _check_script(path: str) -> None:
    if os.path.isfile(path):
        if not os.access(path, os.R_OK):
            raise ConfigError(f"the script {path} cannot be read by this user; run: chmod +r {path}")
        return
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    if os.path.isdir(path):
        raise ConfigError(f"the script {path}{where} is a folder; name a file in it, or use -m for a package")
    advice = " (a module is run by -m, another program by --no-python)"
    raise ConfigError(f"there is no script {path}{where}; check the path{advice}")


def show_syntax_error(launch: Launch) -> bool:
    """Whether the script has a syntax error, which is then shown: once, instead of by every rank."""
    if launch.entry is not Entry.SCRIPT or not os.path.isfile(launch.target) or _is_archive(launch.target):
        return False
    try:
        with open(launch.target, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers give them
            compile(file.read(), os.path.abspath(launch.target), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.stderr.write(f"perdure: the script {launch.target} is no valid Python, so nothing was started\n")
        return True
    except OSError:
        return False  # the workers will say it with their own words
    return False


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def check_log_dir(path: str) -> None:
    """Raise ConfigError where --log-dir cannot be written to; "" is none."""
    if not path or path == os.devnull:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = "it is a file" if os.path.isfile(path) else (error.strerror or str(error)).lower()
        raise ConfigError(f"the log directory {path} cannot be used: {why}; give another with --log-dir") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"the log directory {path} cannot be written to by this user; give another with --log-dir")


def _check_program(target: str, environ: Mapping[str, str]) -> None:
    if shutil.which(target, path=environ.get("PATH")) is not None:
        return
    if os.path.isfile(target) and "/" in target:
        raise ConfigError(f"the program {target} is not executable; run: chmod +x {target}")
    raise ConfigError(f"there is no program {target} here or in PATH; give its path, as in --no-python ./{target}")


def read_fork_server(values: Values, launch: Launch) -> tuple[bool, tuple[str, ...]]:
    """Whether a fork server is used, and what --preload adds to it."""
    enabled = not values.switch("no_fork_server")
    text = values.text("preload")
    modules = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    wrong = next((name for name in modules if not _MODULE.fullmatch(name)), None)
    if wrong is not None:
        raise values.wrong("preload", f"module names with commas between them; {wrong!r} is none")
    if modules and not enabled:
        raise ConfigError("--preload is for the fork server, which --no-fork-server turns off; leave one out")
    if modules and launch.entry is Entry.PROGRAM:
        raise ConfigError("--preload has no use for a program that is executed by --no-python; leave one out")
    return enabled, modules


def read_start_method(values: Values, fork_server: bool) -> tuple[str, ...]:
    """All three give every worker a process of its own; which one has no effect on scripts in torchrun either."""
    method = values.choice("start_method", ("spawn", "fork", "forkserver"))
    if method in (None, "spawn"):
        return ()
    if not fork_server:
        raise ConfigError(
            f"{values.source('start_method')} {method} and --no-fork-server contradict each other; leave one out"
        )
    note = f"{values.source('start_method')} {method} has no effect on scripts, as in torchrun"
    return (f"{note}: workers come from Perdure's fork server unless --no-fork-server is given",)
