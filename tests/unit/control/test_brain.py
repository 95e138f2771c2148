"""Control's decisions, one situation each; names end in the thread of a peer's user that met it."""

import msgspec
import pytest

from perdure.control.brain import ECHO_SECONDS, GROW_UNTOLD_SECONDS, PREFER_MEMBERS_SECONDS, next_deadline, step
from perdure.control.fold import replay
from perdure.vocab import event as e
from perdure.vocab.generation import Phase
from perdure.vocab.node import NodeCondition
from perdure.wire.messages import Duty
from tests.unit.control.a_job import Job, a_job, node_id


def phase(job: Job) -> Phase | None:
    return job.state.generation.phase if job.state.generation is not None else None


# --- beginning -------------------------------------------------------------------------------------------------------


def test_begin_when_all_wanted_nodes_are_ready_waits_no_longer() -> None:
    job = a_job(2).join(0)
    assert job.decisions == []
    job.join(1)
    assert job.ranks == {0: (0, 1), 1: (2, 3)}


def test_begin_with_the_minimum_waits_for_the_last_call() -> None:
    job = a_job(3, least=2).join(0, 1).after(4.9)
    assert job.decisions == []
    job.after(0.2)
    assert job.members == (0, 1)


def test_begin_counts_the_last_call_from_the_last_that_got_ready() -> None:
    job = a_job(3, least=2).join(0, 1, 2, ready=False).after(60.0)
    job.say(e.NodeReady, 0, warm=True, seconds=60.0).say(e.NodeReady, 1, warm=True, seconds=60.0)
    assert job.decisions == []
    job.after(1.0).say(e.NodeReady, 2, warm=True, seconds=61.0)
    assert job.members == (0, 1, 2)


def test_a_standby_takes_a_place_at_the_start_only_after_a_wait() -> None:
    job = a_job(2, spares=1).join(0).join(2, standby=True).after(PREFER_MEMBERS_SECONDS - 0.1)
    assert job.decisions == []
    job.join(1)
    assert job.members == (0, 1)


def test_too_few_nodes_end_the_job_with_a_reason_at_the_join_deadline() -> None:
    job = a_job(2, join_timeout=60.0).join(0).after(60.0)
    assert job.state.ended is not None
    assert "1 of at least 2 nodes" in job.state.ended.reason


def test_more_agents_than_the_maximum_become_spares_nvrx_348() -> None:
    job = a_job(2).join(0, 1, 2, 3).run()
    assert job.members == (0, 1)
    assert job.orders(2).duty is Duty.WAIT
    assert job.orders(2).spare
    assert job.state.ended is None


# --- workers that fail -----------------------------------------------------------------------------------------------


def test_a_killed_worker_restarts_all_workers_on_the_same_ranks_pytorch_operator_359() -> None:
    job = a_job(2).started().exit(1, None, 9)
    assert job.did == ["restart_workers"]
    assert job.state.number == 2
    assert job.ranks == {0: (0, 1), 1: (2, 3)}


def test_a_restart_has_a_store_of_its_own_pytorch_135712() -> None:
    job = a_job(2).started()
    before = job.orders(0).store
    job.exit(1, None, 9)
    assert before is not None
    assert job.orders(0).duty is Duty.GATHER
    assert job.orders(0).store is None


def test_a_restart_ends_nobodys_part_in_the_job_pytorch_123678() -> None:
    job = a_job(2).started()
    for _ in range(3):
        job.exit(0, None, 9).run()
    assert job.state.ended is None
    assert phase(job) is Phase.RUNNING


def test_staggered_exits_of_100_workers_make_one_generation_trainer_2000() -> None:
    job = a_job(25, workers=4).started()
    for rank in range(100):
        job.now += 0.001
        job.exit(rank, None, 15, generation=1)
    assert job.did == ["restart_workers"]


def test_lost_peers_wait_for_the_cause_which_is_the_one_answered_pytorch_42107() -> None:
    job = a_job(2).started()
    job.raise_(2, message="Connection closed by peer [10.0.0.1]")
    assert job.did == []
    job.now += 0.1
    job.raise_(1, message="No such file or directory: 'data.bin'")
    assert job.decisions[-1].diagnosis is not None
    assert job.decisions[-1].diagnosis.rank == 1
    assert job.did == ["restart_workers"]


