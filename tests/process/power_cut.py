"""What a disk may hold after its power was cut: the file operations of a program are noted, and replayed in part.

A file's bytes are safe once it was synced, a name once its folder was. Everything else may be lost or kept, in any
combination: that is more than what ext4 or XFS do, and no less than what POSIX allows.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Tree = Mapping[str, bytes | None]
"""Contents by path; None: a folder."""


class Did(NamedTuple):
    """One file operation, on paths relative to the watched folder; or a word of the program's own."""

    what: str
    path: str
    other: str = ""
    data: bytes = b""


@contextmanager
def noted(root: Path, patch: pytest.MonkeyPatch) -> Iterator[list[Did]]:
    """All that this process does below `root`, while it does it. Nothing is changed by that."""
    notes = _Notes(root)
    with patch.context() as within:
        for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
            within.setattr(os, name, getattr(notes, name))
        yield notes.did


class _Notes:
    """The functions of `os` that change a folder; each does what it did, and notes it."""

    def __init__(self, root: Path) -> None:
        self.did: list[Did] = []
        self._root = str(root)
        self._open, self._write, self._fsync, self._rename = os.open, os.write, os.fsync, os.rename
        self._mkdir, self._unlink, self._rmdir = os.mkdir, os.unlink, os.rmdir

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = self._open(path, flags, mode, dir_fd=dir_fd)
        if is_new:
            self._note("create", path, dir_fd)
        return fd

    def write(self, fd: int, data: Any) -> int:
        done = self._write(fd, data)
        self._note("write", _path_of(fd), data=bytes(memoryview(data)[:done]))
        return done

    def fsync(self, fd: int) -> None:
        self._fsync(fd)
        path = _path_of(fd)
        self._note("sync folder" if os.path.isdir(path) else "sync file", path)

    def rename(self, source: Any, target: Any) -> None:
        self._rename(source, target)
        self._note("rename", source, other=target)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._mkdir(path, mode, dir_fd=dir_fd)
        self._note("mkdir", path, dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._unlink(path, dir_fd=dir_fd)
        self._note("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._rmdir(path, dir_fd=dir_fd)
        self._note("unlink", path, dir_fd)

    def _note(self, what: str, path: Any, dir_fd: int | None = None, *, other: Any = "", data: bytes = b"") -> None:
        whole = os.path.abspath(os.fspath(path) if dir_fd is None else os.path.join(_path_of(dir_fd), path))
        if whole == self._root or whole.startswith(f"{self._root}/"):
            to = os.path.relpath(other, self._root) if other else ""
            self.did.append(Did(what, os.path.relpath(whole, self._root), to, data))


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class _Node:
    """A file or a folder, whatever it is called."""

    def __init__(self, number: int, data: bytes | None) -> None:
        self.number, self.data, self.safe = number, data, data is not None and len(data)


class _Change(NamedTuple):
    """An entry of a folder that comes (`node`) or goes; a rename is both, in one."""

    at: int
    folders: frozenset[int]
    gone: tuple[int, str] | None
    come: tuple[int, str] | None
    node: int


class Disk:
    """A folder as it was, and what has been done to it since."""

    def __init__(self, before: Tree) -> None:
        self._numbers = count(1)
        self._nodes = {0: _Node(0, None)}
        self._first: dict[int, dict[str, int]] = {0: {}}
        for path, data in sorted(before.items()):
            self._add(self._first, path, data)
        self._now = {number: dict(entries) for number, entries in self._first.items()}
        self._changes: list[_Change] = []
        self._safe: set[int] = set()
        """Numbers of changes that are synced."""

    def do(self, did: Did) -> None:
        match did.what:
            case "create" | "mkdir":
                parent, name = self._find(did.path)
                node = self._new(b"" if did.what == "create" else None)
                self._now[parent][name] = node.number
                self._now.setdefault(node.number, {})
                self._change(None, (parent, name), node.number)
            case "write":
                node = self._nodes[self._node(did.path)]
                node.data = (node.data or b"") + did.data
            case "sync file" | "sync folder":
                self._sync(self._node(did.path))
            case "rename":
                source, target = self._find(did.path), self._find(did.other)
                number = self._now[source[0]].pop(source[1])
                self._now[target[0]][target[1]] = number
                self._change(source, target, number)
            case "unlink":
                parent, name = self._find(did.path)
                self._change((parent, name), None, self._now[parent].pop(name))

    def after_cuts(self, dice: random.Random) -> Iterator[Tree]:
        """What may be there, should the power go now."""
        pending = [change.at for change in self._changes if change.at not in self._safe]
        kept: list[set[int]] = [set(pending[:cut]) for cut in range(len(pending) + 1)]  # a journal, in its order
        kept += [set(pending) - {one} for one in pending] + [{one} for one in pending]
        kept += [{one for one in pending if dice.random() < 0.5} for _ in range(4)]
        for lost in (_nothing, _half, _zeros, _all):
            for some in kept:
                yield self._tree(some | self._safe, lost)

    def _tree(self, kept: set[int], lost: Callable[[bytes, int], bytes]) -> Tree:
        entries = {number: dict(names) for number, names in self._first.items()}
        for change in self._changes:
            if change.at in kept:
                if change.gone is not None and entries.get(change.gone[0], {}).get(change.gone[1]) == change.node:
                    del entries[change.gone[0]][change.gone[1]]
                if change.come is not None:
                    entries.setdefault(change.come[0], {})[change.come[1]] = change.node
        found: dict[str, bytes | None] = {}

        def walk(folder: int, path: str) -> None:
            for name, number in entries.get(folder, {}).items():
                node = self._nodes[number]
                found[path + name] = None if node.data is None else lost(node.data, int(node.safe))
                if node.data is None:
                    walk(number, f"{path}{name}/")

        walk(0, "")
        return found

    def _sync(self, number: int) -> None:
        node = self._nodes[number]
        if node.data is not None:
            node.safe = len(node.data)
        self._safe |= {change.at for change in self._changes if number in change.folders}

    def _change(self, gone: tuple[int, str] | None, come: tuple[int, str] | None, node: int) -> None:
        folders = frozenset(place[0] for place in (gone, come) if place is not None)
        self._changes.append(_Change(len(self._changes), folders, gone, come, node))

    def _find(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._node(folder), name

    def _node(self, path: str) -> int:
        at = 0
        for name in path.split("/") if path not in ("", ".") else ():
            at = self._now[at][name]
        return at

    def _new(self, data: bytes | None) -> _Node:
        node = _Node(next(self._numbers), data)
        self._nodes[node.number] = node
        return node

    def _add(self, entries: dict[int, dict[str, int]], path: str, data: bytes | None) -> None:
        at = 0
        *folders, name = path.split("/")
        for folder in folders:
            at = entries[at][folder]
        node = self._new(data)
        entries[at][name] = node.number
        entries.setdefault(node.number, {})


def tree_of(root: Path) -> Tree:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def laid_out(tree: Tree, root: Path) -> Path:
    """A folder that holds it."""
    root.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
    return root


def cuts(before: Tree, did: Iterable[Did], seed: int = 1) -> Iterator[tuple[int, Tree]]:
    """(operations done, what may be left then), each different one once."""
    disk, dice = Disk(before), random.Random(seed)
    seen: set[tuple[object, ...]] = set()
    words = ""
    for number, one in enumerate((Did("say", ""), *did)):
        words += one.path if one.what == "say" else ""
        disk.do(one)
        for tree in disk.after_cuts(dice):
            key = (words, *sorted((path, hash(data)) for path, data in tree.items()))
            if key not in seen:
                seen.add(key)
                yield number, tree


def _nothing(data: bytes, safe: int) -> bytes:
    return data[:safe]


def _half(data: bytes, safe: int) -> bytes:
    return data[: safe + (len(data) - safe) // 2]


def _zeros(data: bytes, safe: int) -> bytes:
    return data[:safe] + bytes(len(data) - safe)


def _all(data: bytes, safe: int) -> bytes:
    return data
