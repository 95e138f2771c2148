"""The ladder with its memory."""

import pytest

from perdure.policy.recovery import CLIMB_AFTER, STOP_AFTER
from perdure.vocab.decision import GiveUp, ReplaceNode
from perdure.vocab.event import MemoryEvidence
from tests.unit.control.a_job import Job, a_job


def ended(job: Job) -> str:
    assert job.state.ended is not None
    return job.state.ended.reason


def test_the_same_exception_at_the_same_line_and_step_ends_the_job_after_one_retry() -> None:
    job = a_job(2, max_restarts=100).started().raise_(1).run().raise_(2)
    assert job.did == ["restart_workers", "give_up"]
    assert "the same exception at the same line and step" in ended(job)
    assert job.state.ended is not None
    assert job.state.ended.exit_code == 1


@pytest.mark.parametrize(("where", "step"), [("train.py:8", 5), ("train.py:7", 6)])
def test_an_exception_elsewhere_is_another_one(where: str, step: int) -> None:
    job = a_job(2).started().raise_(1).run().raise_(1, where, step)
    assert job.did == ["restart_workers", "restart_workers"]


def test_an_exception_without_a_step_is_the_same_only_for_a_while() -> None:
    job = a_job(2, restart_window=600.0).started().raise_(1, step=None).run().after(601.0).raise_(1, step=None)
    assert job.did == ["restart_workers", "restart_workers"]
    job.run().raise_(1, step=None)
    assert job.did[-1] == "give_up"


def test_a_syntax_error_is_never_retried() -> None:
    from perdure.vocab.event import WorkerError

    error = WorkerError(type="SyntaxError", message="invalid syntax", where="train.py:1", traceback="…")
    assert a_job(2).started().exit(0, 1, error=error).did == ["give_up"]


def test_the_budget_counts_restarts_in_its_window() -> None:
    job = a_job(2, max_restarts=2, restart_window=100.0).started()
    job.exit(0, None, 9, step=1).run().after(60.0).exit(1, None, 9, step=2).run().after(50.0)
    job.exit(2, None, 9, step=3).run()
    assert job.did == ["restart_workers"] * 3
    job.exit(3, None, 11, step=4)
    assert job.did[-1] == "give_up"
    assert "2 of 2 restarts" in ended(job)
    assert isinstance(job.last, GiveUp)
    assert job.last.exit_code == 128 + 11


def test_no_restarts_means_none() -> None:
    assert a_job(2, max_restarts=0).started().exit(0, None, 9).did == ["give_up"]


def test_lost_nodes_take_nothing_from_the_budget() -> None:
    job = a_job(2, max_restarts=0).started()
    for _ in range(5):
        job.lose(1).rejoin(1).run()
    assert job.state.ended is None


def test_the_third_time_at_the_same_rank_and_step_another_node_takes_the_ranks() -> None:
    job = a_job(2, max_restarts=100).started().join(2)
    for _ in range(CLIMB_AFTER):
        job.exit(2, None, 11, step=40).run()
    assert job.did == ["restart_workers", "restart_workers", "replace_node"]
    assert isinstance(job.decisions[-1].actions[0], ReplaceNode)
    assert job.ranks == {0: (0, 1), 2: (2, 3)}
    assert "3rd time" in job.decisions[-1].because


def test_a_fault_that_nothing_helps_against_ends_the_job_however_slowly_it_comes_back() -> None:
    job = a_job(2, max_restarts=3, restart_window=60.0).started()
    for _ in range(STOP_AFTER - 1):
        job.exit(2, None, 11, step=40).run().after(1000.0)
    assert job.state.ended is None
    job.exit(2, None, 11, step=40)
    assert "6th time" in ended(job)


def test_climbing_with_a_finished_member_gone_replaces_both() -> None:
    job = a_job(2, max_restarts=100).started().join(2, 3)
    for _ in range(CLIMB_AFTER - 1):
        job.exit(0, None, 11, step=40).run()
    job.exit(2).exit(3).lose(1).exit(0, None, 11, step=40)
    assert set(job.members) <= {int(node.removeprefix("node-")) for node in job.state.fit}


def test_kills_from_outside_take_from_the_budget_only_however_often_they_hit_one_step() -> None:
    job = a_job(2, max_restarts=100).started()
    for _ in range(STOP_AFTER + 2):
        job.exit(2, None, 9, step=40).run()
    assert job.state.ended is None


@pytest.mark.parametrize(("apart", "action"), [(60.0, "give_up"), (7200.0, "restart_workers")])
def test_lack_of_memory_is_retried_once_in_a_window(apart: float, action: str) -> None:
    memory = MemoryEvidence(by="cgroup", limit=1 << 30, usage=1 << 30, rss=1 << 29, line="oom_kill 0 to 1")
    job = a_job(2, restart_window=3600.0).started().exit(1, None, 9, memory=memory).run()
    job.after(apart).exit(1, None, 9, memory=memory)
    assert job.did == ["restart_workers", action]


def test_a_member_that_comes_back_cold_leaves_its_ranks_to_a_warm_spare() -> None:
    job = a_job(2).started().join(2).lose_and_rejoin_at_once(1)
    assert job.did[-1] == "replace_node"
    assert set(job.members) == {0, 2}