def test_lost_peers_without_a_cause_are_answered_after_a_moment() -> None:
    job = a_job(2).started().raise_(2, message="Connection reset by peer")
    job.after(ECHO_SECONDS - 0.01)
    assert job.did == []
    job.after(0.02)
    assert job.did == ["restart_workers"]


def test_exits_wait_for_a_node_whose_connection_has_closed_and_its_loss_explains_them() -> None:
    job = a_job(2, spares=1).started().join(2).disconnect(1)
    job.exit(0, 1)
    assert job.did == []
    job.after(0.5).lose(1)
    assert job.did == ["replace_node"]
    assert job.state.restarts == ()


def test_a_stall_waits_for_the_lease_because_a_silent_node_stalls_the_others() -> None:
    job = a_job(2, spares=1).started().join(2)
    job.say(e.WorkerStalled, 0, rank=0, local_rank=0, pid=1, phase="training", step=9, silent_for=2.0, limit=2.0,
            limit_source="learned", process_state="S")  # fmt: skip
    assert job.did == []
    job.after(3.5).lose(1, closed=False)
    assert job.did == ["replace_node"]


def test_a_stall_is_answered_after_the_lease() -> None:
    job = a_job(2).started()
    job.say(e.WorkerStalled, 0, rank=0, local_rank=0, pid=1, phase="training", step=9, silent_for=2.0, limit=2.0,
            limit_source="learned", process_state="S")  # fmt: skip
    deadline = next_deadline(job.state, job.now)
    assert deadline is not None
    job.after(deadline - job.now)
    assert job.did == ["restart_workers"]


def test_the_same_event_twice_is_one_event() -> None:
    job = a_job(2).started().exit(1, None, 9)
    job.say(e.WorkerExited, 0, seq=job.seqs[0], rank=1, local_rank=1, pid=1, exit_code=None, signal=9, step=None,
            generation=2)  # fmt: skip
    assert job.did == ["restart_workers"]


def test_what_an_earlier_generation_says_is_history() -> None:
    job = a_job(2).started().exit(1, None, 9).run()
    job.exit(3, 1, generation=1)
    assert job.did == ["restart_workers"]


def test_the_store_that_dies_is_made_anew() -> None:
    job = a_job(2).started().say(e.StoreLost, 0, exit_code=None, signal=9)
    assert job.did == ["restart_workers"]


def test_a_program_that_cannot_be_started_ends_the_job() -> None:
    job = a_job(2).join(0, 1).gather().say(e.StartFailed, 0, reason="there is no such program")
    assert job.did == ["give_up"]
    assert job.orders(1).duty is Duty.STOP


# --- nodes that go ---------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_by_the_spare_on_its_ranks_pytorch_114097() -> None:
    job = a_job(3, spares=1).started().join(3).lose(1)
    assert job.did == ["replace_node"]
    assert job.ranks == {0: (0, 1), 3: (2, 3), 2: (4, 5)}


def test_a_missed_lease_ends_the_generation_of_all_pytorch_111646() -> None:
    job = a_job(3, least=2).started().lose(2, closed=False)
    assert [job.orders(index).duty for index in (0, 1)] == [Duty.GATHER, Duty.GATHER]


def test_the_host_of_rank_0_and_store_may_die_like_any_other_pytorch_67742_167302() -> None:
    job = a_job(2, spares=1).started().join(2).lose(0)
    assert job.ranks == {2: (0, 1), 1: (2, 3)}
    assert job.assignment.store_host == node_id(2)
    job.run()
    assert phase(job) is Phase.RUNNING


def test_without_a_spare_the_world_shrinks_to_the_minimum() -> None:
    job = a_job(3, least=2).started().lose(0)
    assert job.did == ["shrink"]
    assert job.ranks == {1: (0, 1), 2: (2, 3)}


def test_a_node_that_leaves_by_itself_is_replaced_at_once_trainer_1638() -> None:
    job = a_job(2, spares=1).started().join(2).leave(1)
    assert job.did == ["replace_node"]
    assert job.members == (0, 2)


