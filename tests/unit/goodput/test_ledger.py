from perdure.goodput import Ledger, Phase, account
from perdure.vocab import event as e
from tests.unit.goodput.a_log import LogBuilder, a_log, a_run, node_id


def seconds(ledger: Ledger) -> dict[str, float]:
    return {phase.value: value for phase, value in ledger.by_phase.items() if value}


def phases_of(ledger: Ledger, node: int) -> list[tuple[str, float]]:
    return [(i.phase.value, round(i.end - i.begin, 3)) for i in ledger.intervals if i.node == node_id(node)]


def end_well(log: LogBuilder) -> Ledger:
    return account(log.finished().finish().after(0.1).ended().records)


def test_account_run_without_faults_is_start_up_training_shutdown_and_spare() -> None:
    ledger = end_well(a_run().after(10.0))
    assert phases_of(ledger, 0) == [("start-up", 2.6), ("training", 10.0), ("shutdown", 0.1)]
    assert phases_of(ledger, 2) == [("start-up", 2.2), ("idle spare", 10.5)]
    assert seconds(ledger) == {"start-up": 7.4, "training": 20.0, "shutdown": 0.2, "idle spare": 10.5}
    assert ledger.wall == 13.1
    assert ledger.effective == 20.0 / 27.6
    assert (ledger.ended, ledger.exit_code, ledger.restarts) == (True, 0, ())


def test_account_killed_worker_costs_recovery_until_each_first_step_and_redone_steps() -> None:
    log = a_run().after(10.0).exited(2, signal=9, step=60).diagnosed("worker.killed", "rank 2 was killed", 1, rank=2)
    log.after(0.01).restart().running(0.09, last_step=60).stepped(51, after=0.1).caught_up(61, after=1.5)
    ledger = end_well(log.after(5.0))
    for node in (0, 1):
        assert phases_of(ledger, node) == [
            ("start-up", 2.6),
            ("training", 10.0),
            ("recovery", 0.2),
            ("redone steps", 1.5),
            ("training", 5.0),
            ("shutdown", 0.1),
        ]
    (restart,) = ledger.restarts
    assert (restart.cause, restart.actions, restart.generation) == ("worker.killed", ("restart_workers",), 2)
    assert (restart.detection_s, restart.running_s, restart.recovery_s, restart.redone_s) == (0.0, 0.1, 0.2, 1.5)
    assert restart.recovered
    assert ledger.restarts_by_cause == {"worker.killed": 1}


def test_account_resumed_after_the_highest_step_redoes_nothing() -> None:
    log = a_run().after(10.0).exited(2, signal=9, step=60).restart().running(last_step=60).stepped(61)
    assert Phase.REDONE not in {i.phase for i in end_well(log.after(1.0)).intervals}


def test_account_stopped_worker_takes_detection_from_the_training_of_every_member() -> None:
    log = a_run().after(10.0).stopped(1, stopped_for=0.5).diagnosed("worker.stopped", "rank 1 was stopped", 0)
    ledger = end_well(log.restart().running().stepped(90).after(5.0))
    assert phases_of(ledger, 1)[1:4] == [("training", 9.5), ("detection", 0.5), ("recovery", 0.3)]
    assert phases_of(ledger, 2) == [("start-up", 2.2), ("idle spare", 16.3 - 0.5)]
    assert ledger.restarts[0].detection_s == 0.5


def test_account_lost_node_is_present_until_its_loss_and_the_spare_recovers() -> None:
    log = a_run().after(10.0).lost(1, silent_for=0.6).diagnosed("node.lost", "node-1 is gone", 1).replace(1, 2)
    log.running().stepped(90).after(4.0).joined(1).after(1.0)
    ledger = end_well(log)
    assert phases_of(ledger, 1) == [("start-up", 2.6), ("training", 9.4), ("detection", 0.6), ("idle spare", 1.1)]
    assert phases_of(ledger, 0)[1:4] == [("training", 9.4), ("detection", 0.6), ("recovery", 0.3)]
    assert phases_of(ledger, 2) == [
        ("start-up", 2.2), ("idle spare", 10.4), ("recovery", 0.3), ("training", 5.0), ("shutdown", 0.1)
    ]  # fmt: skip


def test_account_hold_is_one_restart_with_the_wait_apart() -> None:
    log = a_run().lost(2).after(10.0).lost(1, silent_for=0.5).diagnosed("node.lost", "node-1 is gone", 1).hold()
    log.after(30.0).joined(3).after(2.0).begin(0, 3).running().stepped(90).after(1.0)
    ledger = end_well(log)
    assert phases_of(ledger, 0)[1:5] == [("training", 9.5), ("detection", 0.5), ("held", 32.0), ("recovery", 0.3)]
    assert phases_of(ledger, 3)[0] == ("held", 2.0)
    (restart,) = ledger.restarts
    assert (restart.held_s, restart.recovery_s, restart.actions) == (32.0, 0.3, ("hold", "begin"))


