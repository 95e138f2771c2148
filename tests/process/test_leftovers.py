"""What is left when a job has ended, however it ended: nothing. No process, no port, no shared memory, no file.

The one thing that is not promised: a worker's child that has made a session of its own lives on when launcher and
agent are killed in the same instant, since then nobody is left who knows of it.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.jobs import Job, descendants, processes_of, running, script, wait_until

PLAIN = (script("plain.py"), "--out", "out", "--child")
WITHIN = 10.0


def listening(pids: list[int]) -> set[str]:
    """Inodes of the sockets on which `pids` listen."""
    sockets = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        sockets |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    return sockets & all_listening()


def all_listening() -> set[str]:
    """Inodes of all TCP sockets of this machine that listen."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


@pytest.fixture
def own_shm(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """(words before a command, folder): a /dev/shm of its own; others on this machine make files in theirs."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        pytest.skip("a /dev/shm of its own needs root and nsenter")
    mounted = "mount -t tmpfs shm /dev/shm && echo && exec sleep 1000"
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "\n", "no tmpfs could be mounted"
            enter = [
                "nsenter",
                "--mount",
                "--target",
                str(holder.pid),
                "sh",
                "-c",
                'cd "$0" && exec "$@"',
                str(tmp_path),
            ]
            yield enter, Path(f"/proc/{holder.pid}/root/dev/shm")
        finally:
            holder.kill()


def wait_children(folder: Path, ranks: int) -> None:
    """Until every rank has told of the child that it has left behind."""
    wait_until(lambda: all((folder / "out" / f"rank-{rank}.jsonl").exists() for rank in range(ranks)))


def end_normally(job: Job) -> None:
    return None  # --steps does it


def interrupt(job: Job) -> None:
    job.interrupt(signal.SIGINT)


def kill_launcher(job: Job) -> None:
    job.process.kill()


def kill_agent(job: Job) -> None:
    os.kill(job.agent("node-0"), signal.SIGKILL)
    job.wait_stepping(2)
    job.interrupt()


def kill_control(job: Job) -> None:
    os.kill(job.control(), signal.SIGKILL)
    job.interrupt()


@pytest.mark.parametrize("how", [end_normally, interrupt, kill_launcher, kill_agent, kill_control])
def test_nothing_is_left_within_ten_seconds(
    tmp_path: Path, own_shm: tuple[list[str], Path], how: Callable[[Job], None]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    enter, shared_memory = own_shm
    ends = how is end_normally
    words = ("--local-nodes", "2", "--nproc-per-node", "2", *PLAIN, "--steps", "10" if ends else "1000000")
    with running(tmp_path, *words, env={"TMPDIR": str(temporary)}, prefix=enter) as job:
        wait_children(tmp_path, 4)
        sockets: set[str] = set()
        if not ends:
            job.wait_stepping(1)
            sockets = listening([job.process.pid, *descendants(job.process.pid)])
            assert len(sockets) >= 4  # control, two agents, the store
        how(job)
        job.end()
        began = time.monotonic()
        wait_until(lambda: not processes_of(job.home), seconds=WITHIN)
        assert sockets.isdisjoint(all_listening())
        assert time.monotonic() - began < WITHIN
        assert list(shared_memory.iterdir()) == []
        assert list(temporary.iterdir()) == []
        assert not list(job.folder.glob("*.new"))


def test_fixed_port_can_be_used_again_at_once(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ("--master-port", port, script("plain.py"), "--out", "out", "--steps", "2")
    for name in ("one", "two"):
        with running(tmp_path, *words, name=name) as job:
            assert job.end() == 0
