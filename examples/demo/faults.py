"""The three faults of the demo: each picks its victims from the job's own record of processes and sends signals."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from watch import Watch


class Fault(NamedTuple):
    title: str
    strike: Callable[[Watch, random.Random], str]
    """Does it, and says to whom."""


def _family(pid: int) -> list[int]:
    """`pid` and everything below it, parents first; what has ended meanwhile is left out."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(int(child)))]


def _signal(pids: list[int], by: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, by)
        except ProcessLookupError:
            continue  # it followed its parent before its turn came


def kill_worker(watch: Watch, dice: random.Random) -> str:
    rank, pid = dice.choice(sorted(watch.workers().items()))
    _signal([pid], signal.SIGKILL)
    return f"SIGKILL to rank {rank} (pid {pid})"


def freeze_worker(watch: Watch, dice: random.Random) -> str:
    rank, pid = dice.choice(sorted(watch.workers().items()))
    _signal([pid], signal.SIGSTOP)
    return f"SIGSTOP to rank {rank} (pid {pid}): it hangs, and so does everybody who waits for it"


def kill_node(watch: Watch, dice: random.Random) -> str:
    assignment = watch.assignment()
    if assignment is None:
        raise RuntimeError("there is no generation whose node could be killed")
    member = dice.choice(assignment.members)
    agent = watch.agent(member.node)
    # The agent first: it must not see its workers end and report that.
    _signal(_family(agent), signal.SIGKILL)
    ranks = " and ".join(str(rank) for rank in member.ranks)
    return f"SIGKILL to all of node {member.node}: its agent (pid {agent}), ranks {ranks} and what else runs there"


FAULTS = (
    Fault("a worker is killed", kill_worker),
    Fault("a worker freezes", freeze_worker),
    Fault("a node is lost", kill_node),
)
