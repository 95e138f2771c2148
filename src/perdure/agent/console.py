"""The agent's own stdout or stderr, shared by all workers: whole lines, never torn, and never blocking the agent.

Knows bytes, lines and who wrote last; it does not know workers or files.
"""

import asyncio
import os
import re
import select
import stat

import anyio

_HIGH, _LOW = 1 << 18, 1 << 16
"""Readers wait above _HIGH bytes that could not be written yet, and go on below _LOW."""
_LONGEST_LINE = 1 << 20
"""A line that is longer is shown in parts, which other lines may separate."""
_ATOMIC = select.PIPE_BUF
"""Several agents may share a pipe: what is written at once, up to this size, stays together (pipe(7))."""
_LINE_BEGINS = re.compile(rb"\n(?=[^\r])|\r(?=[^\r\n])", re.DOTALL)


def split_shown(held: bytes, data: bytes) -> tuple[bytes, bytes]:
    """What can be shown now, and what is held until its line is complete.

    A progress bar rewrites its line after a carriage return, so such a line is shown as it comes; only a trailing
    carriage return is held, for it may be half of a line end.
    """
    whole = held + data
    cut = whole.rfind(b"\n") + 1
    rest = whole[cut:]
    if b"\r" in rest:
        cut += len(rest.rstrip(b"\r"))
    elif len(rest) > _LONGEST_LINE:
        cut = len(whole)
    return whole[:cut], whole[cut:]


def prefixed(data: bytes, prefix: bytes, continues: bool) -> bytes:
    """`data` with `prefix` where a line begins or is written anew, unless `data` continues a line at its start."""
    if not data or not prefix:
        return data
    text = _LINE_BEGINS.sub(rb"\g<0>" + prefix.replace(b"\\", b"\\\\"), data)
    return text if continues or data[:1] == b"\r" else prefix + text


class Console:
    """Writes to `fd` without blocking. Needs a running event loop."""

    def __init__(self, fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd, self._piece = _open_without_blocking(fd)
        self._buffer = bytearray()
        self._waiting = False
        self._line_of: object = None  # whose unfinished line the cursor stands in
        self._room = anyio.Event()
        self._room.set()
        self._empty = anyio.Event()
        self._empty.set()

    def show(self, source: object, prefix: bytes, data: bytes) -> None:
        """Show lines of `source`, or the part of a line that it adds to its last one."""
        if not data or self._fd is None:
            return
        if self._line_of not in (None, source):
            self._buffer += b"\n"
        self._buffer += prefixed(data, prefix, continues=self._line_of is source)
        self._line_of = None if data.endswith(b"\n") else source
        if self._empty.is_set():
            self._empty = anyio.Event()
        if not self._waiting:
            self._flush()
        if len(self._buffer) > _HIGH and self._room.is_set():
            self._room = anyio.Event()

    def end_line(self, source: object) -> None:
        """`source` has ended: its unfinished line, if any, is closed so that nothing is glued to it."""
        if self._line_of is source:
            self.show(source, b"", b"\n")

    async def room(self) -> None:
        """Wait until what has been shown has mostly been written."""
        await self._room.wait()

    async def drained(self) -> None:
        """Wait until everything has been written."""
        await self._empty.wait()

    def close(self) -> None:
        """Drop what could not be written."""
        if self._fd is not None:
            self._stop_waiting()
            os.close(self._fd)
            self._fd = None
        self._release(discard=True)

    def _flush(self) -> None:
        while self._buffer and self._fd is not None:
            try:
                del self._buffer[: os.write(self._fd, self._next_piece())]
            except BlockingIOError:
                self._wait()
                break
            except OSError:  # whoever read us is gone: the log files have it all
                self.close()
        if not self._buffer:
            self._stop_waiting()
        self._release(discard=False)

    def _next_piece(self) -> bytes:
        end = self._buffer.rfind(b"\n", 0, self._piece) + 1 or self._piece
        return bytes(self._buffer[:end])

    def _wait(self) -> None:
        if not self._waiting and self._fd is not None:
            self._waiting = True
            self._loop.add_writer(self._fd, self._flush)

    def _stop_waiting(self) -> None:
        if self._waiting and self._fd is not None:
            self._waiting = False
            self._loop.remove_writer(self._fd)

    def _release(self, discard: bool) -> None:
        if discard:
            self._buffer.clear()
        if len(self._buffer) <= _LOW:
            self._room.set()
        if not self._buffer:
            self._empty.set()


def open_consoles(stdout_fd: int = 1, stderr_fd: int = 2) -> tuple[Console, Console]:
    """Consoles for both streams; one for the two where they are the same terminal, pipe or file."""
    out = Console(stdout_fd)
    try:
        same = os.path.sameopenfile(stdout_fd, stderr_fd)
    except OSError:
        same = False
    return (out, out) if same else (out, Console(stderr_fd))


def _open_without_blocking(fd: int) -> tuple[int | None, int]:
    """(descriptor of our own, bytes per write) for what `fd` is.

    O_NONBLOCK on `fd` itself would also hold for the shell and the launcher, which share it; a second opening of the
    same pipe or terminal has a flag of its own. A paused terminal must not stop the agent, or its node would be lost.
    """
    try:
        mode = os.fstat(fd).st_mode
        own = os.dup(fd)
    except OSError:
        return None, _LOW
    if not stat.S_ISFIFO(mode) and not os.isatty(fd):
        return own, _LOW
    piece = _ATOMIC if stat.S_ISFIFO(mode) else _LOW
    try:
        second = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # no reader any more, or a terminal of another session's user
        return own, piece
    os.close(own)
    return second, piece
