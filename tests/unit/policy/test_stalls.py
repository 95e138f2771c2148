"""Every limit fires, and each has its reason (nvidia-resiliency-ext 299, FlagScale 1267)."""

import msgspec
import pytest

from perdure.policy.stalls import Limit, percentile, shortest_limit, stall_limit
from perdure.vocab.job import StallRules

RULES = StallRules()


def limit(phase: str, *, tells: bool = True, steps: tuple[float, ...] = (), phases: tuple[float, ...] = (),
          rules: StallRules = RULES) -> Limit:  # fmt: skip
    found = stall_limit(phase, tells=tells, steps=steps, phases=phases, rules=rules)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("phase", "seconds"), [("start_up", 600.0), ("first_step", 1800.0), ("checkpoint", 1800.0), ("evaluation", 1800.0)]
)
def test_a_phase_that_is_not_learned_has_its_own_limit_and_waits_for_work(phase: str, seconds: float) -> None:
    assert (limit(phase).quiet, limit(phase).busy) == (seconds, None)


def test_work_after_the_loop_has_no_limit() -> None:
    assert stall_limit("done", tells=True, steps=(), phases=(), rules=RULES) is None


def test_an_unknown_phase_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no such phase"):
        limit("lunch")


def test_a_script_that_tells_only_steps_is_given_ten_minutes_without_work() -> None:
    assert limit("training", tells=False, steps=(0.1,) * 50).quiet == 600.0


def test_training_is_learned_after_ten_steps() -> None:
    assert limit("training", steps=(1.0,) * 9).quiet == 600.0
    assert limit("training", steps=(1.0,) * 10).quiet == 5.0
    assert "p99" in limit("training", steps=(1.0,) * 10).source


def test_a_learned_limit_has_a_floor_and_stays_below_the_collective_timeout() -> None:
    assert limit("training", steps=(0.01,) * 10).quiet == RULES.floor
    slow = limit("training", steps=(500.0,) * 10)
    assert slow.quiet < RULES.collective_timeout
    assert slow.busy is not None
    assert slow.busy < RULES.collective_timeout


def test_a_checkpoint_is_learned_after_three() -> None:
    assert limit("checkpoint", phases=(30.0,) * 2).quiet == 1800.0
    assert limit("checkpoint", phases=(20.0, 30.0, 25.0)).quiet == 150.0
    assert limit("checkpoint", phases=(1.0,) * 3).quiet == 60.0
    assert limit("checkpoint", phases=(5000.0,) * 3).quiet == 1800.0


@pytest.mark.parametrize("phase", ["training", "checkpoint", "evaluation", "other"])
def test_the_users_limit_replaces_all_after_the_first_step_whatever_the_worker_does(phase: str) -> None:
    rules = msgspec.structs.replace(RULES, fixed=45.0)
    assert (limit(phase, rules=rules).quiet, limit(phase, rules=rules).busy) == (45.0, 45.0)
    assert limit("first_step", rules=rules).quiet == 1800.0


def test_percentile_is_a_value_that_occurred() -> None:
    assert percentile((3.0, 1.0, 2.0), 0.5) == 2.0
    assert percentile(tuple(float(n) for n in range(100)), 0.99) == 98.0


@pytest.mark.parametrize("rules", [StallRules(), StallRules(fixed=0.7), StallRules(collective_timeout=1.0)])
def test_no_limit_is_below_the_shortest(rules: StallRules) -> None:
    limits = [
        stall_limit(phase, tells=tells, steps=[0.001] * 20, phases=[0.001] * 5, rules=rules)
        for phase in ("start_up", "first_step", "training", "checkpoint", "evaluation", "other")
        for tells in (False, True)
    ]
    assert min(limit.quiet for limit in limits if limit is not None) >= shortest_limit(rules)
