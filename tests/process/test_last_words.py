"""The end of a job whose newest checkpoint is in memory only: whatever ends it, the checkpoint reaches storage."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.host.proc import read_stat
from perdure.vocab.event import (
    CheckpointChosen,
    CheckpointCommitted,
    CheckpointStored,
    EndDecided,
    JobEnded,
    NodeLost,
    StopRequested,
)
from tests.process.jobs import (
    SOURCE,
    Job,
    command_of,
    descendants,
    kill_quietly,
    perdure,
    processes_of,
    running,
    script,
    wait_until,
)
from tests.process.test_access import certificate

pytest.importorskip("torch")
TRAIN = script("last_words.py")
ENV = {"OMP_NUM_THREADS": "1", "PAUSE": "0.05"}

ENOUGH = 120.0
"""Seconds for an end: a drain must import torch first, beside whatever else runs."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def newest_committed(job: Job) -> int:
    return max(e.checkpoint.step for e in job.all(CheckpointCommitted))


def assert_stored(job: Job, store: Path, code: int) -> int:
    """The newest committed step is in storage, whole, and the job's last words say so; gives it."""
    (ended,) = job.all(JobEnded)
    assert ended.exit_code == code, ended.reason
    last = newest_committed(job)
    assert job.all(CheckpointStored)[-1].checkpoint.step == last
    assert re.search(rf"step {last} of generation \d+ is in storage", ended.reason)
    listed = perdure(job.home.parent, "checkpoint", "verify", str(store), home=job.home)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert list(Path("/dev/shm").glob(f"perdure-{os.getuid()}/{job.name}-*")) == []
    return last


def test_user_error_that_stops_the_job_leaves_its_last_step_in_storage(tmp_path: Path) -> None:
    """All trainers are gone, and nobody has called close()."""
    store = tmp_path / "store"
    env = {**ENV, "ALWAYS": "1", "FAIL_AT": "6"}
    words = ("--nproc-per-node", "2", "--max-restarts", "0", TRAIN, "100000", str(store))
    with running(tmp_path, *words, name="fails", env=env) as job:
        code = job.end(seconds=ENOUGH)
        assert code != 0
        assert assert_stored(job, store, code) == 5
        assert "goes to storage before the end" in job.output
        assert processes_of(job.home) == {}


def test_node_lost_for_good_leaves_all_ranks_in_storage_and_a_new_job_goes_on(tmp_path: Path) -> None:
    """Three nodes, one with rank 0 loses power: a partner writes what it holds of it, another node commits."""
    store = tmp_path / "store"
    env = {**ENV, "REPLICAS": "1"}
    words = ("--local-nodes", "3", "--nnodes", "3", "--nproc-per-node", "1", "--hold", "1s")
    with running(tmp_path, *words, TRAIN, "100000", str(store), name="lost", env=env) as job:
        job.wait_event(CheckpointCommitted, 3)
        with job.launcher_frozen():
            job.kill_node(job.members()[0])
            job.wait_event(NodeLost)
            job.wait_event(EndDecided)
        assert job.end(seconds=ENOUGH) == 1
        last = assert_stored(job, store, 1)
    with running(tmp_path, *words, TRAIN, str(last + 3), str(store), name="next", env=env) as job:
        assert job.end(seconds=ENOUGH) == 0
        (chosen,) = job.all(CheckpointChosen)
        assert chosen.checkpoint is not None
        assert (chosen.checkpoint.step, chosen.from_memory, chosen.missing) == (last, 0, ())


def test_stop_while_the_ranks_hang_brings_the_last_committed_step_to_storage_in_the_grace(tmp_path: Path) -> None:
    """Thread 41 (goodfire 741, pytorch-lightning 20542): SIGTERM while trainers sit in an endless collective."""
    store = tmp_path / "store"
    env = {**ENV, "ALWAYS": "1", "HANG_AT": "6"}
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "45", TRAIN, "100000", str(store))
    with running(tmp_path, *words, name="hangs", env=env) as job:
        job.wait_event(CheckpointCommitted, where=lambda e: e.checkpoint.step == 5)
        job.interrupt(signal.SIGTERM)
        job.wait_event(StopRequested)
        stored = job.wait_event(CheckpointStored)
        assert stored.checkpoint.step == 5
        assert stored.at <= job.all(StopRequested)[0].at + 45
        job.interrupt(signal.SIGTERM)  # it is there: nobody needs the rest of the grace
        assert job.end(seconds=ENOUGH) == 3
        assert assert_stored(job, store, 3) == 5


