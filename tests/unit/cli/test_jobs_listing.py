import msgspec

from perdure.cli.jobs import JobState, JobSummary, render_jobs, summarize
from perdure.vocab.ids import JobId
from tests.unit.goodput.a_log import LogBuilder, a_log, a_run

JOB = JobId("run-7f3a2c")


def summary(log: LogBuilder, *, alive: bool = True) -> JobSummary:
    return summarize(JOB, log.records, control_alive=alive, now=log.at + 100.0)


def test_summary_running_job_counts_nodes_spares_restarts_and_time_until_now() -> None:
    job = summary(a_run().after(10.0).exited(2, signal=9).restart().running())
    assert (job.state, job.nodes, job.spares, job.restarts, job.exit_code) == (JobState.RUNNING, 2, 1, 1, None)
    assert round(job.wall, 3) == 113.1
    assert job.last_event == "generation 2 is running"


def test_summary_states_follow_the_log_and_control() -> None:
    held = a_run().after(1.0).lost(2).lost(1).diagnosed("node.lost", "gone", 1).hold()
    assert summary(a_log().submitted().joined(0)).state is JobState.STARTING
    assert summary(held).state is JobState.HELD
    assert summary(held, alive=False).state is JobState.UNKNOWN
    assert summary(a_run().ended(0), alive=False).state is JobState.DONE
    assert summary(a_run().ended(1), alive=False).state is JobState.FAILED
    assert summary(a_run().ended(3, "stopped by SIGTERM"), alive=False).state is JobState.STOPPED
    assert summary(held.joined(3).begin(0, 3)).state is JobState.RUNNING


def test_summary_of_an_empty_log_is_a_row_without_times() -> None:
    job = summarize(JOB, (), control_alive=False)
    assert (job.started, job.wall, job.state, job.last_event) == (None, 0.0, JobState.UNKNOWN, "")


def test_render_jobs_never_cuts_an_id() -> None:
    text = render_jobs([summary(a_run().ended(1, "a reason " * 30))], json=False, width=40)
    assert text.splitlines() == [
        "job         state   started (UTC)     wall    nodes  restarts  exit  last event",
        "run-7f3a2c  failed  2026-11-30 00:53  3.00 s    2+1         0     1  ended with exit…",
    ]


def test_render_jobs_json_is_decoded_to_the_same_rows() -> None:
    rows = [summary(a_run()), summary(a_run().ended(0))]
    assert msgspec.json.decode(render_jobs(rows, json=True), type=list[JobSummary]) == rows
    assert render_jobs([], json=True) == "[]"
    assert render_jobs([], json=False) == "no jobs"
