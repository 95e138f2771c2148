"""The end of a job that still has a checkpoint in memory only."""

from typing import Any

from perdure.vocab import event as e
from perdure.vocab.checkpoint import CheckpointId, Level
from perdure.vocab.ids import EventId, GenerationNumber
from perdure.wire.messages import Duty
from tests.unit.control.a_job import Job, a_job

STORE = "/store"


def an_id(step: int) -> CheckpointId:
    return CheckpointId(attempt=1, generation=GenerationNumber(1), step=step)


def committed(job: Job, step: int, store: str = STORE) -> None:
    what: dict[str, Any] = {"checkpoint": an_id(step), "level": Level.SEALED, "nbytes": 8, "store": store}
    job.take(e.CheckpointCommitted(id=EventId(f"control//committed-{step}"), at=job.now, **what))


def stored(job: Job, step: int) -> None:
    what: dict[str, Any] = {"checkpoint": an_id(step), "path": "p", "nbytes": 8}
    job.take(e.CheckpointStored(id=EventId(f"control//stored-{step}"), at=job.now, **what))


def ends(job: Job) -> list[e.JobEnded]:
    return [record for record in job.records if isinstance(record, e.JobEnded)]


def a_running_job(**rules: Any) -> Job:
    return a_job(2, max_restarts=0, **rules).join(0, 1).gather().run()


def test_failed_job_waits_for_its_checkpoint_to_reach_storage() -> None:
    job = a_running_job(flush=60.0)
    committed(job, 7)
    job.exit(0, 1)
    assert ends(job) == []
    assert isinstance(job.records[-1], e.EndDecided)
    assert [job.orders(index).duty for index in (0, 1)] == [Duty.WAIT] * 2  # no worker lives, the memory servers do
    stored(job, 7)
    (end,) = ends(job)
    assert end.exit_code == 1
    assert end.reason.endswith("step 7 of generation 1 is in storage")
    assert job.orders(0).duty is Duty.STOP


def test_wait_for_storage_ends_at_its_limit_and_says_what_was_lost() -> None:
    job = a_running_job(flush=60.0)
    committed(job, 3)
    stored(job, 3)
    committed(job, 7)
    job.exit(0, 1).after(59.0)
    assert ends(job) == []
    job.after(1.5)
    (end,) = ends(job)
    assert "step 7 of generation 1 has not reached storage within 1 min 0 s, step 3 of" in end.reason


def test_job_without_a_store_or_with_all_of_it_there_ends_at_once() -> None:
    in_memory, there = a_running_job(), a_running_job()
    committed(in_memory, 7, store="")
    committed(there, 7)
    stored(there, 7)
    assert [len(ends(job.exit(0, 1))) for job in (in_memory, there)] == [1, 1]


def test_loss_of_the_last_node_ends_the_wait() -> None:
    job = a_running_job()
    committed(job, 7)
    job.exit(0, 1).lose(0)
    assert ends(job) == []
    job.lose(1)
    assert "has not reached storage" in ends(job)[0].reason


def test_stop_leaves_the_rest_of_its_grace_to_the_checkpoint_and_a_second_one_nothing() -> None:
    job = a_running_job()
    committed(job, 7)
    job.stop(30.0)
    for rank in range(4):
        job.exit(rank, 0)
    assert ends(job) == []
    job.after(20.0)
    assert ends(job) == []
    job.stop(0.0)
    (end,) = ends(job)
    assert end.exit_code == 3


def test_stop_during_the_wait_of_a_failed_job_keeps_its_exit_code() -> None:
    job = a_running_job(flush=600.0)
    committed(job, 7)
    job.exit(0, 9).stop(5.0).after(6.0)
    assert ends(job)[0].exit_code == 9


def test_checkpoint_that_was_gone_back_to_counts_and_not_the_newer_one_that_is_lost() -> None:
    job = a_running_job()
    committed(job, 5)
    stored(job, 5)
    committed(job, 9)
    what: dict[str, Any] = {"generation": GenerationNumber(1), "checkpoint": an_id(5), "from_memory": 2}
    job.take(e.CheckpointChosen(id=EventId("control//chosen"), at=job.now, **what))
    assert len(ends(job.exit(0, 1))) == 1
