"""What a memory server is started with: JSON, read from the descriptor that `--config-fd` names; nothing else."""

import signal

import msgspec

from perdure.vocab.generation import Address
from perdure.vocab.ids import Incarnation, JobId, NodeId
from perdure.vocab.units import Seconds


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One node of one job."""

    job: JobId
    attempt: int
    """`CheckpointId.attempt`: start of the job's control, in whole seconds since the epoch."""
    node: NodeId
    domain: str = ""
    """Failure domain; empty: the host's name."""
    folder: str = ""
    """Of the slots; empty: /dev/shm/perdure-UID/JOB/NODE."""
    socket: str = ""
    """Path of the trainers' door (at most 107 bytes), made here; empty: `door` in the folder."""
    socket_fd: int | None = None
    """A bound and listening SEQPACKET socket instead: trainers may connect before the server has started."""
    control: Address
    token: str
    tls_ca: str | None = None
    """Certificate (file) that control must show; None: plain HTTP."""
    address: str = "127.0.0.1"
    """At which the memory servers of other nodes reach this one; it listens there, on any free port."""
    end_signal: int = signal.SIGTERM
    """By which whoever started us ends us. Where it is another one, SIGTERM and SIGINT mean nothing."""
    linger: Seconds | None = None
    """None: dies with its parent. Else a detached one, which ends when no trainer has been here for so long."""
    owners: tuple[Incarnation, ...] = ()
    """While one of them lives, this node's slots are kept, also when the server is dead; by default its parent."""
    grace: Seconds = 20.0
    """After SIGTERM: how long what is being sealed or drained may still take."""
    hash_threads: int = 2
    drain_bytes_per_second: float | None = None
    """Pace of what goes to storage; None: as fast as the least share of processor and disk allows."""
    replica_bytes_per_second: float | None = None
    """Pace of what goes to all partners together; None: as fast as the network takes it."""
    nice: int = 10
    """Ten leaves a tenth of a core on a busy machine, so that checkpoints are still committed; 19 would starve them."""
