"""When silence is a stall: the limit for what a worker says it is doing. Knows neither /proc nor the heartbeat page."""

import math
from collections.abc import Sequence

import msgspec

from perdure.vocab.job import StallRules
from perdure.vocab.units import Seconds

BELOW_COLLECTIVE = 0.9
"""A learned limit stays below the collective timeout by this factor, so that the ladder acts first."""
PHASE_FLOOR: Seconds = 60.0
"""Least learned limit of a checkpoint or an evaluation: storage is uneven."""
LEARN_PHASE_AFTER = 3
WORK_FACTOR = 5.0
"""With evidence of work (CPU, I/O, faults) a learned limit is stretched: better wait for a slow page-in than kill."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker may make no progress."""

    quiet: Seconds
    """Without evidence of work."""
    busy: Seconds | None
    """With evidence of work; None: work is waited for without end."""
    source: str


def stall_limit(
    phase: str, *, tells: bool, steps: Sequence[Seconds], phases: Sequence[Seconds], rules: StallRules
) -> Limit | None:
    """The limit in `phase` (start_up, first_step, training, checkpoint, evaluation, other, done); None: no limit.

    `steps` are the last step times and `phases` the last lengths of this phase, in seconds.
    """
    match phase:
        case "done":
            return None
        case "start_up":
            return Limit(quiet=rules.start_up, busy=None, source="start-up")
        case "first_step":
            return Limit(quiet=rules.first_step, busy=None, source="first step, which may compile")
        case "training" | "checkpoint" | "evaluation" | "other" if rules.fixed is not None:
            return Limit(quiet=rules.fixed, busy=rules.fixed, source="--stall-limit")
        case "training":
            return _training_limit(tells, steps, rules)
        case "checkpoint" | "evaluation" | "other":
            return _phase_limit(phase, phases, rules)
        case _:
            raise ValueError(f"no such phase: {phase}")


def shortest_limit(rules: StallRules) -> Seconds:
    """No limit that `stall_limit` can give is shorter."""
    limits = [rules.floor, BELOW_COLLECTIVE * rules.collective_timeout, rules.start_up, rules.first_step]
    limits += [rules.untold, rules.checkpoint, rules.evaluation, *(() if rules.fixed is None else (rules.fixed,))]
    return min(limits)


def _training_limit(tells: bool, steps: Sequence[Seconds], rules: StallRules) -> Limit:
    if not tells:
        return Limit(quiet=rules.untold, busy=None, source="the script tells only its optimizer steps")
    if len(steps) < rules.learn_after:
        return Limit(quiet=rules.untold, busy=None, source=f"not learned before {rules.learn_after} steps")
    p99 = percentile(steps, 0.99)
    ceiling = BELOW_COLLECTIVE * rules.collective_timeout
    learned = min(max(rules.floor, rules.factor * p99), ceiling)
    return Limit(
        quiet=learned,
        busy=min(learned * WORK_FACTOR, ceiling),
        source=f"learned: {rules.factor:g} x p99 of {p99:.3g} s, at least {rules.floor:g} s",
    )


def _phase_limit(phase: str, lengths: Sequence[Seconds], rules: StallRules) -> Limit:
    given = {"checkpoint": rules.checkpoint}.get(phase, rules.evaluation)
    if len(lengths) < LEARN_PHASE_AFTER:
        return Limit(quiet=given, busy=None, source=f"{phase}, not learned yet")
    longest = max(lengths)
    return Limit(
        quiet=min(max(PHASE_FLOOR, rules.factor * longest), given),
        busy=None,
        source=f"learned: {rules.factor:g} x the longest {phase} of {longest:.3g} s",
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
