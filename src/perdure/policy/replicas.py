"""Who keeps a copy of whose checkpoints, so that no single node and no single failure domain takes both.

Knows nodes and the failure domain of each (rack, switch, power feed); does not know ranks, sizes or the network.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from perdure.vocab.ids import NodeId

Placed = tuple[NodeId, str]
"""A node and its failure domain."""


def partners(nodes: Sequence[Placed], copies: int) -> Mapping[NodeId, tuple[NodeId, ...]]:
    """To whom each node sends its replicas, the first one first. Every node also receives as many as it sends.

    The same for any order of `nodes`. With one copy: mutual pairs, and one ring of three where their number is odd
    (GEMINI's group placement, SOSP 2023: a second lost node is fatal with probability 1/(N-1), in one large ring
    2/(N-1)). With more: groups of copies + 1, each a ring in which every node sends to its next `copies` ones. Members
    of a group are of different domains wherever no domain holds more than one node in (copies + 1); beyond that some
    have all their copies in their own domain (`unprotected`; with one copy, as few as is possible). Where there are
    too few nodes for so many copies, all send to all.
    """
    sends: dict[NodeId, tuple[NodeId, ...]] = {}
    for group in _dealt(nodes, len(nodes) // (max(copies, 0) + 1)):
        for place, node in enumerate(group):
            following = group[place + 1 :] + group[:place]
            sends[node] = following[: max(copies, 0)]
    return sends


def unprotected(nodes: Sequence[Placed], sends: Mapping[NodeId, tuple[NodeId, ...]]) -> tuple[NodeId, ...]:
    """Nodes of which every copy is lost with their own failure domain, by name."""
    domain = dict(nodes)
    return tuple(
        sorted(
            node
            for node, receivers in sends.items()
            if all(domain.get(receiver, domain[node]) == domain[node] for receiver in receivers)
        )
    )


def warnings(nodes: Sequence[Placed], copies: int) -> tuple[str, ...]:
    """What an operator should know of `partners(nodes, copies)`: sentences that say what is not protected, and why."""
    domain, sends = dict(nodes), partners(nodes, copies)
    if copies <= 0 or not domain:
        return ()
    if len(domain) == 1:
        return (f"{next(iter(domain))} is the only node: no other memory can keep a copy of its checkpoints",)
    found = []
    if copies >= len(domain):
        found.append(f"{copies} replicas were asked for, and {len(domain)} nodes can keep {len(domain) - 1}")
    if alone := unprotected(nodes, sends):
        largest, count = max(Counter(domain.values()).items(), key=lambda each: (each[1], each[0]))
        found.append(
            f"{len(alone)} of {len(domain)} nodes have no replica outside their failure domain, because {largest} "
            f"has {count} of the {len(domain)} nodes: if it fails as a whole, the job goes back to storage"
        )
    return tuple(found)


def xor_groups(nodes: Sequence[Placed], k: int) -> tuple[tuple[NodeId, ...], ...]:
    """Parity groups of k + 1 nodes or fewer, as equal as can be, and never two nodes of one domain in a group.

    One lost node, or one lost domain, costs each group one member at most. A domain that is large makes groups
    smaller (down to pairs, which are replicas; three where one would be left alone). Where one domain has more than
    half of all nodes, some of it are left out: nobody of another domain is left for them.
    """
    members = dict(nodes)
    if k < 1 or len(members) < 2:
        return ()
    largest = max(Counter(members.values()).values())
    wanted = min(-(-len(members) // (k + 1)), len(members) // 2)
    return tuple(group for group in _dealt(nodes, max(wanted, largest)) if len(group) > 1)


def _dealt(nodes: Sequence[Placed], groups: int) -> list[tuple[NodeId, ...]]:
    """The nodes, dealt like cards to `groups` groups (at least one), domain after domain, the largest domain first.

    Two nodes of a domain meet in a group only if that domain has more nodes than there are groups.
    """
    domain = dict(nodes)
    size = Counter(domain.values())
    order = sorted(domain, key=lambda node: (-size[domain[node]], domain[node], node))
    count = max(min(groups, len(order)), 1)
    return [tuple(order[first::count]) for first in range(count) if order]
