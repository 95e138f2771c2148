"""What goes wrong in a simulation, and when: planned by hand, or drawn from rates. It does not know what follows."""

import random
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from perdure.vocab.units import Instant, Seconds


class FaultKind(StrEnum):
    KILL_WORKER = "kill worker"
    """SIGKILL from outside."""
    CRASH_WORKER = "crash worker"
    """A Python exception that does not come back."""
    OUT_OF_MEMORY = "out of memory"
    STOP_WORKER = "stop worker"
    """SIGSTOP; SIGCONT after `seconds`."""
    STALL_WORKER = "stall worker"
    """It makes no progress any more, and can be killed."""
    BLOCK_WORKER = "block worker"
    """State D for `seconds`: it cannot be killed meanwhile."""
    KILL_STORE = "kill store"
    KILL_AGENT = "kill agent"
    """Its workers die with it, its connections close, its launcher starts it anew."""
    STOP_AGENT = "stop agent"
    """SIGTERM: it ends its workers and says good-bye; it is started again after `seconds`."""
    LOSE_NODE = "lose node"
    """Power off, without a word; it boots after `seconds`."""
    CUT_OFF = "cut off"
    """Nothing passes between `nodes` and all others, control included, for `seconds`."""
    CUT_CONTROL = "cut from control"
    """Nothing passes between `nodes` and control for `seconds`."""
    CUT_PEERS = "cut from peers"
    """Nothing passes between `nodes` and the other nodes for `seconds`; all reach control."""
    RESET = "reset"
    """The node's stream of orders breaks; it connects again."""
    CRASH_CONTROL = "crash control"
    """It is started again after `seconds`."""
    ASK_TO_STOP = "ask to stop"
    """A user's Ctrl-C, with `seconds` of grace."""


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong."""

    at: Seconds
    """From the beginning of the simulation."""
    kind: FaultKind
    pick: float = 0.0
    """0 … 1: which of the workers or nodes that there are then."""
    nodes: tuple[int, ...] = ()
    """Indices, for cuts; else the node that it happens on, where it must be a certain one."""
    seconds: Seconds = 0.0
    """How long it lasts."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How often each kind of fault happens, and for how long."""

    mean_hours: Mapping[FaultKind, float]
    """Mean time between two on one node (CRASH_CONTROL: on control), in hours."""
    repair: tuple[Seconds, Seconds] = (600.0, 14400.0)
    """Least and greatest time until a lost node is back."""
    pause: tuple[Seconds, Seconds] = (1.0, 120.0)
    """The same for all that ends by itself: cuts, blocked and stopped workers, control."""


def node_rates(mean_hours: float) -> Rates:
    """Rates for a mean time of `mean_hours` between interruptions of one node.

    Shares: of 419 unexpected interruptions in 54 days of Llama 3 405B on 16 384 GPUs (paper of 2024-07, table 5) most
    were faulty GPUs and memories, then software, then network; grouped here by what a launcher sees of them.
    """
    shares = {
        FaultKind.LOSE_NODE: 0.40,
        FaultKind.KILL_AGENT: 0.10,
        FaultKind.CRASH_WORKER: 0.20,
        FaultKind.KILL_WORKER: 0.10,
        FaultKind.STALL_WORKER: 0.06,
        FaultKind.STOP_WORKER: 0.02,
        FaultKind.BLOCK_WORKER: 0.02,
        FaultKind.CUT_OFF: 0.08,
        FaultKind.RESET: 0.02,
    }
    return Rates(mean_hours={kind: mean_hours / share for kind, share in shares.items()})


def draw(rates: Rates, nodes: int, duration: Seconds, rng: random.Random) -> tuple[PlannedFault, ...]:
    """The faults of `duration` seconds on `nodes` nodes, in order of time: a Poisson process for each kind."""
    found = []
    for kind, hours in rates.mean_hours.items():
        mean = hours * 3600.0 / (1 if kind is FaultKind.CRASH_CONTROL else nodes)
        at: Instant = rng.expovariate(1.0 / mean)
        while at < duration:
            low, high = rates.repair if kind is FaultKind.LOSE_NODE else rates.pause
            which = (rng.randrange(nodes),)
            found.append(PlannedFault(at=at, kind=kind, pick=rng.random(), nodes=which, seconds=rng.uniform(low, high)))
            at += rng.expovariate(1.0 / mean)
    return tuple(sorted(found, key=lambda fault: fault.at))
