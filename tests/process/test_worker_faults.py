"""Workers that die, stop and fail, on real processes."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.host.proc import read_state
from perdure.vocab.decision import Quarantine, ReplaceNode
from perdure.vocab.event import (
    ControlStarted,
    GenerationBegan,
    JobEnded,
    NodeReady,
    SavePassed,
    WorkerExited,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from tests.process.jobs import assert_ended, descendants, processes_of, running, script, wait_until

PLAIN = (script("plain.py"), "--out", "out")


def test_killed_workers_twenty_in_a_row_all_come_back(tmp_path: Path) -> None:
    """RESTART.md case 1; pytorch issues 135712, 167288, 123678: nothing of an earlier attempt is ever read."""
    dice = random.Random(7)
    words = ("--nproc-per-node", "4", "--max-restarts", "20", script("train.py"), "--out", "out", "--save-every", "2")
    with running(tmp_path, *words) as job:
        for life in range(1, 21):
            job.wait_stepping(life)
            # Six kills of one rank at one step would be taken for a fault that restarting does not help against.
            job.wait_event(SavePassed, where=lambda e, life=life: e.generation >= life)
            job.kill_worker(dice.randrange(4))
        job.wait_stepping(21)
        assert len(job.all(WorkerExited)) >= 20
        job.interrupt()
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


def test_workers_that_end_one_after_the_other_make_one_new_generation(tmp_path: Path) -> None:
    """RESTART.md case 8; kubeflow trainer 2000: eight ends within 100 ms, one answer."""
    words = ("--nproc-per-node", "8", *PLAIN, "--stagger", "0.012", "--steps", "20")
    with running(tmp_path, *words) as job:
        assert job.end() == 0
        assert [e.assignment.number for e in job.all(GenerationBegan)] == [1, 2]
        assert job.actions().count("RestartWorkers") == 1


def test_first_failure_is_the_one_that_is_shown(tmp_path: Path) -> None:
    """RESTART.md case 9; pytorch 42107: one rank dies of a missing file while the others wait for it."""
    (tmp_path / "load.py").write_text(
        "import os\nimport torch.distributed as dist\n\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 2:\n    open('shard-2.bin')\n"
        "dist.barrier()\n"
    )
    with running(tmp_path, "--nproc-per-node", "3", "load.py") as job:
        assert job.end() == 1
        assert job.actions().count("RestartWorkers") == 1  # it might have been on its way; then it is deterministic
        reason = assert_ended(job.records(), 1).reason
        assert "rank 2" in reason
        assert "FileNotFoundError" in reason
        assert "shard-2.bin" in reason
        assert "load.py:7" in reason
        shown = job.output[job.output.rindex("Traceback (most recent call last)") :]
        assert 'load.py", line 7' in shown
        assert "shard-2.bin" in shown


def test_restart_budget_outlives_control(tmp_path: Path) -> None:
    """RESTART.md case 4: it is the job's, and persisted."""
    with running(tmp_path, "--nproc-per-node", "1", "--max-restarts", "1", *PLAIN) as job:
        job.wait_stepping(1)
        job.kill_worker(0)
        job.wait_stepping(2)
        os.kill(job.control(), signal.SIGKILL)
        job.wait_event(ControlStarted, 2)
        assert job.workers()[0] in descendants(job.agent("node-0"))  # it was adopted, not started again
        job.kill_worker(0)
        assert job.end() == 137
        assert "1 of 1 restarts" in assert_ended(job.records(), 137).reason


SHORT_LIMITS = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", "--stall-limit", "4s")


def test_stalled_worker_is_noticed_and_so_is_the_next(tmp_path: Path) -> None:
    """RESTART.md case 6; NVRx 299: the limit fires, also for the second time."""
    words = ("--nproc-per-node", "2", *SHORT_LIMITS, *PLAIN, "--hang-at", "15", "--hang-lives", "2")
    with running(tmp_path, *words) as job:
        job.wait_stepping(3)
        job.interrupt()
        assert job.end() == 3
        stalls = job.all(WorkerStalled)
        assert [(e.rank, e.generation, e.step, e.limit_source) for e in stalls] == [
            (1, 1, 14, "--stall-limit"),
            (1, 2, 14, "--stall-limit"),
        ]
        assert all(4 <= e.silent_for < 12 for e in stalls)
        assert job.actions().count("RestartWorkers") == 2


