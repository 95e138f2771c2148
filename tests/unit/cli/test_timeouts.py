"""The ladder of time limits is shown with its effective values and refused where it contradicts itself."""

import msgspec
import pytest

from perdure.cli.timeouts import check_timeouts, explain_timeouts
from perdure.errors import ConfigError
from perdure.vocab.ids import JobId
from perdure.vocab.job import JobSpec, RecoveryRules, StallRules

JOB = JobSpec(id=JobId("exp7"), command=("train.py",), min_nodes=1, max_nodes=1, workers_per_node=1)


def with_rules(rules: RecoveryRules | None = None, stalls: StallRules | None = None) -> JobSpec:
    return msgspec.structs.replace(JOB, rules=rules or JOB.rules, stalls=stalls or JOB.stalls)


def test_defaults_do_not_contradict_each_other():
    check_timeouts(JOB)


@pytest.mark.parametrize(
    ("job", "values"),
    [
        (with_rules(stalls=StallRules(fixed=5.0)), ["lease (5.00 s)", "--stall-limit (5.00 s)"]),
        (with_rules(stalls=StallRules(fixed=900.0)), ["--stall-limit (15 min 0 s)", "timeout (10 min 0 s)"]),
        (with_rules(rules=RecoveryRules(lease=0.4)), ["connection (0.50 s)", "lease (0.40 s)"]),
        (with_rules(rules=RecoveryRules(lease=600.0)), ["lease (10 min 0 s)", "timeout (10 min 0 s)"]),
    ],
)
def test_contradiction_is_refused_with_both_values(job, values):
    with pytest.raises(ConfigError) as caught:
        check_timeouts(job)
    assert all(value in str(caught.value) for value in values)


def test_explanation_shows_the_ladder_in_order_and_the_other_limits():
    lines = explain_timeouts(JOB).splitlines()
    assert "exp7" in lines[0]
    assert [line[2:20].strip() for line in lines[1:5]] == ["lease", "stall limit", "collective timeout", "job limit"]
    assert "5.00 s" in lines[1]
    assert "learned, from 2.00 s" in lines[2]
    assert any("restart window" in line and "1 h 0 min" in line for line in lines)


def test_explanation_with_a_fixed_limit_shows_no_learned_one():
    text = explain_timeouts(with_rules(stalls=StallRules(fixed=30.0)))
    assert "30 s" in text
    assert "learned," not in text
    assert "p99" not in text