def test_account_fault_before_the_first_step_of_a_recovery_prolongs_it() -> None:
    log = a_run().after(10.0).exited(0, signal=9).diagnosed("worker.killed", "rank 0", 0).restart().running()
    log.after(1.0).exited(1, signal=9).diagnosed("worker.killed", "rank 1", 0).restart().running().stepped(90)
    ledger = end_well(log.after(1.0))
    assert phases_of(ledger, 1)[1:3] == [("training", 10.0), ("recovery", 1.4)]
    assert [(r.recovered, r.recovery_s) for r in ledger.restarts] == [(False, 1.1), (True, 0.3)]


def test_account_first_generation_that_fails_before_a_step_is_start_up_until_the_fault() -> None:
    log = a_log().submitted().joined(0, 1).begin(0, 1).running(0.5).after(1.0)
    log.exited(0, code=1).diagnosed("worker.exception", "rank 0", 0).restart().running(0.1).stepped(0, after=0.2)
    ledger = end_well(log.after(1.0))
    assert phases_of(ledger, 0)[:3] == [("start-up", 1.5), ("recovery", 0.3), ("training", 1.0)]


def test_account_script_that_tells_no_steps_trains_when_its_workers_run() -> None:
    log = a_log().submitted().joined(0, 1).after(1.0).begin(0, 1).running(0.5).after(8.0)
    log.exited(0, signal=9).diagnosed("worker.killed", "rank 0", 0).restart().running(0.1).after(2.0)
    ledger = end_well(log)
    assert phases_of(ledger, 0)[:4] == [("start-up", 1.5), ("training", 8.0), ("recovery", 0.1), ("training", 2.0)]
    assert ledger.restarts[0].recovered


def test_account_growth_is_a_restart_caused_by_its_action() -> None:
    log = a_log().submitted().joined(0).begin(0).running().stepped(0).after(5.0).joined(1).after(1.0)
    ledger = end_well(log.grow(1).running().stepped(30).after(1.0))
    assert ledger.restarts_by_cause == {"grow": 1}
    assert phases_of(ledger, 1)[:3] == [("idle spare", 1.0), ("recovery", 0.3), ("training", 1.0)]


def test_account_give_up_is_shutdown_from_the_fault_on() -> None:
    log = a_run().after(10.0).exited(0, code=1).diagnosed("worker.exception", "rank 0", 0).give_up("again")
    ledger = account(log.after(0.5).ended(1, "again").records)
    assert phases_of(ledger, 0)[1:] == [("training", 10.0), ("shutdown", 0.5)]
    assert (ledger.exit_code, ledger.restarts) == (1, ())


def test_account_stop_request_is_shutdown_for_members() -> None:
    log = a_run().after(10.0).event(e.StopRequested, by="SIGTERM", signal=15, grace=30.0).after(2.0)
    ledger = account(log.finished().after(0.1).ended().records)
    assert phases_of(ledger, 0)[1:] == [("training", 10.0), ("shutdown", 2.1)]
    assert phases_of(ledger, 2)[1:] == [("idle spare", 12.5)]


def test_account_running_job_is_accounted_until_now() -> None:
    log = a_run()
    ledger = account(log.records, now=log.at + 7.0)
    assert phases_of(ledger, 0) == [("start-up", 2.6), ("training", 7.0)]
    assert not ledger.ended


def test_account_late_step_of_an_older_generation_changes_nothing() -> None:
    log = a_run().after(10.0).exited(0, signal=9).restart()
    log.event(e.StepsBegun, node=node_id(0), generation=1, step=70)
    ledger = account(log.records, now=log.at + 1.0)
    assert phases_of(ledger, 0)[1:] == [("training", 10.0), ("recovery", 1.0)]


def test_account_event_that_arrives_late_counts_from_its_own_time() -> None:
    log = a_log().submitted().joined(0).begin(0).running(0.5)
    log.after(1.0).event(e.StepsBegun, node=node_id(0), generation=1, step=0, at=log.at - 0.25)
    ledger = account(log.records, now=log.at)
    assert phases_of(ledger, 0) == [("start-up", 1.25), ("training", 0.25)]


def test_account_nothing_is_an_empty_ledger() -> None:
    ledger = account(())
    assert (ledger.wall, ledger.node_seconds, ledger.effective, ledger.restarts) == (0.0, 0.0, 0.0, ())
