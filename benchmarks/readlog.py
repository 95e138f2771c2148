"""Our event log as the benchmarks read it: find it, wait for a record. torchrun keeps none: there they wait a while."""

import time
from collections.abc import Callable
from pathlib import Path

from launchers import Running
from perdure.errors import EventLogError
from perdure.ports import LogRecord
from perdure.store.eventlog import open_reader
from perdure.vocab.event import NodeReady

PEER_SETTLES = 5.0  # seconds: torchrun's waiting agent tells nobody that it waits


def event_log(home: Path) -> Path | None:
    """The newest job's log under `home`; None while there is none."""
    logs = sorted(home.glob("jobs/*/events.db"), key=lambda path: path.stat().st_mtime)
    return logs[-1] if logs else None


def read_log(home: Path) -> list[LogRecord]:
    path = event_log(home)
    if path is None:
        return []
    try:
        log = open_reader(str(path))
    except EventLogError:
        return []  # being made at this moment
    try:
        return [record for _, record in log.read()]
    finally:
        log.close()


def wait_for(home: Path, condition: Callable[[list[LogRecord]], bool], within: float) -> bool:
    """Wait until the log under `home` holds what `condition` asks for."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition(read_log(home)):
            return True
        time.sleep(0.1)
    return False


def wait_for_spare(job: Running, nodes: int, ours: bool) -> None:
    """Wait until `nodes` nodes can start workers."""
    if not ours:
        time.sleep(PEER_SETTLES)
        return
    if not wait_for(job.home, lambda log: len({r.node for r in log if isinstance(r, NodeReady)}) >= nodes, 60):
        raise SystemExit(f"{nodes} nodes were not ready within 60 s:\n{job.output()}")
