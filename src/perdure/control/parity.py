"""Of which checkpoints the nodes make parity, in which groups, and whether it is all there. Pure.

A slot that its group protects can be made again when its node is lost; how, is `wire.parity`'s and the servers' matter.
"""

from perdure.control.inventory import Standing
from perdure.control.memories import SavesState, policy, present, standing
from perdure.policy.replicas import xor_groups
from perdure.vocab.checkpoint import Chosen, Member
from perdure.vocab.ids import NodeId
from perdure.wire.memory import Protect


def protect(state: SavesState) -> tuple[Protect, ...]:
    """What is sealed everywhere, and may be committed or is: the oldest first, as the newest one is wanted last."""
    if not policy(state).xor or not state.gathered:
        return ()
    wanted = []
    for checkpoint in sorted(state.copies):
        if checkpoint in state.aborted or checkpoint in state.bad:
            continue
        if state.committed is not None and checkpoint < state.committed:
            continue
        found = standing(state, checkpoint)
        groups = groups_of(state, found) if found.is_held(1) else ()
        if groups:
            wanted.append(Protect(checkpoint=checkpoint, groups=groups))
    return tuple(wanted)


def is_protected(state: SavesState, found: Standing) -> bool:
    """Whether every group that can be made has its parity. Who is in none, since it is alone, waits for nothing."""
    protected = found.protected
    ranks = (rank for group in groups_of(state, found) for member in group for rank in member.ranks)
    return all(rank in protected for rank in ranks)


def groups_of(state: SavesState, found: Standing) -> tuple[tuple[Member, ...], ...]:
    """The groups for one checkpoint: of the nodes that are present, each with the ranks that it has of it."""
    ranks: dict[NodeId, list[int]] = {}
    for rank, nodes in sorted(found.holders.items()):
        ranks.setdefault(nodes[0], []).append(rank)
    placed = [(node, report.domain) for node, report in present(state).items()]
    groups = (
        tuple(Member(node=node, ranks=tuple(ranks[node])) for node in group if node in ranks)
        for group in xor_groups(placed, policy(state).xor)
    )
    return tuple(group for group in groups if len(group) > 1)


def named_in(chosen: Chosen | None, wanted: tuple[Protect, ...]) -> set[NodeId]:
    """Nodes whose memory others have to reach for this."""
    named = {member.node for one in wanted for group in one.groups for member in group}
    if chosen is not None:
        named |= {node for nodes in chosen.holders.values() for node in nodes}
        named |= {node for group in chosen.groups for node in group.holders}
    return named
