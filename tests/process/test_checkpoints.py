"""Checkpoints in memory under `perdure run`: what a killed rank and a lost node cost, and what is left afterwards."""

import os
import re
import signal
from pathlib import Path

import pytest

from perdure.vocab.checkpoint import Level
from perdure.vocab.event import CheckpointChosen, CheckpointCommitted, CheckpointStored, NodeLost, NodeReady
from tests.process.jobs import Job, perdure, running, script

pytest.importorskip("torch")
KEEP = script("keep.py")
STEADY = {"ALWAYS": "1", "OMP_NUM_THREADS": "1"}


def curve(output: str) -> dict[tuple[int, int], str]:
    """Loss by (rank, step), the last one told."""
    return {
        (int(rank), int(step)): loss
        for rank, step, loss in re.findall(r"^\[default(\d+)\]:(\d+) (\S+)$", output, re.MULTILINE)
    }


def losses(output: str) -> set[tuple[int, str]]:
    """(step, loss) of all ranks: on several nodes the output does not tell them apart."""
    return {(int(step), loss) for step, loss in re.findall(r"^\[default\d+\]:(\d+) (\S+)$", output, re.MULTILINE)}


def chosen(job: Job) -> list[CheckpointChosen]:
    return job.all(CheckpointChosen)


def test_killed_rank_goes_on_from_own_memory_and_follows_the_same_curve(tmp_path: Path) -> None:
    """Thread 40 (transformers 17032, 46628): losses are bitwise equal, dropout on; here after three resumes."""
    words = ("--nproc-per-node", "2", KEEP, "20")
    with running(tmp_path, *words, name="whole", env=STEADY) as job:
        assert job.end() == 0
        whole = curve(job.output)
    with running(tmp_path, *words, name="cut", env={**STEADY, "PAUSE": "0.2"}) as job:
        for generation, rank in ((1, 0), (2, 1), (3, 0)):
            job.wait_event(CheckpointCommitted, where=lambda e, g=generation: e.checkpoint.generation == g)
            job.kill_worker(rank)
            job.wait_stepping(generation + 1)
        assert job.end() == 0
        assert curve(job.output) == whole
        restored = chosen(job)
        assert [e.from_memory for e in restored] == [0, 2, 2, 2]
        committed = job.all(CheckpointCommitted)
        for choice in restored[1:]:
            before = [e.checkpoint for e in committed if e.checkpoint.generation < choice.generation]
            assert choice.checkpoint is not None
            assert choice.checkpoint >= max(before), "a committed step was lost"
        assert {e.level for e in committed} == {Level.SEALED}
    assert list(Path("/dev/shm").glob(f"perdure-{os.getuid()}/cut-*")) == []


def test_ranks_of_a_lost_node_are_restored_from_its_partners_memory(tmp_path: Path) -> None:
    words = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--nproc-per-node", "1", KEEP, "30")
    with running(tmp_path, *words, env={**STEADY, "REPLICAS": "1", "PAUSE": "0.1"}) as job:
        job.wait_stepping(1)
        (spare,) = {f"node-{i}" for i in range(3)} - set(job.members())
        job.wait_event(NodeReady, where=lambda e: e.node == spare)
        job.wait_event(CheckpointCommitted, 2)
        with job.launcher_frozen():
            job.kill_node(job.members()[1])
            job.wait_event(NodeLost)
        job.wait_stepping(2)
        assert job.end() == 0
        committed = job.all(CheckpointCommitted)
        assert {e.level for e in committed} == {Level.REPLICATED}
        first, second = chosen(job)
        assert (first.checkpoint, second.from_memory, second.missing) == (None, 2, ())
        assert second.checkpoint is not None
        assert second.checkpoint >= max(e.checkpoint for e in committed if e.checkpoint.generation == 1)
        assert {step for _, step in curve(job.output)} == set(range(30))


def test_ranks_of_a_lost_node_are_made_again_from_parity_and_follow_the_same_curve(tmp_path: Path) -> None:
    """Each rank's random numbers and data position are its own: no other slot has them (decision 0014)."""
    words = ("--local-nodes", "4", "--nnodes", "3", "--spares", "1", "--nproc-per-node", "1", KEEP, "12")
    with running(tmp_path, *words, name="whole", env=STEADY) as job:
        assert job.end() == 0
        whole = losses(job.output)
    with running(tmp_path, *words, name="parity", env={**STEADY, "XOR": "2", "PAUSE": "0.1"}) as job:
        job.wait_stepping(1)
        (spare,) = {f"node-{i}" for i in range(4)} - set(job.members())
        job.wait_event(NodeReady, where=lambda e: e.node == spare)
        job.wait_event(CheckpointCommitted, 2)
        with job.launcher_frozen():
            job.kill_node(job.members()[1])
            job.wait_event(NodeLost)
        job.wait_stepping(2)
        assert job.end() == 0
        committed = job.all(CheckpointCommitted)
        assert {e.level for e in committed} == {Level.REPLICATED}
        assert {e.checkpoint.generation for e in committed} == {1, 2}, "groups are made anew with the spare"
        first, second = chosen(job)
        assert (first.checkpoint, second.from_memory, second.missing) == (None, 2, ())
        assert len(second.rebuilt) == 1
        assert second.checkpoint is not None
        assert second.checkpoint >= max(e.checkpoint for e in committed if e.checkpoint.generation == 1)
        after = second.checkpoint.step + 1
        cut = losses(job.output)
        assert {each for each in cut if each[0] <= after} == {each for each in whole if each[0] <= after}
        # Later ones are not equal bit for bit: DDP's first step after a start sums three ranks in another order.
        assert [float(loss) for _, loss in sorted(cut)] == pytest.approx(
            [float(loss) for _, loss in sorted(whole)], rel=1e-3
        )
    assert list(Path("/dev/shm").glob(f"perdure-{os.getuid()}/parity-*")) == []


# close() did not come back within 110 s in one of five runs beside two other tests (2026-12-01): not understood yet, so
# these two are not in `make test`.
@pytest.mark.soak
def test_committed_checkpoint_reaches_storage_and_a_new_job_goes_on_from_there(tmp_path: Path) -> None:
    """Thread 13 (dlrover 1378): the last checkpoint is drained. All memory is gone after the job."""
    store = str(tmp_path / "store")
    words = ("--nproc-per-node", "2", KEEP)
    with running(tmp_path, *words, "11", store, name="first", env=STEADY) as job:
        assert job.end(seconds=110) == 0
        assert job.all(CheckpointStored)[-1].checkpoint.step == 10
    listed = perdure(tmp_path, "checkpoint", "verify", store)
    assert listed.returncode == 0, listed.stdout + listed.stderr
    with running(tmp_path, *words, "13", store, name="second", env=STEADY) as job:
        assert job.end(seconds=110) == 0
        assert [(e.checkpoint.step if e.checkpoint else None, e.from_memory) for e in chosen(job)] == [(10, 0)]
        assert {step for _, step in curve(job.output)} == {11, 12}


@pytest.mark.soak
def test_stop_saves_once_more_at_the_common_last_step(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    env = {"EVERY": "1000", "PAUSE": "0.1", "OMP_NUM_THREADS": "1"}
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "90", KEEP, "100000", store)
    with running(tmp_path, *words, env=env) as job:
        job.wait_stepping(1)
        job.interrupt(signal.SIGTERM)
        assert job.end(seconds=110) == 3
        last = max(step for _, step in curve(job.output))
        assert job.all(CheckpointStored)[-1].checkpoint.step == last
