"""Every seed is a small cluster on which everything goes wrong; the rules hold on all of them."""

import pytest

from perdure.sim.checker import check_records
from tests.simulation.seeds import check, outcome_of

AT_ONCE = 25
ONCE_BAD = (63, 177, 260, 297, 386, 425, 449, 506, 535, 1098, 1230, 1265, 1306, 1608, 2503, 2802)
"""Seeds that found a bug: each was a job that never ended, two generations at once, or a rank that ran twice."""


@pytest.mark.parametrize("first", range(0, 200, AT_ONCE))
def test_rules_hold_on_200_seeds(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(200, 10_000, 10 * AT_ONCE))
def test_rules_hold_on_10000_seeds(first: int) -> None:
    check(range(first, min(first + 10 * AT_ONCE, 10_000)))


@pytest.mark.parametrize("seed", ONCE_BAD)
def test_rules_hold_on_a_seed_that_once_found_a_bug(seed: int) -> None:
    check(range(seed, seed + 1))


@pytest.mark.parametrize("seed", [3, 26, 38])
def test_same_seed_gives_the_same_timeline(seed: int) -> None:
    assert outcome_of(seed) == outcome_of(seed)


def test_two_seeds_give_two_timelines() -> None:
    assert outcome_of(3).records != outcome_of(4).records


@pytest.mark.parametrize("seed", range(20))
def test_records_alone_are_enough_for_the_checker(seed: int) -> None:
    assert check_records(outcome_of(seed).records) == ()


def test_seeds_meet_every_kind_of_end() -> None:
    codes = {outcome_of(seed).summary.exit_code for seed in range(100)}
    assert {0, 1, 3} <= codes
