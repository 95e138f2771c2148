"""Slot files on this machine: made, mapped, faulted in; headers read and written. What is in them: `wire.slots`.

Knows files and maps; does not know who may write a slot when, and hashes nothing.
"""

import ctypes
import errno
import mmap
import os

import msgspec

from perdure.errors import CorruptCheckpointError, HostError
from perdure.vocab.checkpoint import Layout
from perdure.wire.slots import DATA_START, HASH, HEADER, SlotHeader, decode_header, encode_header, header_start

_LIBC = ctypes.CDLL(None, use_errno=True)  # mmap.madvise holds the GIL, which would stop the caller for seconds
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_AT_ONCE = 64 << 20
"""Bytes faulted in by one call: between two the kernel can kill us, and a cgroup can reclaim."""


def create(path: str, nbytes: int) -> int:
    """A new file of `nbytes` that has all its memory already; gives its descriptor. Leaves no file where it fails.

    Raises OSError (ENOSPC, EACCES, EEXIST …): the caller knows the arithmetic that a reader needs.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a store into a page that cannot be had would be SIGBUS much later
    except BaseException:
        os.unlink(path)
        os.close(fd)
        raise
    return fd


def open_slot(path: str, *, writable: bool = False) -> int:
    """A descriptor of an existing slot file. Raises OSError."""
    return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)


def map_slot(fd: int, *, writable: bool = False) -> mmap.mmap:
    """The whole file, shared with all who map it. Raises CorruptCheckpointError where it is too short for a header."""
    size = os.fstat(fd).st_size
    if size < DATA_START:
        raise CorruptCheckpointError(f"the slot is cut short: {size} bytes do not hold a header")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(fd, size, mmap.MAP_SHARED, protection)


def populate(mapped: mmap.mmap) -> None:
    """Fault in every page of a writable map, so that no later store waits for the kernel. Changes no byte.

    Releases the GIL. Raises HostError where there is not enough memory.
    """
    size = len(mapped)
    with memoryview(mapped) as view:
        first = ctypes.c_char.from_buffer(view)
        try:
            start = ctypes.addressof(first)
            for at in range(0, size, _AT_ONCE):
                length = min(_AT_ONCE, size - at)
                if _populate(start + at, length) == errno.EINVAL:  # an older kernel: by hand
                    _touch(view[at : at + length])
        finally:
            del first


def _populate(address: int, length: int) -> int:
    """0, or EINVAL where the kernel does not know it."""
    while _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
        problem = ctypes.get_errno()
        if problem == errno.EINVAL:
            return problem
        if problem not in (errno.EINTR, errno.EAGAIN):
            raise HostError(
                f"{length} bytes of a slot cannot be faulted in: {os.strerror(problem).lower()}; free some memory"
            )
    return 0


def _touch(view: memoryview) -> None:
    """Write one byte of each page with what it holds. Only for maps that nobody else writes at this time."""
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = view[at]
    view.release()


# --- headers ---------------------------------------------------------------------------------------------------------


def read_header(fd: int) -> SlotHeader:
    """The newest valid header. Raises CorruptCheckpointError."""
    try:
        return decode_header(os.pread(fd, 2 * HEADER, 0), os.fstat(fd).st_size)
    except OSError as exc:
        raise CorruptCheckpointError(
            f"the slot's header cannot be read: {os.strerror(exc.errno or 0).lower()}"
        ) from exc


def write_header(fd: int, header: SlotHeader) -> SlotHeader:
    """Store `header` as the successor of the present one: its sequence number is one more than `header.sequence`.

    Gives what was written. The other one of the two places keeps what it has, should this write be torn.
    """
    newer = msgspec.structs.replace(header, sequence=header.sequence + 1)
    data, start = encode_header(newer), header_start(newer.sequence)
    if os.pwrite(fd, data, start) != HEADER:
        raise HostError("a slot's header could not be written whole")
    return newer


def read_layout(fd: int, header: SlotHeader) -> Layout:
    """Raises CorruptCheckpointError where it is not one."""
    return decode_layout(os.pread(fd, header.layout_bytes, header.layout_start))


def decode_layout(text: bytes) -> Layout:
    """Raises CorruptCheckpointError."""
    try:
        return msgspec.json.decode(text, type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptCheckpointError(f"the slot's layout cannot be read: {exc}") from exc


def read_digests(fd: int, header: SlotHeader) -> bytes:
    """HASH bytes per chunk, as they were stored with SEALED."""
    digests = os.pread(fd, header.chunks * HASH, header.hashes_start)
    if len(digests) != header.chunks * HASH:
        raise CorruptCheckpointError("the slot is cut short: its hashes are not all there")
    return digests
