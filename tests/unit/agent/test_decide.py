"""What an agent does about what is ordered, and about what happens on its node."""

import pytest

from perdure.agent import state as facts
from perdure.agent.state import EXIT_FENCED, AskPeers, EndStore, Exit, Signal, StartStore, StartWorkers, StopAfter
from perdure.vocab import event as e
from perdure.wire.layouts import LoopPhase
from perdure.wire.messages import Duty
from tests.unit.agent.a_node import ME, OTHER, SPARE, START, a_node, drain


def kinds(events: list[e.AnyEvent]) -> list[type]:
    return [type(event) for event in events]


# --- gathering and starting ------------------------------------------------------------------------------------------


def test_the_hosts_first_duty_is_the_store_and_gathering_waits_for_it() -> None:
    node = a_node().ordered(Duty.GATHER)
    assert node.actions == [StartStore(1)]  # type: ignore[arg-type]
    node.store()
    (event,) = node.told
    assert isinstance(event, e.NodeGathered)
    assert event.store is not None


def test_a_node_without_the_store_has_gathered_at_once() -> None:
    (event,) = a_node().ordered(Duty.GATHER, nodes=(OTHER, ME)).told
    assert isinstance(event, e.NodeGathered)
    assert event.store is None


def test_workers_are_started_once_and_told_of_when_all_are_up() -> None:
    node = a_node().ordered(Duty.GATHER).store().ordered(Duty.RUN)
    assert kinds(node.asked) == [StartWorkers]  # type: ignore[arg-type]
    assert node.after(1.0).actions == []
    assert kinds(node.launched().told) == [e.WorkersStarted]
    assert node.after(1.0).actions == []


def test_orders_that_are_older_than_those_known_change_nothing() -> None:
    node = a_node().running()
    old = facts.Orders(version=1, job="job", duty=Duty.STOP)  # type: ignore[arg-type]
    assert node.take(facts.ordered(node.state, old)).actions == []
    assert node.state.orders is not None
    assert node.state.orders.duty is Duty.RUN


def test_a_new_generation_kills_the_old_workers_and_gathers_when_they_are_gone() -> None:
    node = a_node().running().ordered(Duty.GATHER, 2, (OTHER, ME))
    assert node.asked == [Signal((100, 101), 9), EndStore(901)]
    assert node.told == []
    node.ended(100, None, 9)
    assert node.told == []
    assert kinds(node.ended(101, None, 9).told) == [e.NodeGathered]


def test_the_end_of_a_worker_that_was_killed_on_order_is_no_news() -> None:
    node = a_node().running().ordered(Duty.GATHER, 2, (OTHER, ME)).ended(100, None, 9)
    assert e.WorkerExited not in kinds(node.told)


def test_the_end_of_a_worker_by_itself_is_told_once() -> None:
    node = a_node().running().ended(101, 3)
    (event,) = node.told
    assert isinstance(event, e.WorkerExited)
    assert (event.rank, event.exit_code) == (1, 3)
    assert node.ended(101, 3).told == []


def test_late_orders_of_a_node_that_was_cut_off_start_nothing() -> None:
    node = a_node().ordered(Duty.GATHER).store().after(6.0, heard=False).ordered(Duty.RUN)
    assert node.asked == []
    assert kinds(node.after(0.1).asked) == [StartWorkers]  # type: ignore[arg-type]


def test_nothing_is_started_before_the_node_is_warm() -> None:
    node = a_node(warm=False).ordered(Duty.GATHER)
    assert node.actions == []
    assert node.take(facts.warmed(node.state)).asked == [StartStore(1)]  # type: ignore[arg-type]
    node = a_node(warm=False).ordered(Duty.GATHER, nodes=(OTHER, ME)).ordered(Duty.RUN, nodes=(OTHER, ME))
    assert node.actions == []
    assert kinds(node.take(facts.warmed(node.state)).asked) == [StartWorkers]  # type: ignore[arg-type]


def test_a_cold_node_that_is_left_out_of_the_next_generation_clears_at_once() -> None:
    node = a_node(warm=False).ordered(Duty.GATHER, nodes=(OTHER, ME)).ordered(Duty.RUN, nodes=(OTHER, ME))
    assert kinds(node.ordered(Duty.GATHER, 2, (OTHER, SPARE)).told) == [e.NodeGathered]


