"""Replicas and parity groups: every small cluster in turn, and what is left of each when a node or a domain is lost."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.policy.replicas import partners, unprotected, warnings, xor_groups
from perdure.vocab.ids import NodeId

Nodes = tuple[tuple[NodeId, str], ...]


def partitions(total: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to spread `total` nodes over domains; order does not matter."""
    if total == 0:
        yield ()
    for first in range(min(total, largest or total), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def cluster(sizes: tuple[int, ...]) -> Nodes:
    """Names that mix the domains, so that a sort by name alone does not happen to separate them."""
    racks = [f"rack-{number}" for number, size in enumerate(sizes) for _ in range(size)]
    return tuple((NodeId(f"node-{(7 * place) % 101:03}"), rack) for place, rack in enumerate(racks))


EVERY = [cluster(sizes) for total in range(1, 13) for sizes in partitions(total)]


def largest(nodes: Nodes) -> int:
    return max(Counter(domain for _, domain in nodes).values())


def lost(sends: Mapping[NodeId, tuple[NodeId, ...]], dead: set[NodeId]) -> set[NodeId]:
    """Nodes whose data is nowhere any more."""
    return {node for node in dead if all(receiver in dead for receiver in sends[node])}


def test_any_one_node_dies_and_its_data_is_on_another() -> None:
    for nodes in EVERY:
        for copies in (1, 2, 3):
            sends = partners(nodes, copies)
            assert set(sends) == {node for node, _ in nodes}
            for node, receivers in sends.items():
                assert node not in receivers
                assert len(set(receivers)) == len(receivers) == min(copies, len(nodes) - 1)
                assert len(nodes) == 1 or not lost(sends, {node})


def test_any_one_domain_dies_and_nothing_is_lost_where_domains_allow_it() -> None:
    for nodes in EVERY:
        sends = partners(nodes, 1)
        for rack in {domain for _, domain in nodes}:
            gone = lost(sends, {node for node, domain in nodes if domain == rack})
            if 2 * largest(nodes) <= len(nodes):
                assert not gone, nodes
            assert gone <= set(unprotected(nodes, sends))


def test_a_domain_with_most_nodes_leaves_as_few_unprotected_as_possible() -> None:
    """Everyone receives once, so at most as many of it are protected as there are nodes outside."""
    for nodes in EVERY:
        outside = len(nodes) - largest(nodes)
        assert len(unprotected(nodes, partners(nodes, 1))) == max(largest(nodes) - outside, 0), nodes


def test_one_copy_is_a_mutual_pair_and_one_ring_of_three_if_odd() -> None:
    for nodes in EVERY:
        sends = partners(nodes, 1)
        mutual = [node for node, (*receiver,) in sends.items() if receiver and sends[receiver[0]] == (node,)]
        assert len(sends) - len(mutual) == (1 if len(nodes) == 1 else 3 * (len(nodes) % 2))


def test_everyone_receives_as_many_as_they_send() -> None:
    for nodes in EVERY:
        for copies in (1, 2, 3):
            sends = partners(nodes, copies)
            received = Counter(receiver for receivers in sends.values() for receiver in receivers)
            assert all(received[node] == len(sends[node]) for node in sends)


def test_any_two_domains_die_with_two_copies_where_domains_allow_it() -> None:
    for nodes in (nodes for nodes in EVERY if 3 * largest(nodes) <= len(nodes)):
        sends, racks = partners(nodes, 2), sorted({domain for _, domain in nodes})
        for pair in combinations(racks, 2):
            assert not lost(sends, {node for node, domain in nodes if domain in pair}), nodes


def test_two_random_nodes_are_fatal_only_where_they_are_a_pair() -> None:
    """1/(N-1) for an even number of nodes, as the design counts it."""
    nodes = cluster((1,) * 10)
    sends = partners(nodes, 1)
    fatal = sum(bool(lost(sends, set(pair))) for pair in combinations(sends, 2))
    assert fatal == 5, "of 45 pairs: 1/9"


CLUSTERS = st.lists(st.sampled_from("abcdef"), min_size=0, max_size=40).map(
    lambda racks: tuple((NodeId(f"n{number}"), rack) for number, rack in enumerate(racks))
)


@given(CLUSTERS, st.integers(0, 4), st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_named_does_not_matter(nodes: Nodes, copies: int, random: object) -> None:
    mixed = list(nodes)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert partners(mixed, copies) == partners(nodes, copies)
    assert xor_groups(mixed, copies) == xor_groups(nodes, copies)
    assert warnings(mixed, copies) == warnings(nodes, copies)


def test_no_copies_and_no_nodes_are_no_error() -> None:
    assert partners((), 1) == {}
    assert partners(cluster((2, 1)), 0) == {NodeId(f"node-{n:03}"): () for n in (0, 7, 14)}
    assert warnings((), 1) == () == warnings(cluster((2, 1)), 0)


def test_warning_says_how_many_are_not_protected_and_why() -> None:
    assert warnings(cluster((2, 2)), 1) == ()
    (most,) = warnings(cluster((4, 1)), 1)
    assert most.startswith("3 of 5 nodes have no replica outside their failure domain, because rack-0 has 4 of the 5")
    (only,) = warnings(cluster((1,)), 1)
    assert only == "node-000 is the only node: no other memory can keep a copy of its checkpoints"
    assert warnings(cluster((1, 1)), 3) == ("3 replicas were asked for, and 2 nodes can keep 1",)


# --- parity groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
def test_xor_group_loses_one_member_at_most_with_any_node_or_domain(k: int) -> None:
    for nodes in EVERY:
        domain, groups = dict(nodes), xor_groups(nodes, k)
        assert all(2 <= len(group) <= k + 2 for group in groups), (nodes, groups)
        assert all(len({domain[node] for node in group}) == len(group) for group in groups), (nodes, groups)
        placed = [node for group in groups for node in group]
        assert len(set(placed)) == len(placed)


def test_xor_groups_leave_out_only_what_no_other_domain_can_protect() -> None:
    for nodes in EVERY:
        placed = sum(len(group) for group in xor_groups(nodes, 4))
        outside = len(nodes) - largest(nodes)
        assert placed == min(len(nodes), 2 * outside), nodes


def test_xor_groups_have_k_and_one_members_where_the_numbers_allow_it() -> None:
    assert [len(group) for group in xor_groups(cluster((2,) * 5), 4)] == [5, 5]
    assert [len(group) for group in xor_groups(cluster((1,) * 7), 4)] == [4, 3]
    assert [len(group) for group in xor_groups(cluster((1,) * 3), 1)] == [3], "a pair would leave one alone"