def test_store_that_is_gone_at_the_end_is_told_with_the_step_that_was_lost(tmp_path: Path) -> None:
    store = tmp_path / "store"
    env = {**ENV, "ALWAYS": "1", "FAIL_AT": "4", "BREAK_STORE_AT": "2"}
    words = ("--nproc-per-node", "1", "--max-restarts", "0", "--flush-timeout", "6s", TRAIN, "100000", str(store))
    with running(tmp_path, *words, name="broken", env=env) as job:
        assert job.end(seconds=ENOUGH) != 0
        (ended,) = job.all(JobEnded)
        assert re.search(r"step 3 of generation \d+ has not reached storage within \S+ s, there is none", ended.reason)
        assert processes_of(job.home) == {}


def test_kernel_out_of_memory_takes_a_worker_before_the_memory_server(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "1", TRAIN, "100000", env=ENV) as job:
        job.wait_event(CheckpointCommitted)
        below = descendants(job.agent(job.members()[0]))
        (server,) = [pid for pid in below if "perdure.agent.memory" in command_of(pid)]
        worker = job.workers()[0]
        assert read_stat(worker) is not None
        scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (worker, server)]
        assert scores[0] >= scores[1] + 500 or scores[0] == 1000


def test_notice_brings_the_next_common_step_to_storage_and_the_job_goes_on(tmp_path: Path) -> None:
    """Slurm's --signal=B:USR1@120, or a preStop hook: something is about to happen."""
    store = tmp_path / "store"
    with running(tmp_path, "--nproc-per-node", "2", TRAIN, "100000", str(store), name="noticed", env=ENV) as job:
        job.wait_event(CheckpointCommitted)
        before = newest_committed(job)
        job.interrupt(signal.SIGUSR1)
        stored = job.wait_event(CheckpointStored, where=lambda e: e.checkpoint.step > before)
        job.wait_event(CheckpointCommitted, where=lambda e: e.checkpoint.step > stored.checkpoint.step)
        assert job.all(StopRequested) == []
        job.interrupt(signal.SIGTERM)
        assert job.end(seconds=ENOUGH) == 3


def test_sigterm_to_every_process_at_once_still_brings_the_newest_committed_step_to_storage(tmp_path: Path) -> None:
    """As Slurm's scancel and systemd's stop do: also to control, agents, memory servers and the drains."""
    store = tmp_path / "store"
    env = {**ENV, "ALWAYS": "1"}
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "60")
    with running(tmp_path, *words, TRAIN, "100000", str(store), name="all", env=env) as job:
        job.wait_event(CheckpointCommitted, 3)
        for pid in (*descendants(job.process.pid), job.process.pid):
            kill_quietly(pid, signal.SIGTERM)
        assert job.end(seconds=ENOUGH) == 3
        assert_stored(job, store, 3)
        assert processes_of(job.home) == {}


@pytest.mark.parametrize("is_told", [False, True], ids=["by_itself", "by_sigterm"])
def test_private_server_whose_script_has_died_stores_the_last_step(tmp_path: Path, *, is_told: bool) -> None:
    """Plain python: nobody is left but the server and the desk, and a scheduler may end those too."""
    store = tmp_path / "store"
    base = Path(f"/dev/shm/perdure-{os.getuid()}")
    train = tmp_path / f"last_words-{secrets.token_hex(4)}.py"  # its own name: others run at the same time
    train.symlink_to(TRAIN)
    env = {**os.environ, **ENV, "PYTHONPATH": SOURCE, "PERDURE_MEMORY_LINGER": "30", "ALWAYS": "1", "FAIL_AT": "4"}
    command = [sys.executable, str(train), "9", str(store)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    assert "the script is wrong" in done.stderr
    (job,) = base.glob(f"alone-{train.stem}-*")
    pids = [json.loads(path.read_bytes())["pid"] for path in job.glob("desk.json")]
    pids += [json.loads(path.read_bytes())["server"]["pid"] for path in job.glob("*/lock")]
    try:
        for pid in pids if is_told else ():
            kill_quietly(pid, signal.SIGTERM)
        (found,) = wait_until(
            lambda: [at for at in store.glob("step-*3.*/COMMIT") if at.parent.suffix != ".tmp"], seconds=ENOUGH
        )
        assert perdure(tmp_path, "checkpoint", "verify", str(found.parent)).returncode == 0
        wait_until(lambda: not is_told or all(read_stat(pid) is None for pid in pids))
    finally:
        for pid in pids:
            kill_quietly(pid, signal.SIGKILL)
        shutil.rmtree(job, ignore_errors=True)


def test_memory_server_reaches_a_control_that_serves_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "ours", "127.0.0.1")
    meeting = ("--nnodes", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--tls-cert", cert, "--tls-key", key)
    with running(tmp_path, *meeting, TRAIN, "100000", env=ENV) as job:
        job.wait_event(CheckpointCommitted)
