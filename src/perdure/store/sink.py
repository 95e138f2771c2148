"""Files on their way into storage: hashed while they are written, paced, and kept out of the page cache.

Knows bytes; not what is in them.
"""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Protocol

import xxhash

from perdure.errors import PerdureError
from perdure.store.manifest import CHUNK, FileRecord
from perdure.vocab.units import Bytes, Seconds

_PIECE: Bytes = 1 << 20
"""Written at once: so often the pace is kept."""
_WINDOW: Bytes = 16 << 20
"""Bytes that may be dirty behind the writer: more make the kernel stop others that write (vm.dirty_ratio)."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # linux/fs.h: SYNC_FILE_RANGE_*
SCRATCH = ".new"
"""How the name of a file ends that is being written, or whose writer was killed."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class Pace:
    """At most so many bytes per second, over all files that share it. None: no limit."""

    def __init__(self, bytes_per_second: float | None, on_spent: Callable[[Bytes], None] | None = None) -> None:
        """`on_spent` hears of every byte that passes."""
        self._rate, self._on_spent = bytes_per_second, on_spent
        self._next: Seconds = time.monotonic()

    def spend(self, count: Bytes) -> None:
        """Wait until `count` more bytes may pass. What was not used a while ago is not saved up."""
        if self._on_spent is not None:
            self._on_spent(count)
        if not self._rate:
            return
        now = time.monotonic()
        self._next = max(self._next, now - _PIECE / self._rate) + count / self._rate
        if self._next > now:
            time.sleep(self._next - now)


class Target(Protocol):
    """Where a sink's bytes go."""

    def write(self, data: memoryview) -> None: ...

    def finish(self) -> None:
        """All is written: make it durable under its name."""
        ...

    def discard(self) -> None:
        """Leave nothing of it, as far as that is possible."""
        ...


class Sink:
    """A file that is written from its beginning to its end, once. Any writer of torch takes it for a file."""

    def __init__(self, name: str, target: Target, pace: Pace) -> None:
        self.name = name
        self._target = target
        self._pace = pace
        self._count = 0
        self._hash = xxhash.xxh3_128()
        self._digests: list[str] = []
        self.problem: Exception | None = None
        """Why a write failed: torch's archive writer loses it on its way."""

    def write(self, data: bytes | memoryview) -> int:
        """All of `data`. Raises OSError or HostError."""
        try:
            return self._write(data)
        except (OSError, PerdureError) as exc:
            self.problem = self.problem or exc
            raise

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        """Nothing is held back here; `finish` makes it durable."""

    def close(self) -> None:
        """What writers call when they have had their say; the file is closed by `finish` or `discard`."""

    def finish(self) -> FileRecord:
        """Durable from here on. Raises OSError or HostError."""
        if self._count % CHUNK:
            self._end_chunk()
        self._target.finish()
        return FileRecord(name=self.name, nbytes=self._count, chunks="".join(self._digests))

    def discard(self) -> None:
        self._target.discard()

    def _write(self, data: bytes | memoryview) -> int:
        with memoryview(data) as given, given.cast("B") as view:
            at = 0
            while at < view.nbytes:
                room = CHUNK - self._count % CHUNK
                piece = view[at : at + min(_PIECE, room)]
                self._hash.update(piece)
                self._pace.spend(piece.nbytes)
                self._target.write(piece)
                at += piece.nbytes
                self._count += piece.nbytes
                if self._count % CHUNK == 0:
                    self._end_chunk()
            return at

    def _end_chunk(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()


class DiskFile:
    """A `Target` on a local or mounted file system: written under a name of its own, renamed when it is durable."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path = path
        self._scratch = f"{path}.{os.getpid()}-{time.monotonic_ns():x}{SCRATCH}"
        self._fd = os.open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._count = 0
        self._started = 0  # writing back has been started up to here

    def write(self, data: memoryview) -> None:
        at = 0
        while at < data.nbytes:
            at += os.write(self._fd, data[at:])
        self._count += data.nbytes
        if self._count - self._started >= _WINDOW:
            self._write_back()

    def finish(self) -> None:
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)
        self._fd = -1
        os.rename(self._scratch, self._path)

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            try:
                os.unlink(self._scratch)
            except OSError:
                return  # it goes with its folder

    def _write_back(self) -> None:
        """Start the newest window; wait for the one before, and forget it."""
        before = max(self._started - _WINDOW, 0)
        _sync_range(self._fd, self._started, self._count - self._started, _WRITE)
        if self._started:
            _sync_range(self._fd, before, self._started - before, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._fd, before, self._started - before, os.POSIX_FADV_DONTNEED)
        self._started = self._count


def _sync_range(fd: int, start: int, count: int, flags: int) -> None:
    """A hint: fsync at the end says whether all went well, and file systems without it wait there."""
    _LIBC.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(count), flags)
