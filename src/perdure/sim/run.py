"""`simulate`: one scenario and one seed to what came of it. The same two give the same records, always."""

import random

import msgspec

from perdure.agent.decide import act
from perdure.control.brain import step
from perdure.control.fold import replay
from perdure.control.state import State
from perdure.goodput import Ledger, account
from perdure.playbook.parse import Catalogue
from perdure.ports import LogRecord
from perdure.sim.agenda import START
from perdure.sim.checker import Violation, check_ledger
from perdure.sim.controller import Stepper
from perdure.sim.failures import FaultKind
from perdure.sim.nemesis import Nemesis
from perdure.sim.node import Actor
from perdure.sim.scenario import Scenario
from perdure.sim.world import World
from perdure.vocab.event import AnyEvent
from perdure.vocab.units import Instant, Seconds, show_duration

AFTERWARDS: Seconds = 1000.0
"""After the job's end until nothing of it may be left: the longest cut, and a boot."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation in some figures."""

    seed: int
    nodes: int
    simulated: Seconds
    happenings: int
    """Things that were done in virtual time."""
    faults: dict[str, int]
    """That were carried out, by kind."""
    generations: int
    exit_code: int | None
    reason: str
    steps: int
    """Saved at the end."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    records: tuple[LogRecord, ...]
    ledger: Ledger
    violations: tuple[Violation, ...]
    summary: Summary


def simulate(
    scenario: Scenario, seed: int, catalogue: Catalogue, *, brain: Stepper | None = None, agent: Actor = act
) -> Outcome:
    """Run `scenario` with the dice of `seed`. Ends at the first violation, or when the job and all its agents have.

    `brain` replaces the real `control.brain.step`, and `agent` the real `agent.decide.act`: a test that gives a
    broken one must see violations.
    """

    def real(state: State, events: tuple[AnyEvent, ...], now: Instant) -> tuple[State, tuple[LogRecord, ...]]:
        return step(state, events, now, catalogue)

    world = World(scenario, random.Random(seed), brain or real, agent)
    nemesis = Nemesis(world)
    world.start()
    world.agenda.run(START + scenario.patience, lambda: world.ended is not None or world.is_over())
    if world.agenda.goes_round:
        world.fail("time goes on", f"nothing comes to an end at {_where(world)}")
    elif world.ended is None and not world.is_over():
        world.fail("a job ends", f"not within {show_duration(scenario.patience)} of {_where(world)}")
    world.agenda.run(world.agenda.now + AFTERWARDS, world.is_over)
    if world.ended is not None:
        _check_end(world)
    records = tuple(world.log)
    violations = (*world.violations, *world.checker.violations, *check_ledger(records))
    return Outcome(
        records=records, ledger=account(records), violations=violations, summary=_summary(world, nemesis, seed)
    )


def _where(world: World) -> str:
    control = world.control
    if control is None:
        return "virtual time; control is down"
    generation = control.state.generation
    phase = "no generation" if generation is None else f"generation {generation.number} is {generation.phase}"
    return f"virtual time; {phase}"


def _check_end(world: World) -> None:
    left = [w for m in world.machines for w in m.workers if w.is_alive and not w.blocked]
    if left and not world.violations:
        world.fail("nothing is left", f"rank {left[0].rank} of generation {left[0].generation} on {left[0].node}")
    if world.control is not None and replay(world.log) != world.control.state:
        world.fail("a replay gives the same state", "at the end")


def _summary(world: World, nemesis: Nemesis, seed: int) -> Summary:
    counts: dict[FaultKind, int] = {}
    for _, kind in nemesis.carried_out:
        counts[kind] = counts.get(kind, 0) + 1
    ended = world.ended
    return Summary(
        seed=seed,
        nodes=len(world.machines),
        simulated=world.elapsed,
        happenings=world.agenda.done,
        faults={kind.value: counts[kind] for kind in FaultKind if kind in counts},
        generations=max(world.trainings, default=0),
        exit_code=None if ended is None else ended.exit_code,
        reason="" if ended is None else ended.reason,
        steps=world.saves.step,
    )


def render_outcome(outcome: Outcome) -> str:
    """What came of it, in a few lines; the goodput report is a matter of its own."""
    summary = outcome.summary
    faults = ", ".join(f"{count} x {kind}" for kind, count in summary.faults.items()) or "none"
    end = "did not end" if summary.exit_code is None else f"ended with {summary.exit_code}: {summary.reason}"
    lines = [
        f"seed {summary.seed}: {summary.nodes} nodes, {show_duration(summary.simulated)} of virtual time",
        f"faults: {faults}",
        f"the job {end}",
        f"{summary.generations} generations, {len(outcome.records)} records, step {summary.steps} saved",
    ]
    for violation in outcome.violations:
        at = show_duration(violation.at - START)
        lines.append(f"VIOLATED at {at}, record {violation.record}: {violation.rule}: {violation.what}")
    return "\n".join(lines)
