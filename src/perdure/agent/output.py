"""What workers print: torchrun's log files, the console with a prefix, and stderr's last lines in memory.

Source of the layout and of what is shown: torch 2.13, distributed/elastic/multiprocessing/api.py (DefaultLogsSpecs).
Unlike there, everything is also kept in the files when it is not redirected. Knows no generation's fate.
"""

import os
import tempfile
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from perdure.agent.config import AgentConfig, OutputConfig
from perdure.agent.console import Console, open_consoles, split_shown
from perdure.agent.launch import line_prefix
from perdure.errors import ConfigError
from perdure.vocab.ids import GenerationNumber
from perdure.vocab.units import Seconds

_OUT, _ERR = 1, 2
"""torchrun's Std bits."""
_CHUNK = 65536
_TAIL_LINES, _TAIL_BYTES = 20, 16384
_CLOSE_TIMEOUT = 2.0
_LEFT_OVER = 16
"""Chunks that are still read when a pipe is given up; a descendant that writes without end must not hold us."""


def is_shown(config: OutputConfig, local_rank: int, bit: int) -> bool:
    """Whether a stream goes to the console: teed, or not redirected, and of a rank that the filter lets through."""
    redirected = _setting(config.redirects, local_rank) & bit
    teed = _setting(config.tee, local_rank) & bit
    return bool(teed or not redirected) and (not config.ranks_filter or local_rank in config.ranks_filter)


def last_lines(data: bytes, count: int = _TAIL_LINES) -> str:
    """The last lines of `data`, as a terminal shows them: what a carriage return overwrote is gone."""
    lines = data.decode(errors="replace").replace("\r\n", "\n").rstrip().split("\n")[-count:]
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


class WorkerOutput:
    """Both streams of one worker. Give it the descriptors, then close our copies of them."""

    def __init__(self, stdout: "_Stream", stderr: "_Stream", error_file: str) -> None:
        self._streams = (stdout, stderr)
        self.stdout_fd = stdout.write_fd
        self.stderr_fd = stderr.write_fd
        self.error_file = error_file
        """For TORCHELASTIC_ERROR_FILE; empty where no files are kept."""

    def close_child_ends(self) -> None:
        """Once the worker has them: the pipes end when the worker does. Twice is harmless."""
        for stream in self._streams:
            stream.close_child_end()

    async def finish(self, timeout: Seconds) -> None:  # noqa: ASYNC109 - running out of it is no error here
        """Read both pipes to their end, for at most `timeout` seconds (a descendant may hold them open)."""
        self.close_child_ends()
        with anyio.move_on_after(timeout):
            for stream in self._streams:
                await stream.done.wait()
        for stream in self._streams:
            stream.scope.cancel()
            await stream.done.wait()

    def tail(self) -> str:
        """stderr's last 20 lines."""
        return last_lines(self._streams[1].last)