def test_slow_first_step_evaluation_and_save_are_no_stalls(tmp_path: Path) -> None:
    """RESTART.md case 6; dlrover 1730. All three take twice the limit that is learned for training, 2 s."""
    words = ("--nproc-per-node", "3", *PLAIN, "--slow", "4", "--steps", "30")
    with running(tmp_path, *words) as job:
        assert job.end() == 0
        assert job.all(WorkerStalled) == []
        assert len(job.all(GenerationBegan)) == 1


def test_limit_for_training_is_learned(tmp_path: Path) -> None:
    """Of the same script, silence in training that is as long as its evaluation is a stall."""
    with running(tmp_path, "--nproc-per-node", "2", *PLAIN, "--hang-at", "30", "--steps", "60") as job:
        assert job.end() == 0
        (stall,) = job.all(WorkerStalled)
        assert (stall.rank, stall.step, stall.phase) == (1, 29, "training")
        assert stall.limit_source.startswith("learned")


@pytest.fixture
def small_group() -> Iterator[list[str]]:
    """Words that run a command in a memory cgroup (v1) of 700 MiB of its own."""
    folder = Path("/sys/fs/cgroup/memory") / f"perdure-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"needs permission to make a memory cgroup (v1): {error}")
    yield ["sh", "-c", f'echo $$ >{folder}/cgroup.procs && exec "$@"', "sh"]
    wait_until(lambda: not (folder / "cgroup.procs").read_text().strip())
    folder.rmdir()


def test_worker_that_is_killed_for_lack_of_memory_is_retried_once(tmp_path: Path, small_group: list[str]) -> None:
    """marin 4339: a user error that stops, with the figures, not ten thousand retries."""
    words = ("--nproc-per-node", "2", "--max-restarts", "10", *PLAIN, "--eat")
    with running(tmp_path, *words, prefix=small_group) as job:
        assert job.end() == 137
        ended = assert_ended(job.records(), 137)
        assert [e.memory.by for e in job.all(WorkerExited) if e.memory is not None] == ["cgroup", "cgroup"]
        assert job.actions().count("RestartWorkers") == 1
        assert "rank 1" in ended.reason
        assert "killed for lack of memory" in ended.reason
        assert "of 700.0 MiB were in use" in ended.reason


# --- a process that cannot be killed ---------------------------------------------------------------------------------


class Frozen:
    """A file system whose writers can be made to wait in state D."""

    def __init__(self, point: Path) -> None:
        self.point = point
        self.is_frozen = False

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.point)], check=True)
        self.is_frozen = True

    def thaw(self) -> None:
        if self.is_frozen:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.point)], check=True)
            self.is_frozen = False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Frozen]:
    """A loop-mounted ext4."""
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("mkfs.ext4", "fsfreeze", "mount")):
        pytest.skip("needs root, mkfs.ext4 and fsfreeze")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs loop devices: {mounted.stderr.strip()}")
    frozen = Frozen(point)
    yield frozen
    frozen.thaw()
    wait_until(lambda: subprocess.run(["umount", str(point)], capture_output=True).returncode == 0)


def test_worker_that_cannot_be_killed_costs_its_node_not_the_job(tmp_path: Path, disk: Frozen) -> None:
    """RESTART.md case 7."""
    (tmp_path / "write.py").write_text(
        "import os, sys, time\nimport perdure\n\n"
        "run = perdure.current_run()\n"
        "path = sys.argv[1] if run.rank == 1 and run.restarts == 0 else os.devnull\n"
        "with open(path, 'w', buffering=1) as file:\n"
        "    for step in run.steps(stop=100000 if run.restarts == 0 else 20):\n"
        "        file.write('x\\n')\n        time.sleep(0.02)\n"
    )
    words = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")
    with running(tmp_path, *words, "write.py", str(disk.point / "file")) as job:
        job.wait_stepping(1)
        (spare,) = {f"node-{i}" for i in range(3)} - set(job.members())
        job.wait_event(NodeReady, where=lambda e: e.node == spare)
        stuck, bad = job.workers()[1], job.members()[1]
        disk.freeze()
        wait_until(lambda: read_state(stuck) == "D")
        job.kill_worker(0)
        unkillable = job.wait_event(WorkerUnkillable)
        assert (unkillable.node, unkillable.pid, unkillable.process_state) == (bad, stuck, "D")
        assert job.end() == 0
        assert read_state(stuck) == "D"  # it is still there, and nobody waits for it
        actions = [a for d in job.decisions() for a in d.actions]
        assert [a.node for a in actions if isinstance(a, Quarantine)] == [bad]
        assert [a.spares for a in actions if isinstance(a, ReplaceNode)] == [(spare,)]
        disk.thaw()
        wait_until(lambda: not processes_of(job.home))
