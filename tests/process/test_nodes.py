"""Nodes that are lost, come back, are too few or too many, on real processes."""

import os
import signal
import socket
from pathlib import Path

import pytest

from perdure.host.proc import read_state
from perdure.vocab.decision import GiveUp, Grow, Hold, ReplaceNode, Shrink
from perdure.vocab.event import (
    GenerationBegan,
    JobEnded,
    NodeGathered,
    NodeJoined,
    NodeLost,
    NodeReady,
    SavePassed,
    WorkerExited,
    WorkersStarted,
)
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import Rank
from tests.process.jobs import SOURCE, Job, assert_ended, running, script

TRAIN = (script("train.py"), "--out", "out")
PLAIN = (script("plain.py"), "--out", "out")


def ranks(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    return {str(member.node): tuple(member.ranks) for member in assignment.members}


def wait_ready_again(job: Job, node: str, lives: int) -> None:
    """Until the `lives`-th agent of `node` is warm."""
    job.wait_event(NodeReady, lives, where=lambda e: e.node == node)


def lose_node(job: Job, node: str) -> None:
    """A node that is gone for longer than its grace; it comes back after that."""
    lost = len(job.all(NodeLost))
    with job.launcher_frozen():
        job.kill_node(node)
        job.wait_event(NodeLost, lost + 1)


def spare_of(job: Job, nodes: int) -> str:
    """The node that was left over at the start; a slow machine may have come too late to be a member."""
    (spare,) = {f"node-{i}" for i in range(nodes)} - set(job.members())
    wait_ready_again(job, spare, 1)
    return spare


def test_spare_takes_exactly_the_ranks_of_the_lost_node_which_comes_back_as_a_spare(tmp_path: Path) -> None:
    words = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--nproc-per-node", "2")
    with running(tmp_path, *words, *TRAIN) as job:
        job.wait_stepping(1)
        first, second = job.members()
        spare = spare_of(job, 3)
        lose_node(job, second)
        job.wait_stepping(2)
        assert ranks(job.generation().assignment) == {first: (0, 1), spare: (2, 3)}
        lost = job.all(NodeLost)
        assert [e.node for e in lost] == [second]
        assert lost[0].connection_closed

        wait_ready_again(job, second, 2)
        lose_node(job, first)  # which hosted the store and rank 0
        job.wait_stepping(3)
        assert ranks(job.generation().assignment) == {second: (0, 1), spare: (2, 3)}
        assert job.actions().count("ReplaceNode") == 2
        assert "RestartWorkers" not in job.actions()
        job.interrupt()
        assert job.end() == 3


@pytest.mark.parametrize("losses", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_lost_nodes_that_rejoin_in_a_row_all_come_back(tmp_path: Path, losses: int) -> None:
    words = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")
    lives = dict.fromkeys(("node-0", "node-1", "node-2"), 1)
    with running(tmp_path, *words, *PLAIN) as job:
        for loss in range(losses):
            job.wait_stepping(loss + 1)
            for node, count in lives.items():
                wait_ready_again(job, node, count)
            victim = job.members()[loss % 2]
            lose_node(job, victim)
            lives[victim] += 1
        job.wait_stepping(losses + 1)
        assert len(job.all(NodeLost)) == losses
        assert job.actions().count("ReplaceNode") == losses
        assert len(job.members()) == 2
        job.interrupt()
        assert job.end() == 3


def test_node_that_is_replaced_while_it_lives_has_ended_its_workers_before_others_start(tmp_path: Path) -> None:
    """The ladder's third time at one rank and step: the node is there, and so is the rank beside the failing one."""
    (tmp_path / "fail.py").write_text(
        "import os, pathlib, signal, time\nimport perdure\n\n"
        "run = perdure.current_run()\n"
        "mine = pathlib.Path(f'pids/{run.restarts}-{run.rank}-{os.getpid()}')\n"
        "for other in mine.parent.iterdir():\n"
        "    restarts, rank, pid = other.name.split('-')\n"
        "    if int(restarts) < run.restarts and pathlib.Path('/proc', pid).exists():\n"
        "        pathlib.Path('overlap').write_text(f'{other.name} lives beside {mine.name}')\n"
        "mine.touch()\n"
        "for step in run.steps(stop=10 if run.restarts == 3 else 1000):\n"
        "    if step == 5 and run.rank == 3 and run.restarts < 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(0.02)\n"
    )
    (tmp_path / "pids").mkdir()
    words = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--nproc-per-node", "2", "--max-restarts", "5")
    with running(tmp_path, *words, "fail.py") as job:
        job.wait_event(GenerationBegan)
        bad = job.members()[1]
        spare_of(job, 3)
        assert job.end() == 0
        assert job.actions() == ["Begin", "RestartWorkers", "RestartWorkers", "ReplaceNode", "Finish"]
        assert bad not in job.members()
        records = job.records()
        cleared = [r for r in records if isinstance(r, NodeGathered) and (r.generation, r.node) == (4, bad)]
        started = [r for r in records if isinstance(r, WorkersStarted) and r.generation == 4]
        assert records.index(cleared[0]) < min(map(records.index, started))
        assert not (tmp_path / "overlap").exists(), (tmp_path / "overlap").read_text()


def test_job_without_spare_is_held_and_resumes_when_the_node_is_back(tmp_path: Path) -> None:
    """RESTART.md case 14."""
    with running(tmp_path, "--local-nodes", "2", "--nproc-per-node", "1", *PLAIN) as job:
        job.wait_stepping(1)
        before = ranks(job.generation().assignment)
        agent = job.agent("node-0")
        lose_node(job, "node-1")
        job.wait_stepping(2)
        assert job.actions() == ["Begin", "Hold", "Begin"]
        assert ranks(job.generation().assignment) == before
        assert job.agent("node-0") == agent  # who was held kept its agent
        job.interrupt()
        assert job.end() == 3


def test_hold_that_is_over_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path, "--local-nodes", "2", "--nproc-per-node", "1", "--hold", "1s", *PLAIN) as job:
        job.wait_stepping(1)
        with job.launcher_frozen():  # so that the node does not come back
            job.kill_node("node-1")
            ended = job.wait_event(JobEnded)
        assert job.end() == 1
        assert ended.exit_code == 1
        assert "--hold" in ended.reason
        assert "1 node(s) are still missing" in ended.reason
        assert ended.reason in job.output
        actions = [action for decision in job.decisions() for action in decision.actions]
        assert [type(a) for a in actions[-2:]] == [Hold, GiveUp]


def test_job_shrinks_to_its_minimum_and_grows_at_a_checkpoint(tmp_path: Path) -> None:
    words = ("--local-nodes", "2", "--nnodes", "1:2", "--nproc-per-node", "2")
    with running(tmp_path, *words, *PLAIN, "--save-every", "10") as job:
        job.wait_stepping(1)
        assert job.generation().assignment.world_size == 4
        first, second = job.members()
        with job.launcher_frozen():
            job.kill_node(first)
            job.wait_stepping(2)
            assert ranks(job.generation().assignment) == {second: (0, 1)}
            assert job.actions()[-1] == "Shrink"
        job.wait_stepping(3)
        assert ranks(job.generation().assignment) == {second: (0, 1), first: (2, 3)}

        grown = next(r for r in job.decisions() if isinstance(r.actions[0], Grow))
        saved = next(r for r in job.all(SavePassed) if r.id == grown.answers)
        assert "checkpoint" in grown.because
        assert saved.generation == 2
        assert any(isinstance(a, Shrink) for d in job.decisions() for a in d.actions)
        job.interrupt()
        assert job.end() == 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_nodes_beyond_the_maximum_become_spares_and_end_well_with_the_job(tmp_path: Path) -> None:
    """RESTART.md case 5; pytorch 114097, NVRx 348, 266: a spare neither closes the job nor fails at its end."""
    words = ("--nnodes", "1", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    endpoint = f"127.0.0.1:{free_port()}"
    go = tmp_path / "go"
    program = tmp_path / "wait.py"
    program.write_text("import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\n")
    env = {"PERDURE_TOKEN": "a-token-for-this-test"}
    with running(tmp_path, *words, endpoint, str(program), str(go), env=env) as first:
        first.wait_running(1)
        with running(tmp_path, *words, endpoint, str(program), str(go), env=env) as second:
            first.wait_event(NodeReady, 2)
            assert len(first.all(GenerationBegan)) == 1
            go.touch()
            assert second.end() == 0
        assert first.end() == 0
    assert_ended(first.records(), 0)
    assert len(first.all(GenerationBegan)) == 1


def test_second_node_of_more_than_are_needed_takes_over_where_the_first_is_lost(tmp_path: Path) -> None:
    words = ("--local-nodes", "2", "--nnodes", "1", "--spares", "1", "--nproc-per-node", "1")
    with running(tmp_path, *words, *PLAIN, "--steps", "150") as job:
        job.wait_stepping(1)
        (member,), spare = job.members(), spare_of(job, 2)
        lose_node(job, member)
        job.wait_stepping(2)
        taken = [a for d in job.decisions() for a in d.actions if isinstance(a, ReplaceNode)]
        assert (taken[0].lost, taken[0].spares) == ((member,), (spare,))
        assert job.generation().assignment.node_of(Rank(0)) == spare
        assert job.end() == 0


def test_worker_that_dies_leaves_agents_and_fork_servers_alone(tmp_path: Path) -> None:
    """pytorch 123678, trainer 1638: a restart of workers is no shutdown, and only the worker group restarts."""
    with running(tmp_path, "--local-nodes", "2", "--nproc-per-node", "1", *PLAIN) as job:
        job.wait_stepping(1)
        agents = {node: job.agent(node) for node in ("node-0", "node-1")}
        servers, workers = job.fork_servers(), job.workers()
        assert len(servers) == 2
        job.kill_worker(1)
        job.wait_stepping(2)
        assert {node: job.agent(node) for node in agents} == agents
        assert job.fork_servers() == servers
        assert set(job.workers().values()).isdisjoint(workers.values())
        assert len(job.all(NodeJoined)) == 2
        assert [e.rank for e in job.all(WorkerExited)] == [1]
        job.interrupt()
        assert job.end() == 3


def test_agent_that_is_killed_alone_is_a_lost_node(tmp_path: Path) -> None:
    """pytorch-operator 359: a node that is loaded anew must not hang the others."""
    with running(tmp_path, "--local-nodes", "2", "--nproc-per-node", "1", *PLAIN) as job:
        job.wait_stepping(1)
        old = job.workers()[1]
        os.kill(job.agent("node-1"), signal.SIGKILL)
        job.wait_stepping(2)
        assert job.all(NodeLost)[0].node == "node-1"
        assert read_state(old) in (None, "Z")  # its workers ended with it
        job.interrupt()
        assert job.end() == 3


def test_frozen_agent_is_replaced_and_ended_by_its_launcher(tmp_path: Path) -> None:
    """An agent in state T cannot fence itself: after the lease its workers end with it, before they could do harm."""
    lease = "keep_alive_interval=1,keep_alive_max_attempt=2"
    shape = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--rdzv-conf", lease)
    with running(tmp_path, *shape, *TRAIN) as job:
        job.wait_stepping(1)
        victim = job.members()[1]
        frozen = job.agent(victim)
        workers = [pid for event in job.all(WorkersStarted) if event.node == victim for pid in event.pids]
        os.kill(frozen, signal.SIGSTOP)
        lost = job.wait_event(NodeLost)
        assert (lost.node, lost.connection_closed) == (victim, False)
        job.wait_stepping(2)
        assert all(read_state(pid) in (None, "Z") for pid in (frozen, *workers))


SLOW_DISK = '''"""Its first import on this machine takes until somebody lets it go on."""

import os
import time

try:
    os.close(os.open("first", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    pass
else:
    while not os.path.exists("go on"):
        time.sleep(0.05)
'''


def test_machine_that_is_slow_to_start_delays_only_itself(tmp_path: Path) -> None:
    """RESTART.md case 15: the ranks go to those that are ready; the slow one becomes the spare."""
    (tmp_path / "cold.py").write_text(SLOW_DISK)
    shape = ("--local-nodes", "3", "--nnodes", "2", "--spares", "1", "--preload", "cold")
    with running(tmp_path, *shape, *PLAIN, env={"PYTHONPATH": f"{SOURCE}:{tmp_path}"}) as job:
        job.wait_running(1)
        (slow,) = {f"node-{i}" for i in range(3)} - set(job.members())
        assert not [event for event in job.all(NodeReady) if event.node == slow]
        (tmp_path / "go on").touch()
        wait_ready_again(job, slow, 1)
        assert len(job.all(GenerationBegan)) == 1
