"""Checkpoints under everything that goes wrong: the rules hold on every seed, and broken ones are caught."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from perdure.control import saves
from perdure.control.memories import standing
from perdure.control.saves import SavesState
from perdure.sim.saving import SavingScenario, a_parity_scenario, a_saving_scenario, simulate_saves
from perdure.vocab.checkpoint import CheckpointId
from perdure.wire.memory import MemoryReport

AT_ONCE = 25
replace: Callable[..., Any] = msgspec.structs.replace


def check(seeds: range, scenario: Callable[[int], SavingScenario] = a_saving_scenario) -> None:
    """Fail with what is needed to see it again."""
    bad = {seed: found for seed in seeds if (found := simulate_saves(scenario(seed), seed))}
    assert not bad, "\n".join(f"seed {seed}: {found[0]}" for seed, found in bad.items())


@pytest.mark.parametrize("first", range(0, 200, AT_ONCE))
def test_checkpoint_rules_hold_on_200_seeds(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(200, 5000, 8 * AT_ONCE))
def test_checkpoint_rules_hold_on_5000_seeds(first: int) -> None:
    check(range(first, first + 8 * AT_ONCE))


@pytest.mark.parametrize("first", range(0, 50, AT_ONCE))
def test_any_one_node_of_a_parity_group_is_lost_and_no_committed_step_with_it(first: int) -> None:
    check(range(first, first + AT_ONCE), a_parity_scenario)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(50, 1050, 4 * AT_ONCE))
def test_parity_rules_hold_on_1000_seeds(first: int) -> None:
    check(range(first, first + 4 * AT_ONCE), a_parity_scenario)


def commits_before_there_is_parity(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Takes what is sealed everywhere for safe."""
    after = saves.reported(state, report, now)
    sealed = [c for c in after.copies if c not in after.aborted | after.bad and standing(after, c).is_held(1)]
    newest = max(sealed, default=None)
    if newest is None or (after.committed is not None and newest <= after.committed):
        return after
    return replace(after, committed=newest, version=after.version + 1)


def test_a_control_that_commits_before_there_is_parity_is_caught() -> None:
    judge = commits_before_there_is_parity
    assert any(simulate_saves(a_parity_scenario(seed), seed, judge=judge) for seed in range(10))


# --- broken rules ----------------------------------------------------------------------------------------------------


def commits_what_one_rank_has(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Takes a part for the whole."""
    after = saves.reported(state, report, now)
    newest = max((held.checkpoint for held in report.held), default=None)
    if newest is None or (after.committed is not None and newest <= after.committed):
        return after
    return replace(after, committed=newest, version=after.version + 1)


def forgets_skips(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Leaves the slots of a step that one rank has skipped taken for ever."""
    after = saves.reported(state, replace(report, skipped=()), now)
    return replace(after, aborted=frozenset(), seen_at={})


def aborts_what_is_committed(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """A gate that ignores commits: the slots of everything that is known are free."""
    after = saves.reported(state, report, now)
    every: frozenset[CheckpointId] = frozenset(after.copies)
    return replace(after, aborted=every, committed=None, version=after.version + (not every <= state.aborted))


def answers_each_rank_by_itself(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Gives whoever asks the newest that there is just then."""
    asks = any(each.restoring for each in report.attached)
    eager = replace(state, choice=None, question=0, asked_at=now - 1000.0) if asks else state
    return saves.reported(eager, replace(report, told=replace(report.told, answered=0)), now)


def saves_again_under_the_same_ids(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Lets the ranks go back within one line: each step from there on has two contents."""
    return replace(saves.reported(state, report, now), turn=0)


def goes_back_when_the_first_rank_asks_again(state: SavesState, report: MemoryReport, now: float) -> SavesState:
    """Does not wait for the others, who save on in the line that was left."""
    after = saves.reported(state, report, now)
    asked = max((each.restoring for each in report.attached), default=0)
    if state.choice is None or not asked > state.question > 0:
        return after
    return replace(after, question=asked, turn=asked - 1, version=after.version + 1)


BROKEN = (
    saves_again_under_the_same_ids,
    goes_back_when_the_first_rank_asks_again,
    commits_what_one_rank_has,
    aborts_what_is_committed,
    forgets_skips,
    answers_each_rank_by_itself,
)


@pytest.mark.parametrize("judge", BROKEN, ids=lambda judge: judge.__name__)
def test_a_control_that_breaks_a_checkpoint_rule_is_caught(judge: Any) -> None:
    assert any(simulate_saves(a_saving_scenario(seed), seed, judge=judge) for seed in range(60))