def test_a_node_that_is_back_in_a_new_life_has_no_part_of_the_old_one_dlrover_1357() -> None:
    job = a_job(2).started()
    job.lives[1] = 2
    before = job.state.nodes[node_id(1)].node
    lost = e.NodeLost(
        id="lost/1", at=job.now, node=before.id, incarnation=before.incarnation, silent_for=0.1, connection_closed=True
    )
    joined = e.NodeJoined(
        id="join/1/2",
        at=job.now,
        node=msgspec.structs.replace(before, incarnation=job.life(1)),
    )
    job.seqs[1] = 0
    job.take(lost, joined)
    assert job.did == ["restart_workers"]
    assert not job.state.nodes[node_id(1)].ready
    assert job.state.nodes[node_id(1)].acked == 0


def test_quick_leave_and_rejoin_does_not_bypass_the_budget_pytorch_147064() -> None:
    job = a_job(2, max_restarts=2).started()
    for _ in range(2):
        job.exit(1, 3, step=None).leave(1).rejoin(1).run()
        job.after(1.0)
    job.exit(1, 3)
    assert job.did[-1] == "give_up"
    assert job.state.ended is not None
    assert job.state.ended.exit_code == 3


def test_a_dead_member_is_not_counted_for_ever_torchft_63() -> None:
    job = a_job(3, least=1).started().lose(2).run().lose(1)
    assert job.members == (0,)
    assert job.state.fit == {node_id(0)}


def test_a_node_with_an_unkillable_worker_is_set_aside_and_replaced() -> None:
    job = a_job(2, spares=1).started().join(2).exit(3, None, 9)
    job.say(e.WorkerUnkillable, 1, rank=3, pid=9, waited=5.0, process_state="D")
    assert job.did == ["restart_workers", "replace_node"]
    assert job.state.nodes[node_id(1)].condition is NodeCondition.QUARANTINED
    assert job.members == (0, 2)
    assert job.orders(1).duty is Duty.GATHER
    assert job.gather().orders(1).duty is Duty.WAIT


def replaced_alive() -> Job:
    """Rank 3 has failed three times at one step: node 2 takes the place of node 1, which is there still."""
    job = a_job(2, spares=1, least=1, max_restarts=9).started().join(2, standby=True)
    for _ in range(2):
        job.exit(3, None, 9, step=5).run()
    job.exit(3, None, 9, step=5)
    assert (job.did[-1], job.members) == ("replace_node", (0, 2))
    return job


def test_nobody_starts_before_a_node_that_is_replaced_while_it_lives_has_ended_its_workers() -> None:
    job = replaced_alive()
    assert phase(job.gather_members()) is Phase.INTERRUPTING
    assert job.orders(0).duty is job.orders(1).duty is Duty.GATHER
    job.say(e.NodeGathered, 1, store=None, last_step=None)
    assert phase(job) is Phase.AGREED
    assert job.orders(1).duty is Duty.WAIT


def test_a_node_that_is_replaced_while_it_lives_is_waited_for_until_it_is_lost() -> None:
    job = replaced_alive().gather_members()
    assert phase(job) is Phase.INTERRUPTING
    job.lose(1)
    assert phase(job) is Phase.AGREED
    assert job.did[-1] == "replace_node"


def test_a_node_that_was_replaced_while_it_lived_is_the_last_to_be_taken_again() -> None:
    assert replaced_alive().gather().lose(2).members == (0, 1)
    assert replaced_alive().gather().join(3, ready=False, standby=True).lose(2).members == (0, 3)


def test_a_node_that_was_replaced_is_waited_for_by_the_generation_after_too() -> None:
    job = replaced_alive().join(3, standby=True).lose(2)
    assert job.members == (0, 3)
    assert phase(job.gather_members()) is Phase.INTERRUPTING
    assert phase(job.say(e.NodeGathered, 1, store=None, last_step=None)) is Phase.AGREED


def test_a_second_unkillable_worker_of_a_node_disturbs_nobody() -> None:
    job = a_job(2, spares=1).started().join(2).exit(3, None, 9)
    job.say(e.WorkerUnkillable, 1, rank=3, pid=9, waited=5.0, process_state="D")
    job.run().say(e.WorkerUnkillable, 1, rank=2, pid=8, waited=5.0, process_state="D")
    assert job.did == ["restart_workers", "replace_node"]


