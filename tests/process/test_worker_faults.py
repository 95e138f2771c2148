"""Workers that die, stop and fail, on real processes."""

import os
import random
import signal
from pathlib import Path

import pytest

from perdure.vocab.event import JobEnded, WorkerExited, WorkerStopped
from tests.process.jobs import running, script


def test_killed_workers_twenty_in_a_row_all_come_back(tmp_path: Path) -> None:
    """RESTART.md case 1; pytorch issues 135712, 167288, 123678: nothing of an earlier attempt is ever read."""
    dice = random.Random(7)
    with running(tmp_path, "--nproc-per-node", "4", "--max-restarts", "20", script("train.py"), "--out", "out") as job:
        for kill in range(20):
            job.wait_stepping(kill + 1)
            job.kill_worker(dice.randrange(4))
        job.wait_stepping(21)
        assert len(job.all(WorkerExited)) >= 20
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 3


def test_stopped_worker_is_noticed_and_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", script("train.py"), "--out", "out") as job:
        job.wait_stepping(1)
        job.kill_worker(1, signal.SIGSTOP)
        stopped = job.wait_event(WorkerStopped)
        assert stopped.rank == 1
        assert 0.5 <= stopped.stopped_for < 2
        job.wait_stepping(2)


def test_same_exception_at_the_same_step_stops_after_one_retry(tmp_path: Path) -> None:
    with running(
        tmp_path, "--nproc-per-node", "2", "--max-restarts", "10", script("train.py"), "--out", "out", "--raise-at", "7"
    ) as job:
        assert job.end() == 1
        assert job.actions().count("RestartWorkers") == 1
        ended = job.all(JobEnded)[-1]
        assert "a bad sample at step 7" in ended.reason
        assert job.output.count("Traceback (most recent call last)") >= 1
        assert 'raise ValueError(f"a bad sample' in job.output


@pytest.mark.parametrize("untold", [False, True])
def test_exception_that_does_not_come_back_costs_one_restart(tmp_path: Path, untold: bool) -> None:
    words = ["--untold"] if untold else []
    with running(
        tmp_path,
        *("--nproc-per-node", "2", script("train.py"), "--out", "out", "--steps", "40", "--raise-once-at", "7", *words),
    ) as job:
        assert job.end() == 0
        assert job.actions().count("RestartWorkers") == 1
