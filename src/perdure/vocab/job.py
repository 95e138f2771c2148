"""What the user wants: command, shape and rules. Perdure never changes it."""

import msgspec

from perdure.vocab.ids import JobId
from perdure.vocab.units import Seconds


class RecoveryRules(msgspec.Struct, frozen=True, kw_only=True):
    """How far to go to keep a job alive, and how long to wait on the way."""

    max_restarts: int = 3
    """Restarts that workers may cause in one `restart_window`; node losses do not count."""
    restart_window: Seconds = 3600.0
    hold: Seconds = 1800.0
    """How long to wait for a node when there is no spare and no way to shrink."""
    lease: Seconds = 5.0
    """Silence after which a node is lost; an agent that reaches nobody for as long ends its workers first."""
    reconnect_grace: Seconds = 0.5
    """How long a node may be without its connection once that has been closed."""
    join_timeout: Seconds = 600.0
    """How long to wait for the minimum of nodes at the start (torchrun's rdzv-conf join_timeout)."""
    last_call: Seconds = 5.0
    """How long to wait for more nodes once the minimum is there (torchrun's last_call_timeout)."""
    shutdown_timeout: Seconds = 30.0
    """From a stop signal until what still runs is killed (torchrun's --shutdown-timeout)."""
    flush: Seconds = 60.0
    """When the job ends by itself: how long its newest committed checkpoint may take from memory to storage."""


class StallRules(msgspec.Struct, frozen=True, kw_only=True):
    """When silence is a stall. Source of the defaults: the design for restarts, and peers' limits per phase."""

    start_up: Seconds = 600.0
    """From fork to the first sign of the loop."""
    first_step: Seconds = 1800.0
    """The first step may compile."""
    checkpoint: Seconds = 1800.0
    evaluation: Seconds = 1800.0
    untold: Seconds = 600.0
    """For a script that tells nothing but optimizer steps; needs absence of evidence of work too."""
    floor: Seconds = 2.0
    factor: float = 5.0
    """A learned limit is `max(floor, factor x p99)`."""
    learn_after: int = 10
    """Steps before a limit is learned."""
    stopped_after: Seconds = 0.5
    """A worker in state T for as long is ended."""
    unkillable_after: Seconds = 5.0
    """A worker that outlives SIGKILL for as long makes its node unfit."""
    collective_timeout: Seconds = 600.0
    """What the process groups use; learned limits stay below it."""
    fixed: Seconds | None = None
    """--stall-limit: replaces every limit after the first step, with or without evidence of work."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its user gave it."""

    id: JobId
    command: tuple[str, ...]
    """Script or program with its arguments, for people and for `world`."""
    min_nodes: int
    max_nodes: int
    workers_per_node: int
    spares: int = 0
    role: str = "default"
    rules: RecoveryRules = RecoveryRules()
    stalls: StallRules = StallRules()

    @property
    def world(self) -> str:
        """What every node must have been started with: shape, role and command, as one readable line."""
        shape = f"{self.min_nodes}:{self.max_nodes} nodes x {self.workers_per_node} workers"
        return f"{shape}, role {self.role}, {' '.join(self.command)}"