def test_unkillable_workers_of_two_nodes_set_both_aside() -> None:
    job = a_job(3, least=1).started().exit(0, None, 9)
    seq = [job.seqs[1] + 1, job.seqs[2] + 1]
    events = [
        e.WorkerUnkillable(id=f"node-{i}/{job.life(i)}/{seq[i - 1]}", at=job.now, node=node_id(i), generation=2, rank=i,
                           pid=9, waited=5.0, process_state="D")
        for i in (1, 2)
    ]  # fmt: skip
    job.take(*events)
    assert job.members == (0,)


def test_a_spare_with_an_unkillable_worker_is_set_aside_alone() -> None:
    job = a_job(1, spares=1).join(0, 1).run()
    job.say(e.WorkerUnkillable, 1, rank=3, pid=9, waited=5.0, process_state="D")
    assert job.did == ["quarantine"]
    assert job.state.number == 1


# --- holding and growing ---------------------------------------------------------------------------------------------


def test_without_spare_and_room_to_shrink_the_job_holds_until_a_node_comes() -> None:
    job = a_job(2).started().lose(0)
    assert job.did == ["hold"]
    assert job.orders(1).duty is Duty.WAIT
    job.after(100.0).rejoin(0)
    assert job.did == ["hold", "begin"]
    assert job.ranks == {0: (0, 1), 1: (2, 3)}


def test_a_hold_that_another_node_ends_leaves_the_survivors_ranks_alone_dlrover_450() -> None:
    job = a_job(2).started().lose(0).join(7)
    assert job.ranks == {7: (0, 1), 1: (2, 3)}


def test_a_hold_ends_at_its_deadline_and_says_how_many_are_missing_then() -> None:
    job = a_job(3, hold=60.0).started().lose(0).lose(1).after(60.0)
    assert job.state.ended is not None
    assert "2 node(s) are still missing" in job.state.ended.reason


def test_a_node_grows_the_world_after_the_next_checkpoint() -> None:
    job = a_job(2, least=1).started().say(e.SavePassed, 0, step=10).lose(1).run().rejoin(1)
    assert job.did == ["shrink"]
    job.after(60.0).say(e.SavePassed, 0, step=20)
    assert job.did == ["shrink"]
    job.after(1.0)
    assert job.did == ["shrink", "grow"]
    assert job.ranks == {0: (0, 1), 1: (2, 3)}


def test_a_checkpoint_before_the_node_was_ready_is_no_moment_to_grow() -> None:
    job = a_job(2, least=1).started().lose(1).run().rejoin(1, ready=False)
    job.say(e.SavePassed, 0, step=10).after(30.0)
    job.say(e.NodeReady, 1, warm=True, seconds=30.0).after(10.0)
    assert job.did == ["shrink"]


def test_a_script_that_tells_of_no_checkpoints_grows_at_once() -> None:
    job = a_job(2, least=1).started().lose(1).run().rejoin(1)
    assert job.did == ["shrink", "grow"]


def test_a_script_that_tells_nothing_grows_after_a_while() -> None:
    job = a_job(2, least=1).started().lose(1).run(steps=False).rejoin(1)
    assert job.did == ["shrink"]
    job.after(GROW_UNTOLD_SECONDS)
    assert job.did == ["shrink", "grow"]


def test_a_world_does_not_grow_once_a_rank_has_finished() -> None:
    job = a_job(2, least=1).started().lose(1).run().exit(0).rejoin(1)
    assert job.did == ["shrink"]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_ranks_that_finish_while_rank_0_still_saves_are_no_fault_pytorch_118891() -> None:
    job = a_job(2).started()
    for rank in (1, 2, 3):
        job.exit(rank)
    job.lose(1).say(e.StoreLost, 0, exit_code=None, signal=9).after(600.0)
    assert job.did == []
    job.exit(0)
    assert job.did == ["finish"]
    assert job.state.ended is not None
    assert job.state.ended.exit_code == 0


