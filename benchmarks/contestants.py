"""The launchers that are compared, and how each is started for a case. Nothing about faults or statistics."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launchers import OURS, TORCHRUN, WORKERS, Running, free_port, wait_for_port

START_WITHIN = 90.0  # seconds for imports on a busy machine
PLENTY = "100000"  # restarts: the budget is not what is measured
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Setting:
    """What a case asks of every launcher."""

    ranks: int
    nodes: int = 1
    """Above 1: that many nodes on this machine, and one spare."""
    slow_library: bool = False
    timeout: float = 30.0
    """Of collectives, in seconds."""

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True)
class Contestant:
    name: str
    start: Callable[[Setting], Running]
    ours: bool = False


def _library(setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that make the worker import the slow library, from a folder like site-packages."""
    if not setting.slow_library:
        return [], {}
    folder = Path(tempfile.gettempdir()) / f"perdure-bench-library-{os.getpid()}" / "site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WORKERS / "slow_library.py", folder)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return ["--library", "slow_library"], {"PYTHONPATH": path}


def remove_library() -> None:
    shutil.rmtree(Path(tempfile.gettempdir()) / f"perdure-bench-library-{os.getpid()}", ignore_errors=True)


def _job(setting: Setting, env: dict[str, str]) -> Running:
    arguments, library_env = _library(setting)
    return Running("allreduce.py", ["--timeout", str(setting.timeout), *arguments], {**env, **library_env})


def start_ours(setting: Setting) -> Running:
    job = _job(setting, {})
    flags = ["--nproc-per-node", str(setting.per_node), "--max-restarts", PLENTY]
    if setting.nodes > 1:
        flags += ["--nnodes", str(setting.nodes), "--spares", "1", "--local-nodes", str(setting.nodes + 1)]
    if setting.slow_library:
        flags += ["--preload", "slow_library"]
    job.start([*OURS, *flags])
    return job


def start_torchrun(setting: Setting, env: dict[str, str]) -> Running:
    job = _job(setting, env)
    if setting.nodes == 1:
        flags = ["--standalone", "--nproc-per-node", str(setting.ranks), "--max-restarts", PLENTY]
        job.start([*TORCHRUN, *flags])
        return job
    port = free_port()
    flags = ["--nnodes", str(setting.nodes), "--nproc-per-node", str(setting.per_node), "--max-restarts", PLENTY]
    flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "bench"]
    flags += ["--local-addr", "127.0.0.1"]
    for number in range(setting.nodes + 1):  # the first hosts the rendezvous, the last finds no place and waits
        job.start([*TORCHRUN, *flags])
        if number == 0 and not wait_for_port(port, START_WITHIN):
            break
        if number == setting.nodes - 1:
            time.sleep(5)  # torchrun tells nobody when a rendezvous is complete
    return job


OURSELVES = Contestant("perdure", start_ours, ours=True)
AS_SHIPPED = Contestant("torchrun", lambda setting: start_torchrun(setting, {}))
WITHOUT_SHARING = Contestant("torchrun, store not shared", lambda setting: start_torchrun(setting, UNSHARED))
