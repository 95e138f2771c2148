"""A ledger of samples: every one of an epoch is used once, whatever worlds the run goes through."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.positions import KEY, OwnPosition, Position, divide, left, merge, merge_states
from perdure.trainer.checkpoint.sampler import GlobalSampler


def take(sampler: GlobalSampler, count: int) -> list[int]:
    """`count` samples, through as many epochs as it takes."""
    found: list[int] = []
    while len(found) < count:
        for sample in sampler:
            found.append(sample)
            if len(found) == count:
                break
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """Length of the epoch, and worlds: how many ranks, how much each one takes before it ends."""
    length = draw(st.integers(1, 200))
    chain = []
    for _ in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 9))
        chain.append((size, draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))))
    return length, chain


@given(worlds())
def test_ledger_of_an_epoch_has_each_sample_once_in_any_worlds(
    run: tuple[int, list[tuple[int, list[int]]]],
) -> None:
    """Thread 39 (meta-pytorch/data 1437, KempnerForge 57) and Thread 25 (torchtitan 811): no sample twice, none lost.

    Also where the ranks are not equally far.
    """
    length, chain = run
    used: Counter[int] = Counter()
    position = Position()
    for size, takes in chain:
        owns = []
        for rank, count in enumerate(takes):
            own = divide(position, rank, size)
            places = [place for _, place in zip(range(count), left(own, length), strict=False)]
            used.update(places)
            owns.append(own.advanced(len(places)))
        position = merge(owns)
        assert position.used == len(used) == used.total()
    for rank in range(3):
        used.update(left(divide(position, rank, 3), length))
    assert used == Counter(range(length))


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 9), st.lists(st.integers(0, 299), max_size=20))
def test_shares_of_what_is_left_are_disjoint_and_differ_by_one_at_most(
    length: int, consumed: int, size: int, beyond: list[int]
) -> None:
    consumed = min(consumed, length)
    beyond_places = sorted({place for place in beyond if consumed < place < length})
    position = Position(consumed=consumed, beyond=tuple(beyond_places))
    shares = [list(left(divide(position, rank, size), length)) for rank in range(size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    together = sorted(place for share in shares for place in share)
    assert together == [place for place in range(consumed, length) if place not in position.beyond]


def test_interrupted_run_through_worlds_4_2_5_has_the_samples_of_the_uninterrupted_one() -> None:
    """Three resumes, three epochs, shuffled; the last epoch is not finished."""
    length = 48
    used: list[int] = []
    states: Mapping[int, Any] = {}
    for size, steps in ((4, 5), (2, 14), (5, 9), (1, 25)):
        samplers = [GlobalSampler(length, rank, size, seed=3) for rank in range(size)]
        if states:
            for rank, sampler in enumerate(samplers):
                sampler.load_state_dict(merge_states(states, rank, size))
        rounds = [take(sampler, steps) for sampler in samplers]
        used += [sample for turn in zip(*rounds, strict=True) for sample in turn]
        states = {rank: sampler.state_dict() for rank, sampler in enumerate(samplers)}
    whole = take(GlobalSampler(length, 0, 1, seed=3), len(used))
    epochs = [Counter(used[at : at + length]) for at in range(0, len(used), length)]
    assert [epoch == Counter(range(length)) for epoch in epochs] == [len(used) >= (i + 1) * length for i in range(3)]
    assert used == whole  # in steps of a whole round even the order is the same


def test_same_world_goes_on_where_it_was() -> None:
    """Thread 39 (KempnerForge 51): the same world."""
    sampler = GlobalSampler(10, 1, 3)
    before = take(sampler, 2)
    resumed = GlobalSampler(10, 1, 3)
    resumed.load_state_dict(sampler.state_dict())
    assert before + take(resumed, 4) == take(GlobalSampler(10, 1, 3), 6)


def test_samples_that_a_loader_has_only_prefetched_are_not_lost() -> None:
    sampler = GlobalSampler(20, 0, 2)
    given = take(sampler, 7)
    sampler.used(2)
    sampler.used(1)
    resumed = GlobalSampler(20, 0, 2)
    resumed.load_state_dict(sampler.state_dict())
    assert take(resumed, 4) == given[3:]


def test_use_that_crosses_an_epoch_is_counted_in_the_next_one() -> None:
    sampler = GlobalSampler(6, 0, 2)
    given = take(sampler, 5)
    sampler.used(4)
    resumed = GlobalSampler(6, 0, 2)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epoch == 1
    assert take(resumed, 1) == given[4:]


def test_one_rank_that_has_begun_the_next_epoch_fits_others_that_have_finished_theirs() -> None:
    ahead = OwnPosition(began=Position(epoch=1), rank=0, world_size=2, taken=1)
    behind = OwnPosition(began=Position(epoch=0), rank=1, world_size=2, taken=3)
    assert merge([ahead, behind], length=6) == Position(epoch=1, consumed=1)
    with pytest.raises(ConfigError, match="epoch"):
        merge([ahead, behind], length=8)
    with pytest.raises(ConfigError, match="epoch"):
        merge([ahead, behind])


def test_a_lost_rank_is_refused_and_not_guessed() -> None:
    states = {rank: GlobalSampler(10, rank, 3).state_dict() for rank in (0, 2)}
    with pytest.raises(ConfigError, match=r"lost \(there are those of: 0, 2\)"):
        merge_states(states, 0, 2)


def test_a_loader_that_does_not_tell_its_place_needs_a_hook() -> None:
    states = {0: {"yielded": 3}, 1: {"yielded": 4}}
    with pytest.raises(ConfigError, match="give checkpoint"):
        merge_states(states, 0, 3)
    merged = merge_states(
        states, 2, 3, lambda all_states, rank, size: (sum(s["yielded"] for s in all_states.values()), rank, size)
    )
    assert merged == (7, 2, 3)


def test_ranks_with_another_order_are_refused() -> None:
    states = {rank: GlobalSampler(10, rank, 2, seed=rank).state_dict() for rank in range(2)}
    with pytest.raises(ConfigError, match="disagree"):
        merge_states(states, 0, 1)
    with pytest.raises(ConfigError, match="another one"):
        GlobalSampler(11, 0, 2).load_state_dict(states[0])
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        GlobalSampler(10, 0, 2, seed=1).load_state_dict(states[1])


@pytest.mark.parametrize("garbage", [None, 7, {"began": 3}, {"began": {"epoch": "x"}, "rank": 0, "world_size": 1}])
def test_garbage_in_the_place_of_a_position_is_refused(garbage: object) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        merge_states({0: {KEY: garbage}}, 0, 1)
