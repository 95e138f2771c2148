"""Control that is cut off, killed and started again: nothing is lost, and what happened meanwhile is answered."""

import os
import signal
import time
from pathlib import Path

from perdure.store.eventlog import open_reader
from perdure.vocab.decision import RestartWorkers
from perdure.vocab.event import ControlStarted, JobEnded, NodeJoined, NodeLost, NodeReady, WorkerExited
from tests.process.jobs import Job, kill_quietly, running, script
from tests.process.machines import Machines, is_alive, machines, start_job, wait_until
from tests.process.ticks import Tick, ticks

LEASE = 2.0
SHORT_LEASE = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2")
NODES = ("bob", "cyd", "dan")
THREE = ("--nnodes", "3", "--nproc-per-node", "1")


def assert_no_gap(job: Job) -> None:
    """The log has consecutive numbers, and no record is in it twice."""
    reader = open_reader(str(job.folder / "events.db"))
    try:
        rows = list(reader.read())
    finally:
        reader.close()
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1))
    ids = [record.id for _, record in rows if hasattr(record, "id")]
    assert len(set(ids)) == len(ids)


def last_ticks(out: Path) -> dict[int, Tick]:
    """The newest of each rank."""
    return {tick.rank: tick for tick in ticks(out)}


def wait_all_tick(out: Path, ranks: int, since: float) -> None:
    """Until every rank has written after `since`, on the monotonic clock."""
    wait_until(lambda: sum(tick.at > since for tick in last_ticks(out).values()) == ranks)


def assert_no_step_lost(out: Path) -> None:
    """Every process has written every step once, in order."""
    by_pid: dict[int, list[int]] = {}
    for tick in ticks(out):
        by_pid.setdefault(tick.pid, []).append(tick.step)
    assert all(steps == list(range(len(steps))) for steps in by_pid.values())


def restart_control(net: Machines, program: tuple[str, ...]) -> None:
    """As its user would: the same command again."""
    meeting = ("--rdzv-endpoint", f"{net['ada'].address}:29400")
    net.start("ada", "control", "--rdzv-id", "job", *meeting, *THREE, *SHORT_LEASE, *program)


def test_control_cut_off_for_longer_than_the_lease_costs_nothing(tmp_path: Path) -> None:
    """RESTART.md, leases: agents that reach their peers but not control train on. dlrover issue 1342."""
    out = tmp_path / "out"
    with machines(tmp_path, "ada", *NODES) as net:
        job, _ = start_job(net, "ada", NODES, script("tick.py"), "--out", str(out), shape=THREE, rules=SHORT_LEASE)
        job.wait_stepping(1)
        pids = job.workers()
        net.isolate("ada")
        wait_all_tick(out, 3, time.monotonic() + 2 * LEASE)
        net.rejoin("ada")
        wait_all_tick(out, 3, time.monotonic() + 1.5 * LEASE)
        assert job.all(NodeLost) == []
        assert job.workers() == pids
        assert all(is_alive(pid) for pid in pids.values())
        assert_no_step_lost(out)
        job.kill_worker(2)
        job.wait_stepping(2)
        assert job.actions() == ["Begin", "RestartWorkers"], "it is in touch again"


def test_control_killed_beside_node_0_is_started_again_and_nobody_notices(tmp_path: Path) -> None:
    """RESTART.md, `control killed: 0 steps`. pytorch issue 67742, dlrover issue 1342."""
    out = tmp_path / "out"
    with machines(tmp_path, "ada", "bob") as net:
        words = ("--rdzv-endpoint", f"{net['ada'].address}:29400", "--nnodes", "2", "--nproc-per-node", "2")
        program = (script("tick.py"), "--out", str(out))
        job = net.start("ada", "run", "--rdzv-id", "job", *words, *program).job()
        other = net.start("bob", "run", *words, *program)
        job.wait_stepping(1)
        pids, before = job.workers(), job.control()
        for kill, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
            os.kill(job.control(), number)
            job.wait_event(ControlStarted, kill + 2)
        wait_all_tick(out, 4, time.monotonic())
        assert job.control() != before
        assert job.workers() == pids
        assert job.generation().assignment.number == 1
        assert_no_step_lost(out)

        os.kill(job.control(), signal.SIGKILL)
        kill_quietly(pids[3], signal.SIGKILL)  # while control is away
        job.wait_stepping(2)
        assert [exited.pid for exited in job.all(WorkerExited)] == [pids[3]], "told once"
        assert_no_gap(job)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == other.end() == 3
        assert_no_gap(job)


