"""A store in a folder of this machine or of a mounted file system. Follows no symbolic link below it."""

import errno
import os
import secrets
import shutil
import stat
from typing import BinaryIO

from perdure.store.medium import Entry, said_plainly
from perdure.store.sink import DiskFile, Pace, Sink
from perdure.vocab.units import Bytes

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """See `Medium`."""

    can_rename = True

    def __init__(self, root: str) -> None:
        self.address = root

    def entries(self, folder: str = "") -> tuple[Entry, ...]:
        with said_plainly("list", self.address):
            try:
                with os.scandir(self._path(folder)) as found:
                    listed = [entry for item in found if (entry := _entry(item)) is not None]
            except FileNotFoundError:
                return ()
        return tuple(sorted(listed, key=lambda entry: entry.name))

    def files(self, folder: str) -> dict[str, Entry]:
        found = {}
        for entry in self.entries(folder):
            if not entry.is_folder:
                found[entry.name] = entry
                continue
            for below in self.entries(f"{folder}/{entry.name}"):
                if not below.is_folder:  # a checkpoint has folders of one level
                    found[f"{entry.name}/{below.name}"] = below
        return found

    def open(self, path: str) -> BinaryIO:
        with said_plainly("read", self.address):
            *folders, name = path.split("/")
            at = os.open(self.address, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for folder in folders:
                    below = os.open(folder, _FOLDER, dir_fd=at)
                    os.close(at)
                    at = below
                # not blocking: a named pipe in the place of a file must not hold us
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # a link, a device: no file of ours
                    raise FileNotFoundError(path) from exc
                raise
            finally:
                os.close(at)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise FileNotFoundError(path)
            return os.fdopen(fd, "rb")

    def create(self, path: str, pace: Pace) -> Sink:
        with said_plainly("write to", self.address):
            return Sink(path.partition("/")[2] or path, DiskFile(self._path(path)), pace)

    def make(self, folder: str) -> None:
        with said_plainly("write to", self.address, passing=()):
            path = self._path(folder)
            missing = []
            while not os.path.isdir(path):
                missing.append(path)
                path = os.path.dirname(path)
            os.makedirs(self._path(folder), exist_ok=True)
            for made in missing:
                _sync_folder(os.path.dirname(made))

    def settle(self, folder: str) -> None:
        with said_plainly("write to", self.address):
            _sync_folder(self._path(folder))

    def move(self, folder: str, to: str) -> None:
        with said_plainly("write to", self.address):
            if os.path.lexists(self._path(to)):  # rename(2) would take the place of an empty folder
                raise FileExistsError(to)
            os.rename(self._path(folder), self._path(to))
            _sync_folder(self.address)

    def remove(self, path: str) -> None:
        """A folder is moved aside first, so that a half removed one has no name that anyone looks for."""
        with said_plainly("remove from", self.address):
            full = self._path(path)
            try:
                if not stat.S_ISDIR(os.lstat(full).st_mode):
                    os.unlink(full)
                    return
                trash = full
                if not os.path.basename(full).startswith(".trash-"):
                    trash = f"{os.path.dirname(full)}/.trash-{os.path.basename(full)}.{secrets.token_hex(4)}"
                    os.rename(full, trash)
            except FileNotFoundError:
                return
            shutil.rmtree(trash, onerror=_unless_gone)

    def free(self) -> Bytes | None:
        path = self.address
        while not os.path.isdir(path) and path != "/":
            path = os.path.dirname(path)
        with said_plainly("look at", self.address):
            usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize

    def _path(self, path: str) -> str:
        return os.path.join(self.address, path) if path else self.address


def _entry(item: os.DirEntry[str]) -> Entry | None:
    """None for links, devices, pipes, and for what has gone since it was listed."""
    try:
        status = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        return None
    is_folder = stat.S_ISDIR(status.st_mode)
    return Entry(name=item.name, nbytes=status.st_size, is_folder=is_folder, changed=status.st_mtime)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unless_gone(_function: object, _path: str, problem: tuple[type[BaseException], BaseException, object]) -> None:
    """Two may remove the same folder (threads SimpleTuner 2989, transformers 20988)."""
    if not isinstance(problem[1], FileNotFoundError):
        raise problem[1]