class Outputs:
    """Makes the directory of this agent at once: raises ConfigError when that cannot be done. Needs an event loop."""

    def __init__(self, config: AgentConfig, task_group: TaskGroup) -> None:
        self._config = config
        self._tasks = task_group
        self.directory = _make_directory(config.output.log_dir, config.run_id)
        """LOG_DIR/RUN_ID_XXXX; None where the user wants no files (/dev/null)."""
        self._stdout, self._stderr = open_consoles()
        self._warned = False

    def open(self, restarts: int, generation: GenerationNumber, local_rank: int, rank: int) -> WorkerOutput:
        """Pipes and files for one worker. A second generation with as many restarts continues the first one's files."""
        folder = self._make_folder(restarts, local_rank)
        prefix = line_prefix(self._config, rank, local_rank).encode()
        streams = [
            self._open_stream(folder, prefix, local_rank, bit, f"perdure-{generation}-{local_rank}")
            for bit in (_OUT, _ERR)
        ]
        return WorkerOutput(streams[0], streams[1], os.path.join(folder, "error.json") if folder else "")

    async def close(self) -> None:
        """Show what is still to be shown, as far as the console takes it within 2 s."""
        with anyio.move_on_after(_CLOSE_TIMEOUT):
            await self._stdout.drained()
            await self._stderr.drained()
        self._stdout.close()
        self._stderr.close()

    def _open_stream(self, folder: str | None, prefix: bytes, local_rank: int, bit: int, task: str) -> "_Stream":
        output = self._config.output
        name, console, needles = (
            ("stdout", self._stdout, output.stdout_filters)
            if bit == _OUT
            else ("stderr", self._stderr, output.stderr_filters)
        )
        shown = is_shown(output, local_rank, bit)
        files = []
        if folder is not None:
            files.append(_File(os.path.join(folder, f"{name}.log"), self._warn))
            if needles and shown:
                path = os.path.join(os.path.dirname(folder), f"filtered_{name}.log")
                files.append(_FilteredFile(path, self._warn, prefix, tuple(n.encode() for n in needles)))
        stream = _Stream(files, console if shown else None, prefix)
        self._tasks.start_soon(stream.run, name=f"{task}-{name}")
        return stream

    def _make_folder(self, restarts: int, local_rank: int) -> str | None:
        if self.directory is None:
            return None
        folder = os.path.join(self.directory, f"attempt_{restarts}", str(local_rank))
        try:
            os.makedirs(folder, exist_ok=True)
            if os.path.exists(error_file := os.path.join(folder, "error.json")):
                os.unlink(error_file)  # of an earlier life: it must not be taken for this one's
        except OSError as error:
            self._warn(folder, error)
            return None
        return folder

    def _warn(self, path: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = f"perdure: {path} cannot be written ({error.strerror}); output is shown but not kept in files\n"
            self._stderr.show(self, b"", text.encode())


class _File:
    """A log file. The first failure to write is reported and ends it; the worker never notices."""

    def __init__(self, path: str, warn: Callable[[str, OSError], None]) -> None:
        self._path, self._warn = path, warn
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            warn(path, error)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._fd is not None:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._shut()
                self._warn(self._path, error)

    def close(self) -> None:
        self._shut()

    def _shut(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _FilteredFile(_File):
    """Keeps the lines that contain one of the needles, with their prefix; all workers of an attempt share it."""

    def __init__(
        self, path: str, warn: Callable[[str, OSError], None], prefix: bytes, needles: tuple[bytes, ...]
    ) -> None:
        super().__init__(path, warn)
        self._prefix, self._needles, self._held = prefix, needles, b""

    def write(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        self._keep(lines)

    def close(self) -> None:
        self._keep([self._held])
        self._held = b""
        super().close()

    def _keep(self, lines: list[bytes]) -> None:
        kept = [self._prefix + line + b"\n" for line in lines if any(n in line for n in self._needles)]
        super().write(b"".join(kept))


class _Stream:
    """One pipe from a worker, read until its end."""

    def __init__(self, files: list[_File], console: Console | None, prefix: bytes) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._child_end_open = True
        self._files, self._console, self._prefix = files, console, prefix
        self._held = b""
        self.last = b""
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()

    def close_child_end(self) -> None:
        if self._child_end_open:
            self._child_end_open = False
            os.close(self.write_fd)

    async def run(self) -> None:
        try:
            with self.scope:
                while self._read() is not False:
                    if self._console is not None:
                        await self._console.room()
                    await anyio.wait_readable(self._read_fd)
        finally:
            self._end()

    def _read(self) -> bool | None:
        """True: took some; None: nothing there now; False: the pipe's end."""
        try:
            data = os.read(self._read_fd, _CHUNK)
        except BlockingIOError:
            return None
        if not data:
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        self.last = (self.last + data)[-_TAIL_BYTES:]
        for file in self._files:
            file.write(data)
        if self._console is not None:
            shown, self._held = split_shown(self._held, data)
            self._console.show(self, self._prefix, shown)

    def _end(self) -> None:
        for _ in range(_LEFT_OVER):
            if not self._read():
                break
        if self._console is not None:
            self._console.show(self, self._prefix, self._held)
            self._console.end_line(self)
        for file in self._files:
            file.close()
        self.close_child_end()
        os.close(self._read_fd)
        self.done.set()


def _setting(value: dict[int, int] | int, local_rank: int) -> int:
    return value if isinstance(value, int) else value.get(local_rank, 0)


def _make_directory(log_dir: str, run_id: str) -> str | None:
    if log_dir == os.devnull:
        return None
    try:
        os.makedirs(log_dir, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"{run_id.replace('/', '_')}_", dir=log_dir)
    except OSError as error:
        why = "it is a file" if os.path.isfile(log_dir) else error.strerror
        raise ConfigError(f"the log directory {log_dir} cannot be used: {why}; give another with --log-dir") from error
