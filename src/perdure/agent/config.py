"""What an agent is started with. The launcher writes it, the agent reads it from a file descriptor; nothing else."""

import signal

import msgspec

from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId, NodeId
from perdure.vocab.units import Seconds
from perdure.wire.messages import Launch

LEAVE_SIGNAL = signal.SIGRTMIN + 3
"""From our launcher to an agent: this node leaves the job; from an agent to its memory server: end. Not SIGTERM:
schedulers send that to every process of a job at once, and then the launcher alone says what becomes of it."""
STAY_SIGNAL = signal.SIGRTMIN + 4
"""From our launcher to an agent: the whole job is being stopped, so a SIGTERM that you were sent too means nothing."""


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers' stdout and stderr go. Std values are torchrun's bit set: 0 none, 1 out, 2 err, 3 both."""

    log_dir: str
    """Base; files lie in torchrun's layout: LOG_DIR/RUN_ID_XXXX/attempt_N/LOCAL_RANK/stdout.log and so on."""
    redirects: dict[int, int] | int = 0
    """For all local ranks, or by local rank (absent: 0)."""
    tee: dict[int, int] | int = 0
    ranks_filter: tuple[int, ...] | None = None
    """Local ranks whose output is shown; None: all."""
    stdout_filters: tuple[str, ...] = ()
    """--duplicate-stdout-filters: lines containing one of these are also written to filtered_stdout.log."""
    stderr_filters: tuple[str, ...] = ()
    prefix: str = "[${role_name}${rank}]:"
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One node of one job."""

    job: JobId
    node: NodeId
    control: Address
    tls_ca: str | None = None
    """Certificate (file) that control must show; None: plain HTTP."""
    address: str
    """At which other nodes reach this one."""
    domain: str = ""
    """Failure domain (rack, switch, power feed); empty: the host."""
    memory: str = ""
    """Folder of this node's checkpoints in memory; empty: the memory server's default."""
    slots: int
    order: int = 0
    standby: bool = False
    world: str
    role: str = "default"
    launch: Launch
    python: str
    """Interpreter for fork server and spawned workers."""
    fork_server: bool = True
    preload: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """Set on top of the agent's own for fork server, store and workers (OMP_NUM_THREADS …)."""
    run_id: str
    """TORCHELASTIC_RUN_ID."""
    max_restarts: int
    master_addr: str | None = None
    master_port: int = 0
    """Fixed port for the store, where the user asked for one; 0: any free one."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    output: OutputConfig
    join_timeout: Seconds = 600.0
    """How long control may be out of reach before it was reached once."""
    poll_seconds: Seconds = 0.05
    """How often heartbeat page and process states are read."""
