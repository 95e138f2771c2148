"""Checkpoints under everything that goes wrong: the rules hold on every seed, and broken ones are caught."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from perdure.control import saves
from perdure.control.saves import SavesState
from perdure.sim.saving import a_saving_scenario, simulate_saves
from perdure.vocab.checkpoint import CheckpointId
from perdure.wire.memory import MemoryReport

AT_ONCE = 25
replace: Callable[..., Any] = msgspec.structs.replace


def check(seeds: range) -> None:
    """Fail with what is needed to see it again."""
    bad = {seed: found for seed in seeds if (found := simulate_saves(a_saving_scenario(seed), seed))}
    assert not bad, "\n".join(f"seed {seed}: {found[0]}" for seed, found in bad.items())


@pytest.mark.parametrize("first", range(0, 200, AT_ONCE))
def test_checkpoint_rules_hold_on_200_seeds(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(200, 5000, 8 * AT_ONCE))
def test_checkpoint_rules_hold_on_5000_seeds(first: int) -> None:
    check(range(first, first + 8 * AT_ONCE))


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
    attached = tuple(replace(each, restoring=each.restoring) for each in report.attached)
    eager = replace(state, choice=None, asked_at=now - 1000.0 if state.asked_at is not None else None)
    return saves.reported(eager, replace(report, attached=attached, told=replace(report.told, answered=False)), now)


BROKEN = (
    commits_what_one_rank_has,
    aborts_what_is_committed,
    forgets_skips,
    answers_each_rank_by_itself,
)


@pytest.mark.parametrize("judge", BROKEN, ids=lambda judge: judge.__name__)
def test_a_control_that_breaks_a_checkpoint_rule_is_caught(judge: Any) -> None:
    assert any(simulate_saves(a_saving_scenario(seed), seed, judge=judge) for seed in range(60))
