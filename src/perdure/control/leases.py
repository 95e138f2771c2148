"""Who has been heard of and when: the only thing that control knows and does not log. Pure.

Silence becomes a fact (`NodeLost`) here, and only here.
"""

from collections.abc import Mapping

import msgspec

from perdure.control.state import State
from perdure.vocab.event import NodeLost
from perdure.vocab.ids import EventId, NodeId
from perdure.vocab.units import Instant

FENCE_MARGIN = 0.5
"""An agent ends its workers a lease after the send time of its last answered report; control waits this much longer."""


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    heard_at: Instant
    closed_at: Instant | None = None
    """When its connection ended, while it has not come back."""


Contacts = Mapping[NodeId, Contact]


def heard(contacts: Contacts, node: NodeId, now: Instant) -> Contacts:
    """A report of `node` has come."""
    closed = contacts[node].closed_at if node in contacts else None
    return {**contacts, node: Contact(heard_at=now, closed_at=closed)}


def connected(contacts: Contacts, node: NodeId, now: Instant) -> Contacts:
    """The stream of orders to `node` stands."""
    return {**contacts, node: Contact(heard_at=now)}


def closed(contacts: Contacts, node: NodeId, now: Instant) -> Contacts:
    """The stream of orders to `node` has ended."""
    heard_at = contacts[node].heard_at if node in contacts else now
    return {**contacts, node: Contact(heard_at=heard_at, closed_at=now)}


def adopt(state: State, now: Instant) -> Contacts:
    """Contacts of a control that has just replayed its log: every present node has two leases to come back.

    Two, because while control was dead the nodes vouched for each other: one that cannot come back may rely on that
    until a lease after the others came back.
    """
    lease = state.spec.rules.lease if state.spec is not None else 0.0
    return {node: Contact(heard_at=now + lease) for node, known in state.nodes.items() if known.present}


def overdue(contacts: Contacts, state: State, now: Instant) -> tuple[NodeLost, ...]:
    """The nodes that are to be called lost now."""
    if state.spec is None:
        return ()
    lost = []
    for node, known in state.nodes.items():
        contact = contacts.get(node)
        if not known.present or contact is None or _deadline(contact, state) > now:
            continue
        since = contact.heard_at if contact.closed_at is None else contact.closed_at
        lost.append(
            NodeLost(
                id=EventId(f"lost/{node}/{known.node.incarnation}"),
                at=now,
                node=node,
                incarnation=known.node.incarnation,
                silent_for=max(0.0, now - since),
                connection_closed=contact.closed_at is not None,
            )
        )
    return tuple(lost)


def next_loss(contacts: Contacts, state: State) -> Instant | None:
    """When the next node is lost if nothing is heard till then."""
    present = (contacts[n] for n, k in state.nodes.items() if k.present and n in contacts)
    return min((_deadline(contact, state) for contact in present), default=None)


def _deadline(contact: Contact, state: State) -> Instant:
    assert state.spec is not None
    rules = state.spec.rules
    silence = contact.heard_at + rules.lease + FENCE_MARGIN
    if contact.closed_at is None:
        return silence
    # A report after the close shows that the process lives: its grace begins anew.
    return min(silence, max(contact.closed_at, contact.heard_at) + rules.reconnect_grace)
