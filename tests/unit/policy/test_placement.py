"""Ranks are stable while the world keeps its size."""

from perdure.policy.placement import again, assign, replace_nodes, resize, with_nodes
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import GenerationNumber, NodeId


def number(value: int) -> GenerationNumber:
    return GenerationNumber(value)


def nodes(*names: str) -> list[NodeId]:
    return [NodeId(name) for name in names]


def ranks(world: Assignment) -> dict[str, int]:
    return {member.node: member.first_rank for member in world.members}


ABC = assign(number(1), nodes("a", "b", "c"), 2)


def test_assign_counts_ranks_node_by_node() -> None:
    assert ranks(ABC) == {"a": 0, "b": 2, "c": 4}
    assert ABC.store_host == "a"


def test_again_changes_the_number_only() -> None:
    assert ranks(again(number(2), ABC)) == ranks(ABC)


def test_replacement_takes_the_lost_ranks_and_the_store_follows_rank_0() -> None:
    world = replace_nodes(number(2), ABC, {NodeId("a"): NodeId("x")})
    assert ranks(world) == {"x": 0, "b": 2, "c": 4}
    assert world.store_host == "x"


def test_resize_keeps_the_old_order_and_puts_newcomers_last() -> None:
    assert ranks(resize(number(2), ABC, nodes("x", "c", "b"), 2)) == {"b": 0, "c": 2, "x": 4}


def test_with_nodes_of_the_same_count_moves_no_survivor() -> None:
    assert ranks(with_nodes(number(2), ABC, nodes("x", "c", "b"), 2)) == {"x": 0, "b": 2, "c": 4}


def test_with_fewer_nodes_counts_anew() -> None:
    assert ranks(with_nodes(number(2), ABC, nodes("c", "b"), 2)) == {"b": 0, "c": 2}
