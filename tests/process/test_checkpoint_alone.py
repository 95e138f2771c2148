"""Checkpoints under plain python and torchrun: a private memory server and desk, that outlive the script."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("scripts") / "keep.py"
SOURCES = str(Path(__file__).parents[2] / "src")


class Bench:
    """A folder from which the same command is given again and again; ends what was started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": SOURCES, "PERDURE_MEMORY_LINGER": "60", "OMP_NUM_THREADS": "1"}
        self.base = Path(f"/dev/shm/perdure-{os.getuid()}")
        # Its own name: tests that run at the same time must not end each other's servers.
        self.script = folder / f"keep-{secrets.token_hex(4)}.py"
        self.script.symlink_to(SCRIPT)

    def jobs(self) -> list[Path]:
        return list(self.base.glob(f"alone-{self.script.stem}-*"))

    @property
    def job(self) -> Path:
        (job,) = self.jobs()
        return job

    def python(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.go([sys.executable, str(self.script), *args], env)

    def torchrun(self, ranks: int, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return self.go([*command, str(self.script), *args], env)

    def go(self, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=110
        )

    def pids(self) -> list[int]:
        found = []
        for job in self.jobs():
            found += [json.loads(path.read_bytes())["pid"] for path in job.glob("desk.json")]
            found += [json.loads(path.read_bytes())["server"]["pid"] for path in job.glob("*/lock")]
        return found

    def end(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for job in self.jobs():
            subprocess.run(["rm", "-rf", str(job)], check=True)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


def losses(text: str) -> dict[int, str]:
    pairs = [line.split() for line in text.splitlines()]
    return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdigit()}


def started(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("start"))


def test_killed_script_goes_on_bit_for_bit_from_memory(bench: Bench) -> None:
    """Thread 16 (dlrover 856): the slot outlives the trainer. Thread 40 (transformers 17032): equal losses."""
    whole = bench.python("12")
    assert whole.returncode == 0, whole.stderr
    bench.end()
    first = bench.python("12", KILL_AT="7", ALWAYS="1")
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = bench.python("12", ALWAYS="1")
    assert second.returncode == 0, second.stderr
    assert started(second.stdout) == "start 7 own memory"
    assert {**losses(first.stdout), **losses(second.stdout)} == losses(whole.stdout)


def test_script_that_has_ended_well_without_a_store_begins_anew(bench: Bench) -> None:
    """Its memory was given back, and the desk, which is still there, does not miss it."""
    for _ in range(2):
        done = bench.python("4", ALWAYS="1")
        assert done.returncode == 0, done.stderr
        assert started(done.stdout).strip() == "start 0"


# Failed once in five runs beside two other tests (2026-12-01), not understood yet.
@pytest.mark.soak
def test_killed_rank_under_torchrun_brings_all_ranks_back_to_one_step(bench: Bench) -> None:
    """Thread 30 (LlamaFactory 655, composer 2146): all ranks take the same step."""
    first = bench.torchrun(2, "9", KILL_AT="6", KILL_RANK="1", ALWAYS="1")
    assert first.returncode != 0
    assert first.stdout.count("start 0") == 2, first.stderr
    second = bench.torchrun(2, "9", ALWAYS="1")
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("start 6 own memory") == 2, second.stdout
    assert "Traceback" not in second.stderr


def test_server_that_is_killed_costs_no_step_and_no_exception(bench: Bench) -> None:
    """Thread 33 (SkyRL 1960, 357): kill the background process; the trainer says so and goes on."""
    done = bench.python("6", KILL_SERVER_AT="2")
    assert done.returncode == 0, done.stderr
    assert set(losses(done.stdout)) == set(range(6))
    assert "the memory server is gone; training goes on" in done.stderr
