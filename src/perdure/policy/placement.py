"""Which node has which ranks in the next generation. Ranks are stable while the world keeps its size."""

from collections.abc import Mapping, Sequence

from perdure.vocab.generation import Assignment, Member
from perdure.vocab.ids import GenerationNumber, NodeId, Rank


def assign(number: GenerationNumber, nodes: Sequence[NodeId], workers_per_node: int) -> Assignment:
    """Ranks node by node in the order of `nodes`. The store is hosted where rank 0 is, as torchrun's users expect."""
    members = tuple(
        Member(node=node, first_rank=Rank(index * workers_per_node), count=workers_per_node)
        for index, node in enumerate(nodes)
    )
    return Assignment(number=number, members=members, store_host=nodes[0])


def again(number: GenerationNumber, before: Assignment) -> Assignment:
    """The same nodes and ranks under a new number."""
    return replace_nodes(number, before, {})


def replace_nodes(number: GenerationNumber, before: Assignment, by: Mapping[NodeId, NodeId]) -> Assignment:
    """Each node of `by` gives its ranks to the node that it maps to; everyone else keeps theirs."""
    members = tuple(Member(node=by.get(m.node, m.node), first_rank=m.first_rank, count=m.count) for m in before.members)
    return Assignment(number=number, members=members, store_host=members[0].node)


def resize(number: GenerationNumber, before: Assignment, nodes: Sequence[NodeId], workers_per_node: int) -> Assignment:
    """`nodes` only: members that stay first, in their old order, then the others; ranks are counted anew."""
    staying = [node for node in before.nodes if node in nodes]
    joining = [node for node in nodes if node not in before.nodes]
    return assign(number, [*staying, *joining], workers_per_node)


def with_nodes(
    number: GenerationNumber, before: Assignment, nodes: Sequence[NodeId], workers_per_node: int
) -> Assignment:
    """`nodes` only. While the world keeps its size everyone keeps their ranks, and newcomers take the lost ones'."""
    if len(nodes) != len(before.members):
        return resize(number, before, nodes, workers_per_node)
    lost = [node for node in before.nodes if node not in nodes]
    joining = [node for node in nodes if node not in before.nodes]
    return replace_nodes(number, before, dict(zip(lost, joining, strict=True)))
