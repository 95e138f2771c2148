"""What is simulated: job, cluster, network, script and faults, as values; two ways to make one. No time passes here."""

import random

import msgspec

from perdure.sim.failures import FaultKind, PlannedFault, draw, node_rates
from perdure.vocab.ids import JobId
from perdure.vocab.job import JobSpec, RecoveryRules
from perdure.vocab.units import Seconds

Span = tuple[Seconds, Seconds]
"""Least and greatest; a value between is drawn each time."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    delay: Span = (0.0002, 0.002)
    loss: float = 0.0
    """Share of messages that are lost; who sent them sends them again when no answer comes."""
    twice: float = 0.0
    """Share of messages that arrive a second time, later."""
    late: float = 0.0
    """Share of messages that take up to two seconds more."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take."""

    fork_server: Span = (2.0, 6.0)
    fork: Span = (0.02, 0.1)
    script: Span = (0.05, 0.5)
    """From a worker's start until it waits for the others."""
    store: Span = (0.01, 0.05)
    launcher: Span = (0.3, 1.5)
    """From an agent's end to its next life."""
    first_step_extra: Seconds = 1.0


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program, as far as a launcher sees it."""

    steps: int = 1000
    step_seconds: Seconds = 1.0
    save_every: int = 50
    tells: bool = True
    all_save: bool = False
    """Every rank ends a checkpoint phase, not only rank 0."""
    fails_at: int | None = None
    """A step at which rank 0 raises, each time."""
    heeds_sigterm: bool = True


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation, apart from its dice."""

    spec: JobSpec
    nodes: int
    """Machines in all, spares included."""
    standbys: int = 0
    """The last of them start as spares."""
    script: Script = Script()
    network: Network = Network()
    pace: Pace = Pace()
    faults: tuple[PlannedFault, ...] = ()
    check_each_step: bool = True
    """Replay equality after every step of control; costs time in proportion to the log's length."""

    @property
    def patience(self) -> Seconds:
        """By when the job must have ended: every fault costs at most a stall limit and the steps since a save."""
        script, spec = self.script, self.spec
        last = max((fault.at + min(fault.seconds, 86400.0) for fault in self.faults), default=0.0)
        each = spec.stalls.untold + script.save_every * script.step_seconds + 120.0
        work = script.steps * script.step_seconds
        waits = spec.rules.hold + spec.rules.join_timeout + spec.stalls.first_step
        return last + work + waits + each * (3 + len(self.faults) + spec.rules.max_restarts)


def a_cluster(nodes: int, spares: int, days: float, mtbf_hours: float, seed: int) -> Scenario:
    """A long job on a large cluster, with the mix of faults that large clusters see."""
    rng = random.Random(f"cluster {seed}")
    duration = days * 86400.0
    spec = JobSpec(
        id=JobId(f"sim-{seed}"),
        command=("train.py",),
        min_nodes=max(1, nodes - max(1, nodes // 8)),
        max_nodes=nodes,
        workers_per_node=1,
        spares=spares,
        rules=RecoveryRules(hold=86400.0),
    )
    step = 10.0
    return Scenario(
        spec=spec,
        nodes=nodes + spares,
        standbys=spares,
        script=Script(steps=max(1, int(duration / step)), step_seconds=step, save_every=180),
        pace=Pace(fork_server=(20.0, 60.0), script=(5.0, 20.0), first_step_extra=30.0),
        faults=draw(node_rates(mtbf_hours), nodes + spares, duration, rng),
        check_each_step=False,
    )


def a_small_one(seed: int) -> Scenario:
    """A short job on a few nodes where everything that can go wrong does: one of these for each seed of the tests."""
    rng = random.Random(f"small {seed}")
    most = rng.randint(2, 6)
    spares = rng.randint(0, 2)
    least = rng.randint(max(1, most - 2), most)
    script = Script(
        steps=rng.randint(100, 400),
        step_seconds=rng.choice((0.1, 0.5, 1.0)),
        save_every=rng.choice((10, 40, 1000)),
        tells=rng.random() < 0.7,
        all_save=rng.random() < 0.5,
        fails_at=rng.randint(1, 99) if rng.random() < 0.05 else None,
        heeds_sigterm=rng.random() < 0.7,
    )
    hostile = rng.random() < 0.7
    spec = JobSpec(
        id=JobId(f"sim-{seed}"),
        command=("train.py",),
        min_nodes=least,
        max_nodes=most,
        workers_per_node=rng.randint(1, 2) if most > 2 else 2,
        spares=spares,
        rules=RecoveryRules(
            max_restarts=rng.choice((2, 6, 20)),
            restart_window=rng.choice((60.0, 3600.0)),
            hold=rng.choice((20.0, 900.0)),
        ),
    )
    network = Network(loss=rng.choice((0.0, 0.05, 0.2)), twice=rng.choice((0.0, 0.1)), late=rng.choice((0.0, 0.05)))
    nodes = most + spares
    length = script.steps * script.step_seconds + 10.0
    faults = [_a_fault(nodes, length, rng) for _ in range(rng.randint(1, 12))]
    return Scenario(
        spec=spec,
        nodes=nodes,
        standbys=spares,
        script=script,
        network=network if hostile else Network(),
        pace=Pace(fork_server=rng.choice(((0.5, 2.0), (1.0, 20.0)))),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


_RARE = {FaultKind.ASK_TO_STOP: 0.15, FaultKind.OUT_OF_MEMORY: 0.3}


def _a_fault(nodes: int, length: Seconds, rng: random.Random) -> PlannedFault:
    kinds = list(FaultKind)
    kind = rng.choices(kinds, [_RARE.get(k, 1.0) for k in kinds])[0]
    match kind:
        case FaultKind.LOSE_NODE | FaultKind.STOP_AGENT:
            seconds = rng.choice((rng.uniform(2.0, 30.0), rng.uniform(30.0, 600.0), 1e9))
        case FaultKind.BLOCK_WORKER | FaultKind.STOP_WORKER:
            seconds = rng.choice((rng.uniform(0.1, 3.0), rng.uniform(5.0, 600.0)))
        case FaultKind.ASK_TO_STOP:
            seconds = rng.choice((0.0, 5.0, 30.0))
        case _:
            seconds = rng.choice((rng.uniform(0.2, 4.0), rng.uniform(4.0, 15.0), rng.uniform(15.0, 60.0)))
    chosen = tuple(sorted(rng.sample(range(nodes), rng.randint(1, max(1, nodes // 2)))))
    return PlannedFault(at=rng.uniform(0.0, length), kind=kind, pick=rng.random(), nodes=chosen, seconds=seconds)
