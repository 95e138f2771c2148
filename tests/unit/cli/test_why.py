import msgspec

from perdure.cli.story import Block, FaultStory, three_lines
from perdure.cli.why import WhyReport, explain, render_why, why
from perdure.vocab import event as e
from tests.unit.goodput.a_log import LogBuilder, a_run

KILLED = "rank 2 on node-1 was ended by SIGKILL after step 60"


def a_killed_worker() -> LogBuilder:
    log = a_run().after(10.0).exited(2, signal=9, step=60).diagnosed("worker.signal", KILLED, 1, rank=2)
    return log.restart().running(0.09, last_step=60).stepped(51, after=0.11).caught_up(61, after=1.5)


def blocks(log: LogBuilder) -> list[Block]:
    story = FaultStory()
    return [block for record in log.records for block in story.tell(record)]


def test_explain_killed_worker_gives_the_chain_and_the_end() -> None:
    because = "the first fault of this kind: the same nodes can go on"
    again = "1.50 s of steps were done again"
    lines = explain(a_killed_worker().after(1.0).finished().finish().after(0.1).ended().records)
    start = lines.index("+13 s (00:53:33)  worker.signal")
    assert lines[start : start + 5] == [
        "+13 s (00:53:33)  worker.signal",
        f"  event      {KILLED}",
        "  diagnosis  worker.signal, 90% sure: The meaning of worker.signal.",
        f"  decision   all workers start anew as generation 2, because {because}",
        f"  outcome    generation 2 ran after 0.09 s, every rank had its first step after 0.20 s, {again}",
    ]
    assert lines[0].startswith("job run-7f3a2c, started 2026-11-30 00:53:20 UTC: 2:2 nodes x 2 workers")
    assert lines[-1] == "+16 s (00:53:35)  ended with exit code 0: every rank has finished"


def test_explain_faults_that_came_together_are_counted_with_the_one_answered() -> None:
    log = a_run().after(5.0).exited(0, code=1).exited(1, code=1).lost(1).diagnosed("node.lost", "node-1 is gone", 1)
    (line,) = [line for line in explain(log.replace(1, 2).records) if "came with it" in line]
    assert line == (
        "  event      node-1 is gone (and 2 more that came with it, first: rank 0 on node-0 ended with exit code 1)"
    )


def test_explain_late_fault_of_the_generation_before_belongs_to_the_decision_that_ended_it() -> None:
    log = a_run().after(5.0).exited(2, signal=9).diagnosed("worker.signal", "rank 2 was killed", 1).restart()
    late = {"node": "node-0", "generation": 1, "rank": 0, "local_rank": 0, "pid": 7, "signal": None, "step": None}
    log.event(e.WorkerExited, exit_code=1, **late).running().stepped(9).after(5.0)
    log.stopped(1).diagnosed("worker.stopped", "rank 1 was stopped", 0).restart()
    first, second = [chain for chain in why(log.records).chains if chain.decision.diagnosis is not None]
    assert [type(other) for other in first.others] == [e.WorkerExited]
    assert second.others == ()


def test_explain_running_job_says_what_it_waits_for() -> None:
    log = a_run().after(5.0).exited(0, signal=9).diagnosed("worker.signal", "rank 0", 0).restart().running()
    lines = explain(log.records)
    assert "  outcome    generation 2 ran after 0.10 s, the first step is awaited" in lines
    assert lines[-1] == "not ended: the last record is of +8.10 s (00:53:28)"


def test_explain_nothing_is_one_sentence() -> None:
    assert explain(()) == ["nothing is known of this job: its log is empty"]


def test_why_json_is_decoded_to_the_same_report() -> None:
    log = a_killed_worker().after(1.0).finished().finish().ended()
    report = msgspec.json.decode(render_why(log.records, json=True), type=WhyReport)
    assert report == why(log.records)
    assert [chain.outcome is not None for chain in report.chains] == [False, True, False]


def test_story_killed_worker_is_told_when_the_next_generation_runs() -> None:
    log = a_killed_worker()
    assert blocks(log) == [
        (
            f"fault   {KILLED}",
            "means   The meaning of worker.signal. [worker.signal]",
            "done    all workers start anew as generation 2; running again after 0.09 s",
        )
    ]
    assert three_lines(log.records) == blocks(log)[0]


def test_story_detection_is_told_apart_from_recovery() -> None:
    log = a_run().after(5.0).stopped(1).diagnosed("worker.stopped", "rank 1", 0).restart().running(0.12)
    assert blocks(log)[0][2].endswith("generation 2; noticed after 0.50 s, running again 0.12 s later")


def test_story_fault_in_a_recovery_overtakes_the_first() -> None:
    log = a_run().after(5.0).exited(0, signal=9).diagnosed("worker.signal", "rank 0", 0).restart()
    log.after(0.05).exited(1, signal=9).diagnosed("worker.signal", "rank 1", 0).restart().running(0.1)
    assert [block[0] for block in blocks(log)] == ["fault   rank 0", "fault   rank 1"]
    assert blocks(log)[0][2].endswith("; overtaken by the next fault 0.05 s later")


def test_story_hold_is_told_at_once_and_again_when_it_is_over() -> None:
    log = a_run().lost(2).after(5.0).lost(1).diagnosed("node.lost", "node-1 is gone", 1).hold()
    assert [block[0] for block in blocks(log)] == ["fault   node-1 is gone"]
    log.after(30.0).joined(3).begin(0, 3).running(0.1)
    assert blocks(log)[1] == (
        "change  the job goes on",
        "means   all nodes are there",
        "done    generation 2 begins: 4 ranks on node-0, node-3; the hold took 30 s",
    )


def test_story_give_up_is_told_at_once() -> None:
    log = a_run().after(5.0).exited(0, code=1).diagnosed("worker.exception", "rank 0 raised", 0).give_up("again")
    assert blocks(log)[0][2] == "done    the job ends with exit code 1"


def test_story_growth_is_a_change_and_not_a_fault() -> None:
    log = a_run().after(5.0).joined(3).grow(3).running(0.1)
    assert blocks(log)[0][0] == "change  node-3 can take part"


def test_story_normal_run_and_stop_tell_nothing() -> None:
    log = a_run().after(5.0).event(e.StopRequested, by="SIGINT", signal=2, grace=30.0)
    assert blocks(log.finished().finish().ended()) == []
