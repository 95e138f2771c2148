"""The messages between launcher, control, agent, fork server and store.

Events go up at least once, numbered by the agent, and are acknowledged only when they are in the log. Orders come down
as the whole desired state of a node, with a version: the newest wins, an older one is ignored, a lost one is sent again
by the next. So losing, repeating or delaying a message harms nothing.
"""

from enum import StrEnum

import msgspec

from perdure.ports import LogRecord
from perdure.vocab.event import AnyEvent
from perdure.vocab.generation import Address, Assignment
from perdure.vocab.ids import GenerationNumber, Incarnation, JobId, NodeId
from perdure.vocab.job import RecoveryRules, StallRules
from perdure.vocab.node import Node
from perdure.vocab.units import Seconds

# --- agent → control -------------------------------------------------------------------------------------------------


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """An event on its way up. `event.at` is the agent's clock and is replaced by control's now minus `age`."""

    seq: int
    """1, 2, 3 … of one incarnation of the agent."""
    age: Seconds
    event: AnyEvent


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of its workers with every report. Not logged."""

    generation: GenerationNumber = GenerationNumber(0)
    steps: tuple[int, ...] = ()
    """Last finished step of each worker in local-rank order, -1: none yet."""
    step_seconds: float | None = None
    """Median of the last steps of the slowest worker."""
    tells: bool = False
    """The script tells its steps (`run.steps`), so that it can be stopped at a step."""


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/join: answered by `Reply`. The same incarnation may join again: that is how it reconnects."""

    node: Node


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/report: answered by `Reply`. Sent at once for an event, else every fifth of the lease."""

    node: NodeId
    incarnation: Incarnation
    observed: tuple[Observed, ...] = ()
    beat: Beat = Beat()


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/leave: the agent ends and need not be missed."""

    node: NodeId
    incarnation: Incarnation
    reason: str = ""


# --- control → agent -------------------------------------------------------------------------------------------------


class Duty(StrEnum):
    """What a node is to do now."""

    WAIT = "wait"
    """No part in the current generation: a spare, or too early."""
    GATHER = "gather"
    """End every worker of an earlier generation; start the store if this node hosts it; then say NodeGathered.

    A node that `assignment` leaves out hears it too, if it may still run workers: nobody starts before they have ended.
    """
    RUN = "run"
    """Run this node's ranks of `assignment`."""
    STOP = "stop"
    """End everything and exit with `exit_code`."""


class Peer(msgspec.Struct, frozen=True):
    """Another member's own endpoint, by which nodes tell a dead control from a cut network."""

    node: NodeId
    address: Address


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Save and end."""

    signal: int
    grace: Seconds
    """Left when this was sent."""
    stop_after: int | None
    """Step after which scripts that tell their steps end; None with forward False: answer with DrainAcked."""
    forward: bool
    """Send `signal` to the workers themselves: some do not tell their steps."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The whole desired state of one node. `GET /v1/orders?node=…` streams them, one JSON line each."""

    version: int
    job: JobId
    duty: Duty
    attempt: int = 0
    """Start of the job, in whole seconds since the epoch; see `CheckpointId`."""
    generation: GenerationNumber = GenerationNumber(0)
    assignment: Assignment | None = None
    store: Address | None = None
    """Set with RUN."""
    restarts: int = 0
    """How often the workers have been started anew (TORCHELASTIC_RESTART_COUNT)."""
    redo_until: int | None = None
    """Highest step that an earlier generation had finished."""
    drain: DrainOrder | None = None
    peers: tuple[Peer, ...] = ()
    spare: bool = False
    exit_code: int = 0
    at_once: bool = False
    """With STOP: no grace, the user has asked twice."""
    rules: RecoveryRules = RecoveryRules()
    stalls: StallRules = StallRules()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to Join and Report."""

    acked: int = 0
    """Observed with a number up to this are in the log."""
    orders: Orders | None = None
    """In answer to Join: the present ones."""
    pushed: int = 0
    """Version of the orders that the stream last carried to this node; if they have not come, the stream is dead."""
    fenced: bool = False
    """This incarnation was declared lost: end the workers and join anew."""


class Problem(msgspec.Struct, frozen=True):
    """Body of every answer that is not 2xx."""

    error: str


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/ping of an agent or of control."""

    node: NodeId | None
    job: JobId
    generation: GenerationNumber
    members: tuple[NodeId, ...] = ()
    """Of the newest generation that it has heard of: whoever is not in it has been replaced."""


# --- launcher and readers → control ----------------------------------------------------------------------------------


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/stop: answered by `Reply`."""

    by: str
    signal: int
    grace: Seconds


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/records?after=N&wait=S: the log from N on; waits up to S seconds for at least one record."""

    last: int
    """Number of the last record here; ask for the rest with after=last."""
    records: tuple[LogRecord, ...]
    now: float
    """Control's clock."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/progress: for the live line."""

    step: int | None
    step_seconds: float | None
    nodes: int
    spares: int
    generation: GenerationNumber
    status: str
    now: float


# --- agent → fork server and back (a Unix SEQPACKET socket; file descriptors by SCM_RIGHTS) --------------------------


class Entry(StrEnum):
    """How the user's program is entered."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"
    """--no-python: executed as it is."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program."""

    entry: Entry
    target: str
    """Path, module name, or program."""
    args: tuple[str, ...] = ()


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Fork one worker. The packet carries three descriptors: stdout, stderr, heartbeat page."""

    id: int
    launch: Launch
    env: dict[str, str]
    """Set on top of the fork server's own."""
    slot: int
    """Index in the heartbeat page."""
    generation: GenerationNumber
    cpus: tuple[int, ...] = ()
    """CPU affinity; empty: as it is."""


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    """Fork the store of a generation, listening on `host` at a free port (or on `port`, if not 0)."""

    id: int
    host: str
    port: int = 0


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The process runs, as a child of the agent; for a store: it listens on `port`."""

    id: int
    pid: int = 0
    port: int = 0
    error: str = ""


class ForkServerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First packet from a fork server: imports are done."""

    warm: bool
    """False: forking is unsafe here, spawn instead; `note` says why."""
    seconds: Seconds
    imported: tuple[str, ...]
    note: str = ""


class ForkServerParked(msgspec.Struct, frozen=True, kw_only=True, tag="parked"):
    """Processes that have been forked ahead and wait for a request: children of the agent that it must not sweep."""

    pids: tuple[int, ...]


ForkServerIn = ForkRequest | StoreRequest
ForkServerOut = ForkReply | ForkServerReady | ForkServerParked