def test_a_node_that_is_left_out_ends_its_workers_and_says_so() -> None:
    node = a_node().running().ordered(Duty.GATHER, 2, (OTHER, SPARE))
    assert node.asked == [Signal((100, 101), 9), EndStore(901)]
    (event,) = node.ended(100, None, 9).ended(101, None, 9).told
    assert isinstance(event, e.NodeGathered)
    assert (event.generation, event.store) == (2, None)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_silence_of_half_a_lease_makes_it_ask_its_peers_again_and_again() -> None:
    node = a_node().running().after(2.4, heard=False)
    assert node.actions == []
    assert node.after(0.2, heard=False).actions == [AskPeers()]
    assert node.after(0.5, heard=False).actions == []
    assert node.after(0.6, heard=False).actions == [AskPeers()]


def test_silence_of_a_lease_kills_the_workers_and_ends_the_agent() -> None:
    node = a_node().running().after(5.1, heard=False)
    assert kinds(node.told) == [e.NodeFenced]
    assert Signal((100, 101), 9) in node.actions
    node.ended(100, None, 9).ended(101, None, 9)
    assert [action.code for action in node.asked if isinstance(action, Exit)] == [EXIT_FENCED]


def test_a_majority_of_peers_that_vouch_lets_it_go_on() -> None:
    node = a_node().running().after(4.0, heard=False)
    node.take(facts.peers_answered(node.state, 1, 3, node.now)).after(3.0, heard=False)
    assert node.state.fenced is None
    assert node.after(2.1, heard=False).state.fenced is not None


def test_a_minority_of_peers_does_not() -> None:
    node = a_node().running().after(4.0, heard=False)
    node.take(facts.peers_answered(node.state, 0, 3, node.now)).after(1.1, heard=False)
    assert node.state.fenced is not None


def test_a_node_in_touch_with_control_vouches_for_nobody() -> None:
    node = a_node().running().after(1.0)
    assert facts.vouch(node.state, OTHER, node.now + 1.0) == (node.state, False)


def test_a_spare_vouches_too_when_control_is_silent_for_it_as_well() -> None:
    node = a_node().ordered(Duty.WAIT).after(3.0, heard=False)
    _, yes = facts.vouch(node.state, OTHER, node.now)
    assert yes


def test_a_stranger_is_vouched_for_by_nobody() -> None:
    node = a_node().running().after(3.0, heard=False)
    _, yes = facts.vouch(node.state, ME, node.now)
    assert not yes


def test_who_has_vouched_gathers_without_the_other_only_after_its_lease() -> None:
    node = a_node().ordered(Duty.WAIT).after(3.0, heard=False)
    node.state, yes = facts.vouch(node.state, OTHER, node.now)
    assert yes
    node.after(1.0).ordered(Duty.GATHER, 2, (SPARE, ME))
    assert node.told == []
    assert node.after(3.9).told == []
    assert kinds(node.after(0.2).told) == [e.NodeGathered]


def test_who_has_vouched_gathers_with_the_other_at_once() -> None:
    node = a_node().ordered(Duty.WAIT).after(3.0, heard=False)
    node.state, _ = facts.vouch(node.state, OTHER, node.now)
    assert kinds(node.after(0.1).ordered(Duty.GATHER, 2, (OTHER, ME)).told) == [e.NodeGathered]


def test_a_spare_without_workers_does_not_end_itself() -> None:
    assert a_node().ordered(Duty.WAIT).after(100.0, heard=False).actions == []


# --- workers that hang -----------------------------------------------------------------------------------------------


def test_a_stopped_worker_is_told_of_after_half_a_second_and_once() -> None:
    node = a_node().running().read(100, 5, "T")
    assert node.told == []
    (event,) = node.after(0.5).told
    assert isinstance(event, e.WorkerStopped)
    assert event.stopped_for == pytest.approx(0.5)
    assert node.after(1.0).told == []


def test_a_worker_that_a_debugger_stopped_is_left_alone() -> None:
    node = a_node().running().read(100, 5, "t").read(101, 5, phase=LoopPhase.DONE)
    assert node.after(1e5).told == []


@pytest.mark.parametrize(
    ("phase", "limit"),
    [
        (LoopPhase.START_UP, 600.0),
        (LoopPhase.FIRST_STEP, 1800.0),
        (LoopPhase.TRAINING, 600.0),
        (LoopPhase.CHECKPOINT, 1800.0),
        (LoopPhase.EVALUATION, 1800.0),
        (LoopPhase.OTHER, 1800.0),
    ],
)
def test_every_limit_fires_nvrx_299(phase: LoopPhase, limit: float) -> None:
    node = a_node().running().read(100, 5, phase=phase).read(101, 5, phase=LoopPhase.DONE)
    assert e.WorkerStalled not in kinds(node.after(limit).told)
    (event,) = node.after(0.1).told
    assert isinstance(event, e.WorkerStalled)
    assert (event.rank, event.phase, event.limit) == (0, phase.name.lower(), limit)
    assert node.after(1000.0).told == []


