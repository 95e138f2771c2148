"""Where checkpoints are kept: a folder of this machine, or anything that fsspec has a name for.

Knows folders, files and how to make them durable; not what a checkpoint is. Every failure is one sentence.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

import msgspec

from perdure.errors import ConfigError, CorruptCheckpointError, HostError, PerdureError
from perdure.store.sink import Pace, Sink
from perdure.vocab.units import Bytes, Instant


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file or a folder in a listing."""

    name: str
    """Relative to the folder that was listed."""
    nbytes: Bytes
    is_folder: bool
    changed: Instant | None
    """None: the store does not tell."""


class Medium(Protocol):
    """All paths are relative to the address, with `/` between their parts; the caller has checked them."""

    address: str
    can_rename: bool
    """Whether a folder gets another name in one step, whoever dies meanwhile."""

    def entries(self, folder: str = "") -> tuple[Entry, ...]:
        """What lies directly in it; nothing, where there is no such folder."""
        ...

    def files(self, folder: str) -> dict[str, Entry]:
        """All files below it, by their relative name."""
        ...

    def open(self, path: str) -> BinaryIO:
        """For reading, seekable. Raises FileNotFoundError; other failures are HostErrors."""
        ...

    def create(self, path: str, pace: Pace) -> Sink:
        """A new file that replaces one of that name when it is finished."""
        ...

    def make(self, folder: str) -> None:
        """With the folders above it; it may exist already."""
        ...

    def settle(self, folder: str) -> None:
        """What was created in it has its name, whatever happens to the machine."""
        ...

    def move(self, folder: str, to: str) -> None:
        """Only where `can_rename`. Durable. Raises FileExistsError where there is one."""
        ...

    def remove(self, path: str) -> None:
        """A file, or a folder with all in it. It may be gone already, or be removed by another meanwhile."""
        ...

    def free(self) -> Bytes | None:
        """Bytes that can still be written; None: unknown."""
        ...


_ADVICE = {
    errno.ENOSPC: "free some space on it",
    errno.EDQUOT: "free some space on it, or have your quota raised",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "it is mounted read-only",
    errno.ENOTDIR: "a file is in the way",
    errno.EEXIST: "a file is in the way",
    errno.ESTALE: "its server has lost it; mount it anew",
    errno.ETIMEDOUT: "its server does not answer",
}


_KNOWN: tuple[type[OSError], ...] = (FileNotFoundError, FileExistsError)


@contextmanager
def said_plainly(what: str, address: str, passing: tuple[type[OSError], ...] = _KNOWN) -> Iterator[None]:
    """Turns OSErrors into one HostError. A file that is not there, or is, passes: the caller knows what it means."""
    try:
        yield
    except PerdureError:
        raise
    except passing:
        raise
    except OSError as exc:
        raise HostError(f"cannot {what} the store {address}: {reason_of(exc)}") from exc


_REFUSALS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
_REFUSED_STATUS = frozenset({"401", "403"})


def is_lasting(exc: BaseException | None) -> bool:
    """Whether a store refuses for a reason that only people can take away: permissions, a file in the way, a URL."""
    if exc is None or isinstance(exc, CorruptCheckpointError):
        return False
    if isinstance(exc, ConfigError | FileExistsError | FileNotFoundError):
        return True  # what is to be written cannot be missing: the bucket is, or the folder cannot be made
    if isinstance(exc, OSError) and exc.errno is not None:
        return exc.errno in _REFUSALS
    # Libraries behind fsspec have errors of their own: NoCredentialsError, ClientAuthenticationError, HttpError …
    name = type(exc).__name__.lower()
    status = {str(getattr(exc, each, "")) for each in ("status", "status_code", "code")}
    refused = isinstance(exc, PermissionError) or "credential" in name or "authenticat" in name
    return refused or bool(status & _REFUSED_STATUS) or is_lasting(exc.__cause__)


def reason_of(exc: BaseException) -> str:
    """In a clause, with what to do where that is known."""
    number = exc.errno if isinstance(exc, OSError) else None
    text = os.strerror(number).lower() if number else " ".join(str(exc).split())[:200]
    if isinstance(exc, TimeoutError) and not number:
        text = "it did not answer in time"
    words = text or type(exc).__name__
    return f"{words}; {_ADVICE[number]}" if number in _ADVICE else words
