"""Parity groups as control sees them: what is safe, who makes parity of what, and what a lost node costs."""

import msgspec

from perdure.vocab.checkpoint import CheckpointId, Member, Parity
from perdure.vocab.ids import NodeId
from tests.unit.control.a_memory import Memory, a_memory, an_id, node_id


def groups(memory: Memory, checkpoint: CheckpointId) -> tuple[tuple[Member, ...], ...]:
    return next(one.groups for one in memory.orders.protect if one.checkpoint == checkpoint)


def with_parity(memory: Memory, checkpoint: CheckpointId, *nodes: int, root: str = "") -> Memory:
    """As these nodes (all of them, if none is named) make it."""
    for group in groups(memory, checkpoint):
        roots = {rank: root or f"root of {checkpoint} of {rank}" for member in group for rank in member.ranks}
        made = Parity(checkpoint=checkpoint, members=group, roots=roots, nbytes=1)
        for index in nodes or range(memory.nodes):
            if any(member.node == node_id(index) for member in group):
                memory.say(index, parity=(*memory.reports[index].parity, made))
    return memory


def all_with_parity(memory: Memory, checkpoint: CheckpointId) -> Memory:
    return with_parity(memory.sealed(checkpoint), checkpoint)


def test_parity_is_ordered_when_all_is_sealed_and_committed_when_all_have_made_it() -> None:
    memory = a_memory(4, xor=3).attached()
    for index in range(3):
        memory.holds(index, memory.copy(an_id(4), index))
    assert memory.orders.protect == ()
    memory.holds(3, memory.copy(an_id(4), 3))
    (group,) = groups(memory, an_id(4))
    assert {(member.node, member.ranks) for member in group} == {(node_id(n), (n,)) for n in range(4)}
    assert memory.orders.addresses.keys() == {node_id(n) for n in range(4)}
    with_parity(memory, an_id(4), 0, 1, 2)
    assert memory.orders.committed is None
    with_parity(memory, an_id(4), 3)
    assert memory.orders.committed == an_id(4)


def test_groups_are_no_larger_than_asked_and_cover_all() -> None:
    made = groups(a_memory(10, xor=4).attached().sealed(an_id(4)), an_id(4))
    assert [len(group) for group in made] == [5, 5]
    assert len({member.node for group in made for member in group}) == 10


def test_a_lost_node_is_rebuilt_and_the_newest_committed_step_is_chosen() -> None:
    memory = all_with_parity(a_memory(4, xor=3).attached(), an_id(4))
    memory.lost(2).attached(2, restoring=True)
    chosen = memory.orders.chosen
    assert chosen is not None
    assert (chosen.checkpoint, chosen.missing) == (an_id(4), ())
    assert sorted(chosen.holders) == [0, 1, 3]
    assert 2 in chosen.groups[0].rebuildable(chosen.holders)


def test_one_lost_node_in_each_of_two_groups_is_rebuilt() -> None:
    memory = all_with_parity(a_memory(6, xor=2).attached(), an_id(4))
    first, second = groups(memory, an_id(4))
    lost = [int(group[0].ranks[0]) for group in (first, second)]
    for index in lost:
        memory.lost(index)
    chosen = memory.attached(2, restoring=True).orders.chosen
    assert chosen is not None
    assert (chosen.checkpoint, chosen.missing) == (an_id(4), ())


def test_two_lost_nodes_of_a_group_go_back_to_what_is_in_storage_all_together() -> None:
    memory = a_memory(4, xor=3, store=True).attached().in_storage(an_id(2))
    all_with_parity(memory, an_id(4)).lost(1).lost(2)
    chosen = memory.in_storage(an_id(2)).attached(2, restoring=True).orders.chosen
    assert chosen is not None
    assert (chosen.checkpoint, chosen.stored is not None) == (an_id(2), True)


def test_two_lost_nodes_of_a_group_without_storage_are_refused_with_the_ranks() -> None:
    memory = all_with_parity(a_memory(4, xor=3).attached(), an_id(4)).lost(1).lost(2).attached(2, restoring=True)
    assert memory.orders.chosen is None
    assert "no copy of ranks 1, 2 of 4" in memory.orders.refused


def test_node_lost_while_parity_is_made_leaves_the_step_before() -> None:
    memory = all_with_parity(a_memory(4, xor=3).attached(), an_id(4)).sealed(an_id(9))
    with_parity(memory, an_id(9), 0, 1).lost(3)
    chosen = memory.attached(2, restoring=True).orders.chosen
    assert chosen is not None
    assert chosen.checkpoint == an_id(4)


def test_parity_of_other_slots_than_those_that_are_there_counts_for_nothing() -> None:
    memory = with_parity(a_memory(3, xor=2).attached().sealed(an_id(4)), an_id(4), root="of another life")
    assert memory.orders.committed is None
    assert memory.lost(1).attached(2, restoring=True).orders.chosen is None


def test_one_node_alone_commits_without_parity() -> None:
    memory = a_memory(1, xor=4).attached().sealed(an_id(4))
    assert (memory.orders.committed, memory.orders.protect) == (an_id(4), ())


def test_what_is_aborted_or_older_than_the_committed_one_is_not_protected() -> None:
    memory = all_with_parity(a_memory(2, xor=1).attached(), an_id(4)).sealed(an_id(9))
    assert [one.checkpoint for one in memory.orders.protect] == [an_id(4), an_id(9)]
    with_parity(memory, an_id(9))
    assert [one.checkpoint for one in memory.orders.protect] == [an_id(9)]
    memory.sealed(an_id(14)).say(0, skipped=(an_id(14),))
    assert [one.checkpoint for one in memory.orders.protect] == [an_id(9)]


def test_nodes_of_one_domain_are_in_different_groups() -> None:
    memory = a_memory(4, xor=3)
    for index in range(4):
        memory.reports[index] = msgspec.structs.replace(memory.reports[index], domain=f"rack-{index // 2}")
    made = groups(memory.attached().sealed(an_id(4)), an_id(4))
    racks = {NodeId(f"node-{n}"): n // 2 for n in range(4)}
    assert all(len({racks[member.node] for member in group}) == len(group) for group in made)
