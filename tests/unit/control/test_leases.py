"""When silence becomes a loss."""

from perdure.control import leases
from perdure.vocab.ids import NodeId
from tests.unit.control.a_job import START, Job, a_job, node_id

LEASE = 5.0


def lost(job: Job, contacts: leases.Contacts, at: float) -> list[NodeId]:
    return [event.node for event in leases.overdue(contacts, job.state, at)]


def test_a_node_is_lost_a_lease_and_a_margin_after_it_was_last_heard() -> None:
    job = a_job(1).join(0)
    contacts = leases.heard({}, node_id(0), START)
    assert lost(job, contacts, START + LEASE + leases.FENCE_MARGIN - 0.01) == []
    assert lost(job, contacts, START + LEASE + leases.FENCE_MARGIN) == [node_id(0)]
    assert leases.next_loss(contacts, job.state) == START + LEASE + leases.FENCE_MARGIN


def test_a_closed_connection_is_a_loss_after_the_short_grace() -> None:
    job = a_job(1).join(0)
    contacts = leases.closed(leases.heard({}, node_id(0), START), node_id(0), START + 1)
    (event,) = leases.overdue(contacts, job.state, START + 1.5)
    assert event.connection_closed
    assert event.silent_for == 0.5


def test_a_connection_that_is_renewed_in_time_costs_nothing() -> None:
    job = a_job(1).join(0)
    contacts = leases.closed(leases.heard({}, node_id(0), START), node_id(0), START + 1)
    contacts = leases.connected(contacts, node_id(0), START + 1.4)
    assert lost(job, contacts, START + 5.0) == []


def test_a_report_after_the_close_begins_the_grace_anew() -> None:
    job = a_job(1).join(0)
    contacts = leases.closed(leases.heard({}, node_id(0), START), node_id(0), START + 1)
    contacts = leases.heard(contacts, node_id(0), START + 1.4)
    assert lost(job, contacts, START + 1.8) == []
    assert lost(job, contacts, START + 1.9) == [node_id(0)]


def test_a_control_that_starts_again_gives_everyone_two_leases_to_come_back() -> None:
    job = a_job(2).join(0, 1)
    contacts = leases.adopt(job.state, START)
    assert lost(job, contacts, START + 2 * LEASE) == []
    assert lost(job, contacts, START + 2 * LEASE + leases.FENCE_MARGIN) == [node_id(0), node_id(1)]


def test_a_node_that_is_gone_is_not_lost_again() -> None:
    job = a_job(2, least=1).started().lose(1)
    contacts = leases.adopt(job.state, START)
    assert lost(job, contacts, START + 100.0) == [node_id(0)]
