"""Whose silence counts. Pure; it knows when nodes were heard, and calls nobody lost (`control.leases` does).

When all members fall silent together, the likeliest reason is control's own connection, or that it was stopped itself.
The members vouch for each other then and train on, so nothing may be started in their place.
"""

import msgspec

from perdure.control.leases import Contacts
from perdure.control.state import NodeState, State
from perdure.vocab.ids import NodeId
from perdure.vocab.node import Node
from perdure.vocab.units import Instant

TOGETHER = 0.5
"""Of a lease. Reports come every 0.3 of it: members last heard within this time of each other fell silent together."""


def telling(contacts: Contacts, state: State, now: Instant) -> Contacts:
    """The contacts whose silence counts: not those of members that are as silent as all other members.

    A closed connection always counts. After `rules.hold` without a word of any member, silence does too.
    """
    members = _members(contacts, state)
    if state.spec is None or len(members) < 2:
        return contacts  # a single member has nobody to vouch for it, and ends its workers after a lease
    newest = max(contacts[node].heard_at for node in members)
    if now - newest > state.spec.rules.hold:
        return contacts
    since = newest - TOGETHER * state.spec.rules.lease
    together = {node for node in members if contacts[node].closed_at is None and contacts[node].heard_at > since}
    return {node: contact for node, contact in contacts.items() if node not in together}


def resumed(contacts: Contacts, state: State, now: Instant) -> Contacts:
    """To be asked before a report is noted: after a silence of all members everyone's lease begins anew."""
    members = _members(contacts, state)
    if state.spec is None or not members:
        return contacts
    newest = max(contacts[node].heard_at for node in members)
    if now - newest <= TOGETHER * state.spec.rules.lease:
        return contacts
    return {
        node: msgspec.structs.replace(contact, heard_at=max(contact.heard_at, now))
        if contact.closed_at is None
        else contact
        for node, contact in contacts.items()
    }


def _members(contacts: Contacts, state: State) -> tuple[NodeId, ...]:
    """Present members of the current world."""
    if state.generation is None:
        return ()
    return tuple(n for n in state.generation.assignment.nodes if n in contacts and state.nodes[n].present)


def is_over(known: NodeState, node: Node) -> bool:
    """Whether the life that asks to join has been declared lost, or was followed by another on the same machine."""
    now, asked = known.node.incarnation, node.incarnation
    if now == asked:
        return not known.present
    return now.boot_id == asked.boot_id and asked.started_ticks < now.started_ticks
