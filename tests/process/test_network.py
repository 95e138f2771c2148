"""Networks that are cut, for a moment or for good, one way or both, and machines that lose power."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from perdure.vocab.event import GenerationRunning, NodeFenced, NodeJoined, NodeLost, StartFailed
from tests.process.jobs import Job, script
from tests.process.machines import Launched, is_alive, machines, start_job, wait_until
from tests.process.ticks import ticks

LEASE = 2.0
SHORT_LEASE = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2")
TWO_AND_A_SPARE = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")


def ticking(out: Path, node: str, since: float) -> Callable[[], bool]:
    """Whether a worker on `node` has written after `since`, on the monotonic clock."""
    return lambda: any(tick.node == node and tick.at > since for tick in ticks(out))


def outputs(launched: dict[str, Launched]) -> Callable[[], str]:
    return lambda: "\n".join(f"{name}: {one.output}" for name, one in launched.items())


def spare_of(job: Job, nodes: tuple[str, ...]) -> str:
    return next(node for node in nodes if node not in job.members())


def test_host_of_rank_0_and_of_the_store_loses_power_and_a_spare_takes_over(tmp_path: Path) -> None:
    """RESTART.md cases 2 and 3. pytorch issues 111646 (survivors waited 30 min after a missed keep-alive) and 67742
    (the store's host took everyone along), pull 167302 (the old master address stayed); torchft issue 63 (a dead
    member was counted for ever); dlrover issue 450 (ranks were random afterwards)."""
    nodes = ("bob", "cyd", "dan")
    program = (script("train.py"), "--out", str(tmp_path / "out"))
    with machines(tmp_path, "ada", *nodes) as net:
        job, _ = start_job(net, "ada", nodes, *program, shape=TWO_AND_A_SPARE, rules=SHORT_LEASE)
        job.wait_stepping(1)
        first, survivor, spare = job.generation().assignment, job.workers()[1], spare_of(job, nodes)
        lost = first.members[0].node
        assert first.store_host == lost
        net.power_off(lost)
        job.wait_stepping(2)
        (gone,) = job.all(NodeLost)
        assert (gone.node, gone.connection_closed) == (lost, False)
        second = job.generation().assignment
        assert second.nodes == (spare, first.members[1].node), "the survivor keeps its rank"
        assert second.store_host == spare
        assert job.actions() == ["Begin", "ReplaceNode"]
        assert not is_alive(survivor), "it was stuck in a collective"
        again = job.wait_event(GenerationRunning, 2)
        assert again.at - gone.at < 60, "gloo's own timeout is 30 min"


def test_first_node_leaves_and_the_other_becomes_rank_0(tmp_path: Path) -> None:
    """pytorch issue 182221: AssertionError when a node became rank 0 after a peer had left."""
    out, nodes = tmp_path / "out", ("bob", "cyd")
    with machines(tmp_path, "ada", *nodes) as net:
        shape = ("--nnodes", "1:2", "--nproc-per-node", "1")
        job, launched = start_job(net, "ada", nodes, script("tick.py"), "--out", str(out), shape=shape)
        job.wait_stepping(1)
        first, stays = job.members()
        os.kill(launched[first].process.pid, signal.SIGTERM)
        job.wait_stepping(2)
        assert launched[first].end() == 3, "incomplete, and not started again"
        assert job.members() == (stays,)
        assert job.actions() == ["Begin", "Shrink"]
        wait_until(lambda: any((t.node, t.rank, t.generation) == (stays, 0, 2) for t in ticks(out)))
        assert {t.master for t in ticks(out) if t.generation == 2} == {net[stays].address}


def test_cut_for_a_moment_is_a_pause_and_for_longer_a_fence(tmp_path: Path) -> None:
    """RESTART.md case 13; pytorch pull 167302. The script talks to nobody: only the fence can stop it."""
    out, nodes = tmp_path / "out", ("bob", "cyd", "dan")
    with machines(tmp_path, "ada", *nodes) as net:
        job, launched = start_job(
            net, "ada", nodes, script("tick.py"), "--out", str(out), shape=TWO_AND_A_SPARE, rules=SHORT_LEASE
        )
        job.wait_stepping(1)
        cut_off, spare, pids = job.members()[0], spare_of(job, nodes), job.workers()

        began = time.monotonic()
        net.isolate(cut_off)
        wait_until(ticking(out, cut_off, began + 0.3 * LEASE))
        net.rejoin(cut_off)
        wait_until(ticking(out, cut_off, time.monotonic() + LEASE), outputs(launched))
        assert job.all(NodeLost) == []
        assert job.workers() == pids, "the same generation, the same processes"

        net.isolate(cut_off)
        assert job.wait_event(NodeLost).node == cut_off
        job.wait_stepping(2)
        assert spare in job.members()
        wait_until(lambda: any(t.node == spare for t in ticks(out)))
        last = max(t.at for t in ticks(out) if t.node == cut_off)
        first = min(t.at for t in ticks(out) if t.generation == 2)
        assert last < first, f"both wrote for {last - first:.3f} s"
        assert not is_alive(pids[0])

        lives = len(job.all(NodeJoined))
        net.rejoin(cut_off)
        job.wait_event(NodeJoined, lives + 1)
        assert cut_off not in job.members(), "it comes back as a spare"
        assert "fenced" in launched[cut_off].output


def test_node_that_is_heard_by_its_peers_only_is_fenced_and_replaced(tmp_path: Path) -> None:
    """RESTART.md case 13: its peers are in touch with control, so they do not vouch for it."""
    out, nodes = tmp_path / "out", ("bob", "cyd", "dan")
    with machines(tmp_path, "ada", *nodes) as net:
        job, launched = start_job(
            net, "ada", nodes, script("tick.py"), "--out", str(out), shape=TWO_AND_A_SPARE, rules=SHORT_LEASE
        )
        job.wait_stepping(1)
        cut_off = job.members()[1]
        net.cut(cut_off, "ada", one_way=True)
        job.wait_stepping(2)
        assert cut_off not in job.members()
        wait_until(lambda: any(t.generation == 2 for t in ticks(out)))
        last = max(t.at for t in ticks(out) if t.node == cut_off)
        assert last < min(t.at for t in ticks(out) if t.generation == 2), "nothing is written by both"
        wait_until(lambda: "neither control nor a majority of its peers" in launched[cut_off].output)
        assert job.all(NodeFenced) == [], "it could not say so"


def test_store_that_a_node_cannot_reach_is_named_within_seconds(tmp_path: Path) -> None:
    """pytorch pull 191989: clients of a store that nobody serves waited for 30 min without a word."""
    nodes = ("bob", "cyd")
    with machines(tmp_path, "ada", *nodes) as net:
        net.cut(*nodes)
        shape = ("--nnodes", "2", "--nproc-per-node", "1")
        program = (script("tick.py"), "--out", str(tmp_path / "out"))
        job, _ = start_job(net, "ada", nodes, *program, shape=shape, rules=("--max-restarts", "0", *SHORT_LEASE))
        failed = job.wait_event(StartFailed)
        assert f"cannot be reached from {failed.node}" in failed.reason
        assert job.end() == 1
        assert "store" in job.output


def test_slow_link_costs_nothing_but_time(tmp_path: Path) -> None:
    """A node that sends no more than 128 kbit/s keeps its lease, and its faults are told."""
    out, nodes = tmp_path / "out", ("bob", "cyd")
    with machines(tmp_path, "ada", *nodes) as net:
        net.slow("bob", "128kbit")
        shape = ("--nnodes", "2", "--nproc-per-node", "1")
        job, _ = start_job(net, "ada", nodes, script("tick.py"), "--out", str(out), shape=shape, rules=SHORT_LEASE)
        job.wait_stepping(1)
        wait_until(ticking(out, "bob", time.monotonic() + LEASE))
        job.kill_worker(0)
        job.wait_stepping(2)
        assert job.all(NodeLost) == []
        assert job.actions() == ["Begin", "RestartWorkers"]
