"""How often to save: the design's figures, the bounds, and that more cost or fewer failures never mean more saves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.policy.cadence import (
    LONGEST_IN_MEMORY,
    LONGEST_IN_STORAGE,
    Failures,
    best_interval,
    changed,
    failure_rates,
    in_steps,
    interval,
)
from perdure.vocab.checkpoint import Level

COSTS = st.floats(1e-4, 1e4)
RATES = st.floats(1e-9, 1.0)
SHARES = st.floats(1e-3, 0.5)
HOUR = 3600.0


def test_interval_at_llama_3_scale_is_the_designs_figures() -> None:
    assert best_interval(0.15, 1 / (3 * HOUR)) == pytest.approx(57, abs=0.5)
    assert best_interval(5.0, 1 / (150 * HOUR)) / 60 == pytest.approx(39, abs=0.5)


def test_a_fleet_of_llama_3s_size_fails_every_three_hours() -> None:
    assert 1 / failure_rates(16_384, Failures(), 0.0).any / HOUR == pytest.approx(50_000 / 16_384 / 1.22, rel=1e-3)


def test_dalys_formula_is_taken_for_a_great_cost() -> None:
    cost, mean = 100.0, 1000.0
    x = math.sqrt(cost / (2 * mean))
    assert best_interval(cost, 1 / mean) == pytest.approx(math.sqrt(2 * cost * mean) * (1 + x / 3 + x**2 / 9) - cost)
    assert best_interval(2000.0, 1 / mean) == mean


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_interval_without_failures_is_the_longest(rate: float) -> None:
    assert interval(0.1, rate, overhead=0.01) == LONGEST_IN_MEMORY
    assert interval(0.1, rate, overhead=0.01, longest=LONGEST_IN_STORAGE) == LONGEST_IN_STORAGE


@given(cost=COSTS, rate=RATES, overhead=SHARES, step=st.floats(1e-3, 1e3))
def test_overhead_bound_holds_in_whole_steps(cost: float, rate: float, overhead: float, step: float) -> None:
    work = in_steps(interval(cost, rate, overhead=overhead), step) * step
    assert cost / (work + cost) <= overhead * (1 + 1e-9)


@given(cost=COSTS, more=COSTS, rate=RATES, overhead=SHARES)
def test_interval_is_never_shorter_for_a_greater_cost(cost: float, more: float, rate: float, overhead: float) -> None:
    low, high = sorted((cost, more))
    assert interval(low, rate, overhead=overhead) <= interval(high, rate, overhead=overhead) * (1 + 1e-9)


@given(cost=COSTS, rate=RATES, more=RATES, overhead=SHARES)
def test_interval_is_never_longer_for_more_failures(cost: float, rate: float, more: float, overhead: float) -> None:
    low, high = sorted((rate, more))
    assert interval(cost, high, overhead=overhead) <= interval(cost, low, overhead=overhead) * (1 + 1e-9)


@given(cost=COSTS, rate=RATES, overhead=SHARES, commit=st.floats(0.0, 1e5))
def test_interval_is_never_shorter_than_a_commit(cost: float, rate: float, overhead: float, commit: float) -> None:
    assert interval(cost, rate, overhead=overhead, shortest=commit) >= commit


@given(seconds=st.floats(0.0, 1e6), step=st.floats(1e-3, 1e4))
def test_steps_last_as_long_and_no_step_longer(seconds: float, step: float) -> None:
    steps = in_steps(seconds, step)
    assert steps >= 1
    assert steps * step >= seconds
    assert steps == 1 or (steps - 1) * step < seconds * (1 + 1e-9)


@given(now=st.integers(1, 10**6), wanted=st.integers(1, 10**6), least=st.integers(1, 10**6))
def test_cadence_changes_by_a_factor_of_two_and_gets_there(now: int, wanted: int, least: int) -> None:
    after = changed(now, wanted, least)
    assert after >= least
    assert after <= max(2 * now, least)
    assert after >= now / 2
    for _ in range(25):
        now = changed(now, wanted, least)
    assert now == max(wanted, least)


def test_first_cadence_is_what_is_wanted() -> None:
    assert changed(None, 50) == 50
    assert changed(None, 5, 7) == 7


@pytest.mark.parametrize("overhead", [0.0, -0.1, 0.51, math.nan])
def test_overhead_that_makes_no_sense_is_refused(overhead: float) -> None:
    with pytest.raises(ValueError, match="share"):
        interval(1.0, 1e-6, overhead=overhead)


def test_own_history_outweighs_the_prior_in_time() -> None:
    day = 24 * HOUR
    rates = failure_rates(8, Failures(process=240), 10 * day)
    assert 1 / HOUR > rates.process > 0.9 / HOUR
    assert failure_rates(1, Failures(process=7), 300.0).process > 1 / 100
    assert failure_rates(8, Failures(), 10 * day).process < failure_rates(8, Failures(), 0.0).process


def test_a_safer_copy_is_needed_by_fewer_failures() -> None:
    rates = failure_rates(8, Failures(), 0.0)
    assert rates.any > rates.beyond(Level.SEALED) > rates.beyond(Level.REPLICATED) > rates.beyond(Level.DURABLE) == 0.0
