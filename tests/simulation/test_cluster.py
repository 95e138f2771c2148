"""Long jobs on large clusters: virtual time jumps over the steps, and the figures add up."""

import random

import pytest

from perdure.goodput import Phase
from perdure.sim.failures import FaultKind, PlannedFault, draw, node_rates
from perdure.sim.run import render_outcome, simulate
from perdure.sim.scenario import Scenario, Script, a_cluster
from perdure.vocab.ids import JobId
from perdure.vocab.job import JobSpec
from tests.simulation.seeds import catalogue


def test_ten_days_on_64_nodes_end_well_with_most_of_the_time_spent_on_training() -> None:
    outcome = simulate(a_cluster(64, 2, 10.0, 1000.0, 7), 7, catalogue())
    assert outcome.violations == ()
    assert outcome.summary.exit_code == 0
    assert 0.9 < outcome.ledger.effective < 1.0
    assert outcome.summary.happenings < 100_000, "steps must not be simulated one by one"
    assert "seed 7: 66 nodes" in render_outcome(outcome)


def test_without_faults_all_time_after_the_start_is_training() -> None:
    spec = JobSpec(id=JobId("calm"), command=("train.py",), min_nodes=3, max_nodes=3, workers_per_node=2)
    outcome = simulate(Scenario(spec=spec, nodes=3, script=Script(steps=1000)), 1, catalogue())
    assert outcome.violations == ()
    assert outcome.summary.exit_code == 0
    assert outcome.summary.generations == 1
    assert outcome.ledger.by_phase[Phase.TRAINING] > 0.97 * outcome.ledger.node_seconds


def test_a_lost_node_is_replaced_by_the_spare_within_the_lease_and_two_seconds() -> None:
    spec = JobSpec(id=JobId("spare"), command=("train.py",), min_nodes=3, max_nodes=3, workers_per_node=1, spares=1)
    fault = PlannedFault(at=300.0, kind=FaultKind.LOSE_NODE, nodes=(1,), seconds=1e9)
    scenario = Scenario(spec=spec, nodes=4, standbys=1, faults=(fault,))
    outcome = simulate(scenario, 1, catalogue())
    assert outcome.violations == ()
    (restart,) = outcome.ledger.restarts
    assert restart.cause == "node.silent"
    assert restart.actions == ("replace_node",)
    assert restart.recovered
    assert restart.running_s is not None
    assert restart.detection_s + restart.running_s < spec.rules.lease + 2.0


def test_control_that_dies_costs_no_step() -> None:
    spec = JobSpec(id=JobId("headless"), command=("train.py",), min_nodes=2, max_nodes=2, workers_per_node=2, spares=1)
    fault = PlannedFault(at=300.0, kind=FaultKind.CRASH_CONTROL, seconds=60.0)
    outcome = simulate(Scenario(spec=spec, nodes=3, standbys=1, faults=(fault,)), 1, catalogue())
    assert outcome.violations == ()
    assert outcome.summary.exit_code == 0
    assert outcome.ledger.restarts == ()


@pytest.mark.parametrize("hours", [100.0, 1000.0])
def test_faults_are_drawn_at_the_rate_that_was_asked_for(hours: float) -> None:
    found = draw(node_rates(hours), 100, 1000 * 3600.0, random.Random(1))
    assert len(found) == pytest.approx(100 * 1000 / hours, rel=0.25)
    assert list(found) == sorted(found, key=lambda fault: fault.at)
