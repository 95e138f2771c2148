"""What each node hears."""

from perdure.vocab import event as e
from perdure.wire.messages import Duty
from tests.unit.control.a_job import a_job, node_id


def test_orders_before_the_first_generation_are_to_wait() -> None:
    assert a_job(2).join(0).orders(0).duty is Duty.WAIT


def test_orders_name_the_store_only_when_it_listens() -> None:
    job = a_job(2).join(0, 1)
    assert (job.orders(0).duty, job.orders(0).store) == (Duty.GATHER, None)
    job.gather()
    assert job.orders(1).duty is Duty.RUN
    assert job.orders(1).store is not None


def test_orders_name_members_and_spares_as_peers_but_not_oneself() -> None:
    job = a_job(2, spares=1).join(0, 1, 2)
    assert [peer.node for peer in job.orders(0).peers] == [node_id(1), node_id(2)]
    assert [peer.node for peer in job.orders(2).peers] == [node_id(0), node_id(1)]


def test_orders_say_what_has_to_be_done_again_from_the_generations_before() -> None:
    job = a_job(2).started().say(e.SavePassed, 0, step=40)
    assert job.orders(0).redo_until is None
    job.exit(0, None, 9)
    assert job.orders(0).redo_until == 40
    job.say(e.NodeGathered, 1, store=None, last_step=47)
    assert job.orders(0).redo_until == 47
    job.gather().say(e.SavePassed, 0, step=50)
    assert job.orders(0).redo_until == 47


def test_orders_at_the_end_are_to_stop_with_the_jobs_code() -> None:
    job = a_job(1, workers=1, max_restarts=0).started().exit(0, 7)
    assert (job.orders(0).duty, job.orders(0).exit_code) == (Duty.STOP, 7)
