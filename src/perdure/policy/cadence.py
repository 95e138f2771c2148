"""How often to save, per tier, from what a checkpoint costs and how often it is needed. Pure arithmetic.

Knows seconds, rates and steps; does not know ranks, slots or which checkpoints exist.
"""

import math

import msgspec

from perdure.vocab.checkpoint import Level
from perdure.vocab.units import Seconds

SHORT_COST = 1 / 20
"""Of the interval: with a greater cost Young's formula is too rough, and Daly's is taken (design, section 9)."""
LONGEST_IN_MEMORY: Seconds = 1800.0
LONGEST_IN_STORAGE: Seconds = 6 * 3600.0
"""However rare failures are: the estimate rests on little, and a checkpoint an hour costs next to nothing."""
CHANGE = 2
"""A cadence changes by this factor at most: one odd measurement must not throw it about."""
SECONDS_PER_HOUR = 3600.0
PROCESS_RATE = 1 / (50_000 * SECONDS_PER_HOUR)
"""Failures per second and rank of a process alone, before the job has a history.

419 interruptions of 16 384 GPUs in 54 days (Llama 3, 2024-07, table 5) are one in 50 000 GPU-hours."""
NODE_SHARE, DOMAIN_SHARE = 1 / 5, 1 / 50
"""Of that rate: failures that take a node, and that take a failure domain (design, section 9)."""
PRIOR_WEIGHT = 0.05
"""The prior counts as this many failures, in the time that they take: little, since a job that fails every hour must
not be told for weeks that jobs of its size fail once a year."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of a whole job, per second, by the most that one of them takes. Also used for counts of them."""

    process: float = 0.0
    node: float = 0.0
    domain: float = 0.0

    def beyond(self, level: Level) -> float:
        """Failures per second after which a copy that is safe at `level` and no safer is lost."""
        match level:
            case Level.SEALED:
                return self.node + self.domain
            case Level.REPLICATED:
                return self.domain
            case Level.DURABLE:
                return 0.0

    @property
    def any(self) -> float:
        """Failures per second of every kind: each of them makes the job read a checkpoint."""
        return self.process + self.node + self.domain


def failure_rates(ranks: int, seen: Failures, over: Seconds) -> Failures:
    """Rates of a job of `ranks` ranks in which `seen` failures (counts) happened in `over` seconds of training.

    The mean of a gamma distribution whose prior has `PRIOR_WEIGHT` failures in the time that the fleet's rate needs
    for them: a young job has the fleet's rates, an old one its own. But never below what the job has shown by itself,
    less one standard deviation: a small job that fails every minute need not do so for days until it is believed.
    """
    process = PROCESS_RATE * max(ranks, 1)

    def rate(prior: float, count: float) -> float:
        shown = (count - math.sqrt(count)) / over if over > 0.0 else 0.0
        return max((PRIOR_WEIGHT + count) / (PRIOR_WEIGHT / prior + max(over, 0.0)), shown)

    return Failures(
        process=rate(process, seen.process),
        node=rate(process * NODE_SHARE, seen.node),
        domain=rate(process * DOMAIN_SHARE, seen.domain),
    )


def best_interval(cost: Seconds, rate: float) -> Seconds:
    """Seconds of work between two checkpoints of `cost` seconds each that lose least, at `rate` failures per second.

    Young (CACM 17(9), 1974): sqrt(2 C / rate). Where C is more than a twentieth of that: Daly's higher order (FGCS
    22(3), 2006), sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C with M = 1 / rate, and M where C >= 2 M. Infinite
    without failures. Between the two it does not fall while the cost rises.
    """
    if rate <= 0.0:
        return math.inf
    mean = 1 / rate
    young = math.sqrt(2 * cost * mean)
    if cost <= SHORT_COST * young:
        return young
    if cost >= 2 * mean:
        return mean
    x = math.sqrt(cost / (2 * mean))
    daly = young * (1 + x / 3 + x * x / 9) - cost
    return max(daly, 2 * SHORT_COST * mean)  # Young's greatest value, where the two meet


def interval(
    cost: Seconds, rate: float, *, overhead: float, shortest: Seconds = 0.0, longest: Seconds = LONGEST_IN_MEMORY
) -> Seconds:
    """`best_interval`, at most `longest`; but at least `shortest`, and so long that `overhead` is not exceeded.

    `overhead`: the share of all time that checkpoints may take (as in CheckFreq, FAST 2021), above 0 and at most 0.5:
    C / (T + C) <= overhead. `shortest`: the time that one takes until it is committed (or stored), in seconds.
    """
    if not 0.0 < overhead <= 0.5:
        raise ValueError(f"checkpoints may take a share above 0 and up to 0.5 of the time, not {overhead}")
    bound = cost * (1 / overhead - 1)
    return max(min(best_interval(cost, rate), longest), bound, shortest)


def in_steps(seconds: Seconds, step_seconds: Seconds) -> int:
    """Steps that last at least `seconds`, one at the least: rounded up, so that no bound is broken by rounding."""
    if step_seconds <= 0.0:
        return 1
    steps = math.ceil(seconds / step_seconds)
    # Division may fall a hair short of the whole number that it stands for.
    return max(steps if steps * step_seconds >= seconds else steps + 1, 1)


def changed(now: int | None, wanted: int, least: int = 1) -> int:
    """The next number of steps between two checkpoints on the way from `now` to `wanted`: twice or half at most.

    `least`: what the time to commit takes, in steps. It is never gone below, also where that is more than twice.
    """
    if now is None:
        return max(wanted, least)
    slowed = min(max(wanted, -(-now // CHANGE)), now * CHANGE)
    return max(slowed, least, 1)
