"""One made-up job that saves checkpoints, and how much goes wrong with it. It does not know what follows."""

import random

import msgspec

from perdure.vocab.units import Seconds
from perdure.wire.memory import Policy


class SavingScenario(msgspec.Struct, frozen=True, kw_only=True):
    """One job and its bad luck."""

    nodes: int
    ranks_per_node: int
    policy: Policy
    has_store: bool
    slots: int
    step_seconds: Seconds
    duration: Seconds = 300.0
    mean_faults: Seconds = 25.0
    """Mean time between two faults."""
    goes_back: float = 0.0
    """Share of steps after which the script restores once more."""
    loss: float = 0.1
    """Share of messages that are lost, each way; and of those that come twice."""


def a_parity_scenario(seed: int) -> SavingScenario:
    """As `a_saving_scenario`, with parity groups in the place of replicas."""
    rng = random.Random(f"parity {seed}")
    return SavingScenario(
        nodes=rng.choice([2, 3, 4, 5, 6]),
        ranks_per_node=rng.choice([1, 2]),
        policy=Policy(every=rng.choice([3, 5, 8]), xor=rng.choice([1, 2, 3, 4])),
        has_store=False,
        slots=rng.choice([2, 3]),
        step_seconds=rng.choice([0.5, 2.0, 5.0]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        goes_back=rng.choice([0.0, 0.02, 0.1]),
    )


def a_saving_scenario(seed: int) -> SavingScenario:
    rng = random.Random(f"saving {seed}")
    has_store = rng.random() < 0.3
    every = rng.choice([None, 3, 5, 8])
    nodes = rng.choice([1, 2, 2, 3, 4])
    policy = Policy(
        every=every,
        store_every=rng.choice([None, 10]),
        replicas=min(nodes - 1, rng.choice([0, 1, 1])),
        overhead=0.5 if every is None else 0.01,
    )
    return SavingScenario(
        nodes=nodes,
        ranks_per_node=rng.choice([1, 2]),
        policy=policy,
        has_store=has_store,
        slots=3 if has_store else rng.choice([2, 2, 3]),
        step_seconds=rng.choice([0.5, 2.0, 5.0]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        goes_back=rng.choice([0.0, 0.02, 0.1]),
    )
