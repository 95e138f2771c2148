"""Checkpoints of tensors on a CUDA device: whatever is done to them after `save`, the slot has what they were."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scripts") / "cuda.py"


@pytest.mark.parametrize("case", ["at once", "overlap"])
def test_spoiled_state_comes_back_from_pinned_slots_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Thread 5 (pytorch 144657) on a device: parameters, moments, buffers that forward changes, odd strides."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PERDURE_HOME": str(tmp_path), "PERDURE_MEMORY_LINGER": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), case], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"held {case}"


def test_killed_rank_on_a_device_goes_on_from_memory(tmp_path: Path) -> None:
    """Its CUDA context dies with it; the slot, which it had registered with the driver, does not."""
    script = ROOT / "tests" / "process" / "scripts" / "keep.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PERDURE_HOME": str(tmp_path), "DEVICE": "cuda"}
    command = [sys.executable, "-m", "perdure", "run", "--nproc-per-node", "1", str(script), "12"]
    env |= {"KILL_AT": "7", "ALWAYS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    starts = [line for line in done.stdout.splitlines() if "start " in line]
    assert [line.split("start ")[1].split()[0] for line in starts] == ["0", "7"], done.stdout
    assert "own memory" in starts[1]
    assert signal.SIGKILL.name in done.stderr or "killed" in done.stderr.lower()