def test_a_second_stall_of_the_same_worker_is_told_of_too_flagscale_1243() -> None:
    node = a_node().running().read(100, 5).read(101, 5, phase=LoopPhase.DONE).after(601.0)
    assert kinds(node.told) == [e.WorkerStalled]
    node.read(100, 6)
    assert kinds(node.after(601.0).told) == [e.WorkerStalled]


def test_a_worker_in_state_d_is_waited_for() -> None:
    node = a_node().running().read(100, 5, "D").read(101, 5, phase=LoopPhase.DONE)
    assert node.after(1e5).told == []


def test_a_worker_that_outlives_sigkill_is_told_of_and_given_up_pytorch_185414() -> None:
    node = a_node().running().ordered(Duty.GATHER, 2, (OTHER, ME)).ended(100, None, 9)
    assert node.after(4.9).told == []
    assert kinds(node.after(0.2).told) == [e.WorkerUnkillable, e.NodeGathered]


# --- steps -----------------------------------------------------------------------------------------------------------


def test_the_first_step_of_all_ranks_is_told() -> None:
    node = a_node().running().read(100, 1)
    assert node.told == []
    assert kinds(node.read(101, 1).told) == [e.StepsBegun]
    assert node.read(100, 2).told == []


def test_having_caught_up_is_told_when_the_slowest_has() -> None:
    node = a_node().ordered(Duty.GATHER).store().ordered(Duty.RUN, redo_until=7).launched()
    node.read(100, 8).read(101, 6)
    assert kinds(node.told) == [e.StepsBegun]
    assert kinds(node.read(101, 7).told) == [e.CaughtUp]


def test_counted_steps_of_a_script_that_tells_none_are_never_called_redone() -> None:
    node = a_node().running(restarts=1).read(100, 1, tells=False).read(101, 1, tells=False)
    assert kinds(node.told) == [e.StepsBegun, e.CaughtUp]


def test_a_checkpoint_is_told() -> None:
    node = a_node().running().read(100, 5).read(101, 5)
    assert kinds(node.read(100, 5, saves=1).told) == [e.SavePassed]
    assert node.read(100, 6, saves=1).told == []


# --- draining and the end --------------------------------------------------------------------------------------------


def test_a_drain_is_acknowledged_with_where_the_workers_stand_once_their_pace_is_known() -> None:
    """Without the pace, the step to stop at may have been passed when the order comes, and ranks would differ."""
    node = a_node().running().read(100, 5).read(101, 6).ordered(Duty.RUN, drain=drain())
    assert node.told == []
    (event,) = node.after(0.5).told
    assert isinstance(event, e.DrainAcked)
    assert (event.tells, event.last_step) == (True, 6)


def test_a_named_step_is_written_and_a_signal_is_forwarded_once() -> None:
    node = a_node().running().ordered(Duty.RUN, drain=drain()).ordered(Duty.RUN, drain=drain(stop_after=9))
    assert node.asked == [StopAfter(9)]
    assert node.after(1.0).actions == []
    node = a_node().running().ordered(Duty.RUN, drain=drain()).ordered(Duty.RUN, drain=drain(forward=True))
    assert node.asked == [Signal((100, 101), 2)]
    assert node.after(1.0).actions == []


def test_an_end_at_once_asks_nobody() -> None:
    assert Signal((100, 101), 9) in a_node().running().ordered(Duty.STOP, at_once=True).asked


def test_the_end_asks_first_and_kills_after_a_moment() -> None:
    node = a_node().running().ordered(Duty.STOP, exit_code=3)
    assert Signal((100, 101), 15) in node.asked
    node.ended(100, 0)
    assert node.after(2.0).asked == [Signal((101,), 9)]
    assert [a.code for a in node.ended(101, None, 9).asked if isinstance(a, Exit)] == [0]


def test_the_end_kills_a_stopped_worker_at_once() -> None:
    node = a_node().running().read(101, 5, "T").ordered(Duty.STOP)
    assert Signal((100,), 15) in node.asked
    assert Signal((101,), 9) in node.asked


def test_nothing_is_done_before_the_first_orders() -> None:
    assert a_node().after(100.0).actions == []
    assert a_node().now == START