def test_worker_killed_while_control_is_away_for_long_is_recovered_when_it_is_back(tmp_path: Path) -> None:
    """RESTART.md, `control can die`: events are queued, not lost. dlrover issue 1342."""
    out = tmp_path / "out"
    program = (script("tick.py"), "--out", str(out))
    with machines(tmp_path, "ada", *NODES) as net:
        job, launched = start_job(net, "ada", NODES, *program, shape=THREE, rules=SHORT_LEASE)
        job.wait_stepping(1)
        pids = job.workers()
        os.kill(job.process.pid, signal.SIGKILL)
        kill_quietly(pids[1], signal.SIGKILL)
        away = time.monotonic()
        wait_until(lambda: all(last_ticks(out)[rank].at > away + 1.5 * LEASE for rank in (0, 2)))
        assert all(is_alive(pids[rank]) for rank in (0, 2))
        restart_control(net, program)
        wait_until(lambda: len(job.all(WorkerExited)) > 0, lambda: launched["cyd"].output)
        wait_until(lambda: {t.generation for t in last_ticks(out).values()} == {2}, lambda: str(job.records()[-9:]))
        (exited,) = job.all(WorkerExited)
        assert (exited.pid, exited.signal) == (pids[1], signal.SIGKILL)
        assert job.all(NodeLost) == []
        assert_no_gap(job)


def test_agent_killed_while_control_is_away_is_a_lost_node_when_it_is_back(tmp_path: Path) -> None:
    """dlrover issue 1342 and pull 1357: the life that comes back has nothing of the life that was lost."""
    out = tmp_path / "out"
    program = (script("tick.py"), "--out", str(out))
    with machines(tmp_path, "ada", *NODES) as net:
        job, launched = start_job(net, "ada", NODES, *program, shape=THREE, rules=SHORT_LEASE)
        job.wait_stepping(1)
        pids = job.workers()
        os.kill(job.process.pid, signal.SIGKILL)
        os.kill(launched["cyd"].agent(), signal.SIGKILL)
        wait_until(lambda: not is_alive(pids[1]))
        restart_control(net, program)
        wait_until(
            lambda: {t.rank for t in ticks(out) if t.generation > 1} == {0, 1, 2}, lambda: str(job.records()[-20:])
        )
        assert "cyd" in {lost.node for lost in job.all(NodeLost)}
        lives = [joined.node.incarnation for joined in job.all(NodeJoined) if joined.node.id == "cyd"]
        assert len(lives) == 2
        assert_no_gap(job)


def test_node_that_comes_back_is_a_new_life_and_keeps_its_ranks(tmp_path: Path) -> None:
    """dlrover pull 1357 (a relaunched node inherited what the old one had reported) and issue 450 (random ranks)."""
    with running(
        tmp_path,
        *("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1"),
        *(script("tick.py"), "--out", str(tmp_path / "out")),
    ) as job:
        job.wait_stepping(1)
        before = job.generation().assignment
        for life in (2, 3):
            job.kill_node("node-1")
            job.wait_event(NodeReady, life, lambda ready: ready.node == "node-1")
            job.wait_stepping(life)
            assert job.generation().assignment.members == before.members
        number = job.generation().assignment.number
        job.kill_worker(1)
        job.wait_stepping(number + 1)
        assert job.all(WorkerExited)[-1].node == "node-1", "events of its new life are numbered anew, and counted"
        assert job.decisions()[-1].actions[0].__class__ is RestartWorkers


def test_quick_leave_and_return_does_not_refill_the_restart_budget(tmp_path: Path) -> None:
    """RESTART.md case 4; pytorch issue 147064: leaving and coming back quickly bypassed --max-restarts."""
    with running(
        tmp_path,
        *("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--preload", "torch"),
        *(script("tick.py"), "--out", str(tmp_path / "out")),
    ) as job:
        job.wait_stepping(1)
        job.kill_worker(0)
        job.wait_stepping(2)
        job.kill_node("node-1")
        job.wait_event(NodeJoined, 2, lambda joined: joined.node.id == "node-1")
        job.wait_stepping(3)
        os.kill(job.control(), signal.SIGKILL)  # nor does a new control
        job.wait_event(ControlStarted, 2)
        for _ in range(2):
            number = job.generation().assignment.number
            job.kill_worker(1)
            job.wait_for(lambda records, n=number: job.generation().assignment.number > n or job.all(JobEnded))
            if not job.all(JobEnded):
                job.wait_stepping(number + 1)
        assert job.end() != 0
        assert "2 of 2 restarts" in job.all(JobEnded)[-1].reason
