"""Whose silence counts."""

from perdure.control.hearing import resumed, telling
from perdure.control.leases import Contact, Contacts, overdue
from perdure.control.state import GenerationState, NodeState, State
from perdure.policy.placement import assign
from perdure.vocab.generation import Phase
from perdure.vocab.ids import EventId, GenerationNumber, Incarnation, JobId, NodeId
from perdure.vocab.job import JobSpec, RecoveryRules
from perdure.vocab.node import Node

A, B, SPARE = NodeId("a"), NodeId("b"), NodeId("spare")
RULES = RecoveryRules(lease=5.0, hold=100.0)


def a_node(name: NodeId) -> NodeState:
    life = Incarnation(pid=1, started_ticks=1, boot_id="boot")
    node = Node(id=name, incarnation=life, host=name, address="10.0.0.1", slots=1, version="1", world="w")
    return NodeState(node=node, present=True, joined_at=0.0)


def a_state(*members: NodeId) -> State:
    number = GenerationNumber(1)
    return State(
        spec=JobSpec(id=JobId("j"), command=("t",), min_nodes=1, max_nodes=2, workers_per_node=1, rules=RULES),
        nodes={name: a_node(name) for name in (A, B, SPARE)},
        generation=GenerationState(
            assignment=assign(number, members, 1), phase=Phase.RUNNING, began_at=0.0, answers=EventId("e")
        ),
        number=number,
    )


def heard_at(**times: float) -> Contacts:
    return {NodeId(name): Contact(heard_at=at) for name, at in times.items()}


def lost(contacts: Contacts, state: State, now: float) -> set[NodeId]:
    return {event.node for event in overdue(telling(contacts, state, now), state, now)}


def test_member_that_others_outlive_is_lost_after_the_lease() -> None:
    contacts = heard_at(a=0.0, b=5.0, spare=5.0)
    assert lost(contacts, a_state(A, B), 5.4) == set()
    assert lost(contacts, a_state(A, B), 5.6) == {A}


def test_members_that_fall_silent_together_are_waited_for_until_the_hold_is_over() -> None:
    contacts = heard_at(a=0.0, b=1.4, spare=101.0)
    assert lost(contacts, a_state(A, B), 50.0) == set()
    assert lost(contacts, a_state(A, B), 102.0) == {A, B}


def test_closed_connection_counts_however_many_there_are() -> None:
    contacts = {name: Contact(heard_at=0.0, closed_at=1.0) for name in (A, B)}
    assert lost(contacts, a_state(A, B), 1.6) == {A, B}


def test_single_member_is_lost_after_the_lease_since_nobody_vouches_for_it() -> None:
    assert lost(heard_at(a=0.0, b=9.0, spare=9.0), a_state(A), 9.0) == {A}


def test_first_report_after_a_common_silence_renews_every_lease() -> None:
    contacts = resumed(heard_at(a=0.0, b=1.0, spare=0.0), a_state(A, B), 30.0)
    assert {contact.heard_at for contact in contacts.values()} == {30.0}
    assert resumed(heard_at(a=0.0, b=29.0), a_state(A, B), 30.0) == heard_at(a=0.0, b=29.0)
