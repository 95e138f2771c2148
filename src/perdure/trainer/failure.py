"""How a worker's program failed: its traceback without Perdure's frames, and the error files.

Writes torchrun's format, and beside it our own with type, message and place. Knows nothing of who reads them.
"""

import json
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

_OURS = os.path.dirname(__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_LONGEST = 1 << 16
"""Characters of a message or traceback that are kept."""


def _calls_the_program(file: str) -> bool:
    return file.startswith((_OURS, "<frozen runpy>", "<frozen importlib")) or file == f"{_STDLIB}runpy.py"


def _is_users(file: str) -> bool:
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return not (installed or file.startswith((_STDLIB, _OURS, "<frozen ")))


def program_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of `error` without what lies before the program, and without frames of ours that only call it.

    Frames of ours at its inner end stay: there Perdure itself raised.
    """
    steps: list[TracebackType] = []
    step = error.__traceback__
    while step is not None:
        if steps or not _calls_the_program(step.tb_frame.f_code.co_filename):
            steps.append(step)
        step = step.tb_next
    result: TracebackType | None = None
    for step in reversed(steps):
        inner_is_ours = result is None or result.tb_frame.f_code.co_filename.startswith(_OURS)
        if inner_is_ours or not step.tb_frame.f_code.co_filename.startswith(_OURS):
            result = TracebackType(result, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return result


def hide_own_frames(error: BaseException, program: TracebackType | None) -> None:
    """Let whatever prints uncaught exceptions, ours or the user's hook, print `error` with `program` as traceback."""
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error:
            trace = value.__traceback__ = program
        hook(kind, value, trace)

    sys.excepthook = show


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST]
    except Exception as broken:  # a user's __str__ may raise anything, and the first error matters more
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _where(error: BaseException, program: TracebackType | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in _walk(program)]
    users = [frame for frame in frames if _is_users(frame[0])]
    file, line = (users or frames or [("", 0)])[-1]
    return f"{file}:{line}" if file else ""


def _walk(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def describe(error: BaseException, program: TracebackType | None) -> dict[str, str]:
    """Type, message, where and traceback, as `vocab.event.WorkerError` has them."""
    text = "".join(traceback.format_exception(type(error), error, program))
    return {
        "type": type(error).__name__,
        "message": _message(error),
        "where": _where(error, program),
        "traceback": text[-_LONGEST:],
    }


def write_error_files(error: BaseException, program: TracebackType | None, path: str) -> None:
    """`path` in torchrun's format unless it is there (torch's @record wrote it), and always `path`.perdure."""
    ours = describe(error, program)
    theirs = {
        "message": f"{ours['type']}: {ours['message']}",
        "extraInfo": {"py_callstack": ours["traceback"], "timestamp": str(int(time.time()))},
    }
    try:
        if not os.path.exists(path):
            _write(path, {"message": theirs, "perdure": ours})
        _write(f"{path}.perdure", ours)
    except OSError as refused:
        sys.stderr.write(f"perdure: the error file {path} could not be written: {refused}\n")


def _write(path: str, value: dict[str, Any]) -> None:
    part = f"{path}.{os.getpid()}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(part, path)  # whole or not at all, whenever the process may be killed