def test_a_finished_node_that_comes_back_does_not_start_its_ranks_again() -> None:
    job = a_job(2).started().exit(2).exit(3).lose(1).rejoin(1)
    assert job.orders(0).duty is Duty.RUN
    assert job.orders(1).duty is Duty.WAIT


def test_a_fault_after_some_have_finished_starts_all_ranks() -> None:
    job = a_job(2).started().exit(2).exit(3).exit(0, None, 9)
    assert job.did == ["restart_workers"]
    assert [job.orders(index).duty for index in (0, 1)] == [Duty.GATHER, Duty.GATHER]


def test_spares_end_with_the_job_and_with_0_nvrx_266() -> None:
    job = a_job(1, spares=1, workers=1).join(0, 1).run().exit(0)
    assert job.orders(1).duty is Duty.STOP
    assert job.orders(1).exit_code == 0


def test_a_job_that_finished_stays_finished() -> None:
    job = a_job(1, workers=1).started().exit(0).lose(0).rejoin(0).after(1e6)
    assert job.did == ["finish"]
    assert job.orders(0).duty is Duty.STOP


def test_an_out_of_memory_kill_is_retried_once_marin_4339() -> None:
    memory = e.MemoryEvidence(by="cgroup", limit=2**30, usage=2**30, rss=2**29, line="oom_kill 1")
    job = a_job(2, max_restarts=100).started()
    job.exit(1, None, 9, memory=memory).run().exit(2, None, 9, memory=memory)
    assert job.did == ["restart_workers", "give_up"]
    assert job.state.ended is not None
    assert job.state.ended.exit_code == 137
    assert "1.0 GiB" in job.state.ended.reason


# --- stopping --------------------------------------------------------------------------------------------------------


def test_a_stop_asks_where_the_workers_stand_and_names_one_step_for_all() -> None:
    job = a_job(2).started().stop()
    for index, last in ((0, 7), (1, 9)):
        job.say(e.DrainAcked, index, tells=True, last_step=last, step_seconds=0.5)
    order = job.orders(0).drain
    assert order is not None
    assert order.stop_after is not None
    assert order.stop_after > 9
    for rank in range(4):
        job.exit(rank)
    assert job.state.ended is not None


def test_a_stop_of_a_script_that_tells_nothing_forwards_the_signal() -> None:
    job = a_job(2).started().stop()
    for index in (0, 1):
        job.say(e.DrainAcked, index, tells=False, last_step=-1, step_seconds=None)
    order = job.orders(0).drain
    assert order is not None
    assert order.forward


def test_a_stop_does_not_wait_long_for_a_node_that_does_not_answer() -> None:
    job = a_job(2).started().stop().after(1.0)
    order = job.orders(0).drain
    assert order is not None
    assert order.forward


@pytest.mark.parametrize("second", [True, False])
def test_a_stop_ends_when_its_grace_is_over_or_at_the_second_request(second: bool) -> None:
    job = a_job(2).started().stop(30.0).after(2.0)
    job = job.stop(0.0) if second else job.after(28.0)
    assert job.state.ended is not None


def test_a_node_that_comes_back_while_the_job_drains_starts_nothing() -> None:
    job = a_job(2).started().stop().lose(1).rejoin(1)
    assert job.orders(1).duty is Duty.WAIT


def test_a_stop_before_workers_run_ends_at_once() -> None:
    job = a_job(2).join(0).stop()
    assert job.state.ended is not None


# --- time and replay -------------------------------------------------------------------------------------------------


def test_deadlines_that_have_passed_are_not_planned_again() -> None:
    job = a_job(2, least=2).join(0, ready=False).after(30.0)
    deadline = next_deadline(job.state, job.now)
    assert deadline is not None
    assert deadline > job.now


def test_a_control_that_replays_its_log_has_nothing_to_add() -> None:
    job = a_job(3, least=1, spares=1).started().join(3).lose(0).run().exit(1, None, 9).run().lose(1).run().exit(0)
    for length in range(2, len(job.records)):
        prefix = job.records[:length]
        state, more = step(replay(prefix), (), prefix[-1].at, job.catalogue)
        again, nothing = step(state, (), prefix[-1].at, job.catalogue)
        assert nothing == ()
        assert again == state
        del more
