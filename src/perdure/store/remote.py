"""A store behind fsspec: s3, gs, az, memory and whatever else it knows. No renames: written in place, committed by an
object that comes last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, BinaryIO, cast

import fsspec  # type: ignore[import-untyped]

from perdure.errors import ConfigError, HostError, PerdureError
from perdure.store.medium import Entry, reason_of
from perdure.store.sink import Pace, Sink
from perdure.vocab.units import Bytes, Instant


def open_remote(address: str) -> "Remote":
    """Raises ConfigError: no such protocol, a library that is not installed, a URL that it does not understand."""
    try:
        files, root = fsspec.core.url_to_fs(address)
    except (ValueError, ImportError, TypeError) as exc:
        raise ConfigError(f"the store {address} cannot be opened: {' '.join(str(exc).split())}") from exc
    except Exception as exc:  # what its library raises is not ours to know
        raise HostError(f"the store {address} cannot be opened: {reason_of(exc)}") from exc
    return Remote(address, files, root)


class Remote:
    """See `Medium`."""

    can_rename = False

    def __init__(self, address: str, files: Any, root: str) -> None:
        """`files`: an fsspec file system; `root`: the address without the protocol."""
        self.address = address
        self._files = files
        self._root = root.rstrip("/")

    def entries(self, folder: str = "") -> tuple[Entry, ...]:
        return tuple(sorted(self._listed(self._path(folder)), key=lambda entry: entry.name))

    def files(self, folder: str) -> dict[str, Entry]:
        found = {}
        for entry in self.entries(folder):
            if not entry.is_folder:
                found[entry.name] = entry
                continue
            for below in self._listed(self._path(f"{folder}/{entry.name}")):
                if not below.is_folder:
                    found[f"{entry.name}/{below.name}"] = below
        return found

    def open(self, path: str) -> BinaryIO:
        with self._said_plainly("read", is_read=True):
            return cast(BinaryIO, self._files.open(self._path(path), "rb"))

    def create(self, path: str, pace: Pace) -> Sink:
        with self._said_plainly("write to"):
            return Sink(path.partition("/")[2] or path, _Upload(self, self._path(path)), pace)

    def make(self, folder: str) -> None:
        """Most stores have no folders, and keep none that is empty."""
        with self._said_plainly("write to"):
            self._files.makedirs(self._path(folder), exist_ok=True)

    def settle(self, folder: str) -> None:
        """An object that was closed is durable."""

    def move(self, folder: str, to: str) -> None:
        raise HostError(f"the store {self.address} cannot rename {folder} to {to}")

    def remove(self, path: str) -> None:
        """What makes it count goes first: without COMMIT the rest is nothing."""
        with self._said_plainly("remove from"):
            full = self._path(path)
            for first in ("COMMIT", "manifest.json"):
                self._remove_one(f"{full}/{first}", recursive=False)
            self._remove_one(full, recursive=True)
            self._files.invalidate_cache()

    def free(self) -> Bytes | None:
        return None

    def open_target(self, path: str) -> Any:
        with self._said_plainly("write to"):
            return self._files.open(path, "wb")

    def _remove_one(self, path: str, *, recursive: bool) -> None:
        try:
            self._files.rm(path, recursive=recursive)
        except FileNotFoundError:
            return

    def _listed(self, path: str) -> Iterator[Entry]:
        with self._said_plainly("list"):
            self._files.invalidate_cache()  # another node has written meanwhile
            try:
                found = self._files.ls(path, detail=True)
            except FileNotFoundError:
                return
            for item in found:
                name = str(item["name"]).rstrip("/").rpartition("/")[2]
                if name and str(item["name"]).rstrip("/") != path:  # some list the folder itself
                    yield Entry(
                        name=name,
                        nbytes=int(item.get("size") or 0),
                        is_folder=item.get("type") == "directory",
                        changed=_changed(item),
                    )

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _said_plainly(self, what: str, *, is_read: bool = False) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            if is_read:
                raise
            raise HostError(f"cannot {what} the store {self.address}: there is no such bucket or folder") from exc
        except PerdureError:
            raise
        except Exception as exc:  # each library behind fsspec has errors of its own
            raise HostError(f"cannot {what} the store {self.address}: {reason_of(exc)}") from exc


class _Upload:
    """A `Target`: one object, there when it is closed. Opened at its first byte, so that nothing is left of none."""

    def __init__(self, store: Remote, path: str) -> None:
        self._store = store
        self._path = path
        self._file = store.open_target(path)

    def write(self, data: memoryview) -> None:
        # bytes: some writers keep what they are given, and this memory is another's soon
        with self._store._said_plainly("write to"):
            self._file.write(bytes(data))

    def finish(self) -> None:
        with self._store._said_plainly("write to"):
            self._file.close()

    def discard(self) -> None:
        drop = getattr(self._file, "discard", None)
        if drop is not None:
            with self._store._said_plainly("write to"):
                drop()


def _changed(item: dict[str, Any]) -> Instant | None:
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = item.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None
