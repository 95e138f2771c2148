"""Fault points: with this folder on PYTHONPATH a process dies at a named point of the code, when a test has armed it.

The code itself is not changed and knows nothing of it: functions are wrapped when their module has been imported, and
file operations in the store are seen by an audit hook. Which point, who dies and at which visit is in one file, which
the first process to come there takes away by renaming it: so one arming is one strike. Standard library only.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("FAULTS", "")
ARMED, STRUCK = f"{FOLDER}/armed", f"{FOLDER}/struck"
STORE = os.environ.get("FAULTS_STORE", "")
AROUND = {
    "perdure.trainer.checkpoint.seat": {"Copying.put": "trainer.copy", "Copying.end": "trainer.written"},
    "perdure.trainer.checkpoint.client": {"MemoryClient.restore": "trainer.question"},
    "perdure.trainer.checkpoint.state": {"State.put": "trainer.restore"},
    "perdure.agent.memory.seal": {"seal": "server.seal"},
    "perdure.agent.memory.files": {"SlotFile.put": "server.header"},
    "perdure.agent.memory.transfer": {"_offer": "server.offer"},
    "perdure.agent.memory.shelf": {"_fill": "server.replica"},
    "perdure.agent.memory.pieces": {"receive_chunks": "server.chunks"},
    "perdure.agent.memory.report": {"Reporter.make": "server.report"},
    "perdure.agent.memory.tier": {"Tier.apply": "server.orders"},
    "perdure.trainer.checkpoint.part": {"write": "drain.part", "finish": "drain.metadata"},
    "perdure.store.checkpoints": {"begin": "store.begin", "commit": "store.commit"},
    "perdure.store.retention": {"retain": "store.retention"},
    "perdure.control.memory_door": {"MemoryDoor.become": "control.saves", "MemoryDoor.answer": "control.report"},
}
"""Function by module, and the point: `NAME.before` and `NAME.after` it."""
FILES = {
    "open": "file.open",
    "os.rename": "file.rename",
    "os.mkdir": "file.mkdir",
    "os.remove": "file.remove",
    "os.rmdir": "file.rmdir",
}
"""Operations in the store, by audit event; the point is just before."""
_visits: dict[int, int] = {}


def visit(point: str) -> None:
    """Die here, if this is the point."""
    try:
        with open(ARMED, "rb") as file:
            armed = json.load(file)
    except (OSError, ValueError):
        return
    if point != armed["point"]:
        return
    visits = _visits[armed["id"]] = _visits.get(armed["id"], 0) + 1
    if visits <= armed["skip"]:
        return
    try:
        os.rename(ARMED, f"{STRUCK}-{armed['id']}.new")
    except OSError:
        return  # another one was faster
    victims = victims_of(armed["who"])
    with open(f"{STRUCK}-{armed['id']}.new", "w", encoding="utf-8") as file:
        json.dump({**armed, "by": os.getpid(), "victims": victims}, file)
    os.rename(f"{STRUCK}-{armed['id']}.new", f"{STRUCK}-{armed['id']}")
    strike(victims, is_node=armed["who"] == "node")


def victims_of(who: str) -> list[int]:
    """Own process, its node's agent (all below die with it), or all of the node at once."""
    if who == "self":
        return [os.getpid()]
    agent = agent_above(os.getpid())
    return [agent, *below(agent)] if who == "node" else [agent]


def strike(victims: Sequence[int], *, is_node: bool) -> None:
    """A node that loses power loses its memory too."""
    others = [pid for pid in victims if pid != os.getpid()]
    if is_node:
        for pid in others:
            kill(pid, signal.SIGSTOP)  # else what the kernel clears up would be seen as events
        for folder in {folder for pid in victims for folder in slot_folders(pid)}:
            shutil.rmtree(folder, ignore_errors=True)
    for pid in others:
        kill(pid, signal.SIGKILL)
    if os.getpid() in victims or is_node:
        os.kill(os.getpid(), signal.SIGKILL)


def agent_above(pid: int) -> int:
    """The agent of the node to which process `pid` belongs."""
    while pid > 1:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if b"perdure.cli.agent" in words:
            return pid
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    raise RuntimeError("no agent is above this process")


def below(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", encoding="utf-8") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                queue += children
        except OSError:
            continue
    return found


def slot_folders(pid: int) -> set[str]:
    """Folders of slots in which process `pid` has open files."""
    found = set()
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{entry}")
            if path.startswith("/dev/shm/perdure-"):
                found.add(os.path.dirname(path))
    except OSError:
        return found
    return found


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- where the points are --------------------------------------------------------------------------------------------


def around(function: Callable[..., Any], point: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_points(*args: Any, **kwargs: Any) -> Any:
        visit(f"{point}.before")
        given = function(*args, **kwargs)
        visit(f"{point}.after")
        return given

    return with_points


class Loader(importlib.abc.Loader):
    """Executes a module as its own loader does, then puts the points into it."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for path, point in AROUND[module.__name__].items():
            *owners, name = path.split(".")
            owner: Any = functools.reduce(getattr, owners, module)
            setattr(owner, name, around(getattr(owner, name), point))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # get_source and the like


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have points."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AROUND:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)
        return spec


def watch_files(event: str, arguments: tuple[Any, ...]) -> None:
    point = FILES.get(event)
    if point is not None and isinstance(arguments[0], str) and arguments[0].startswith(STORE):
        visit(point)


if FOLDER:
    sys.meta_path.insert(0, Finder())
    if STORE:
        sys.addaudithook(watch_files)
