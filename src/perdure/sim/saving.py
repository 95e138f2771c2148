"""`simulate_saves`: one scenario and one seed to what was violated. The same two give the same, always.

Control's functions and the ring's are the real code's; a test may give a broken control in their place.
"""

import random

from perdure.control import saves
from perdure.sim.agenda import START
from perdure.sim.saving_nemesis import SaveNemesis
from perdure.sim.saving_scenario import SavingScenario, a_parity_scenario, a_saving_scenario
from perdure.sim.saving_world import QUIET, Judge, SavingWorld

__all__ = ["SavingScenario", "a_parity_scenario", "a_saving_scenario", "simulate_saves"]


def simulate_saves(scenario: SavingScenario, seed: int, *, judge: Judge = saves.reported) -> tuple[str, ...]:
    """Run `scenario` with the dice of `seed`; gives what was violated, in words. Ends at the first."""
    world = SavingWorld(scenario, random.Random(seed), judge)
    world.begin()
    world.tick()
    agenda, rules = world.agenda, world.rules
    agenda.after(world.rng.expovariate(1 / scenario.mean_faults), SaveNemesis(world).strike)
    agenda.run(START + scenario.duration, lambda: bool(rules.violations))
    world.quiet, before = True, world.commits
    agenda.run(START + scenario.duration + QUIET, lambda: bool(rules.violations))
    if not rules.violations and world.commits == before and not world.saves_seldom:
        rules.violate("somebody waits for ever", f"nothing was committed in the last {QUIET:g} s")
    return tuple(rules.violations)
