"""Going back: restore() again in the same processes, and what was restored is found to be bad (decision 0013)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.vocab.event import CheckpointChosen, CheckpointCommitted, CheckpointSetAside
from tests.process.jobs import running, script

pytest.importorskip("torch")
SOURCES = str(Path(__file__).parents[2] / "src")


def test_restore_again_in_one_process_goes_back_to_what_was_saved_last(tmp_path: Path) -> None:
    """pytorch/torchtitan 930; and a discarded one takes with it what was made of it."""
    env = {**os.environ, "PYTHONPATH": SOURCES, "PERDURE_MEMORY_LINGER": "2"}
    done = subprocess.run(
        [sys.executable, script("again.py")], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert (first, second) == ("first 0", "second 10 True -1")
    assert third.startswith("third 12 True")
    assert re.search(r"generation=1, turn=1, step=11", third)
    assert fourth.startswith("fourth 10 True")
    assert re.search(r"generation=1, turn=0, step=9", fourth)


def test_run_whose_loss_is_nan_after_a_restore_steps_back_one_more_though_control_dies(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM 5281: what is bad after it was loaded is not loaded again, whoever forgets it."""
    words = ("--nproc-per-node", "2", script("nan.py"), "40")
    with running(tmp_path, *words, env={"OMP_NUM_THREADS": "1"}) as job:
        job.wait_event(CheckpointCommitted, 4)
        job.kill_worker(1)
        bad = job.wait_event(CheckpointSetAside).checkpoint
        os.kill(job.control(), signal.SIGKILL)
        third = job.wait_event(CheckpointChosen, where=lambda e: e.generation == 3)
        second = next(e for e in job.all(CheckpointChosen) if e.generation == 2)
        assert second.checkpoint == bad
        assert third.checkpoint is not None
        assert third.checkpoint < bad
        assert job.end() == 0
        assert [e.checkpoint for e in job.all(CheckpointSetAside)] == [bad], "it was told more than once"
        assert "the loss of step" in job.all(CheckpointSetAside)[0].reason
