"""What can happen, in the past tense, with time and source. An event is a fact, never an opinion.

`at` is an Instant on control's clock once the event is in the log (an agent sends the event's age, and control
subtracts), so that clocks of different machines need not agree.
"""

import msgspec

from perdure.vocab.checkpoint import CheckpointId, Level
from perdure.vocab.generation import Address, Assignment
from perdure.vocab.ids import EventId, GenerationNumber, Incarnation, NodeId, Rank
from perdure.vocab.job import JobSpec
from perdure.vocab.node import Node
from perdure.vocab.units import Bytes, Instant, Seconds


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Something that happened. `id` names its source and its number there, so that it is counted once."""

    id: EventId
    at: Instant


# --- from control and the launcher -----------------------------------------------------------------------------------


class JobSubmitted(Event, frozen=True, kw_only=True, tag="job_submitted"):
    """The first record of every log."""

    spec: JobSpec


class ControlStarted(Event, frozen=True, kw_only=True, tag="control_started"):
    """Control began, or began again and replayed its log."""

    incarnation: Incarnation
    version: str


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    """A user, or a scheduler, asked the job to save and end."""

    by: str
    """Who asked, as in `SIGTERM to the launcher on host-a`."""
    signal: int
    grace: Seconds
    """0: at once."""


# --- a node's comings and goings (control writes them) ---------------------------------------------------------------


class NodeJoined(Event, frozen=True, kw_only=True, tag="node_joined"):
    node: Node


class NodeDisconnected(Event, frozen=True, kw_only=True, tag="node_disconnected"):
    """Its connection was closed; nothing is concluded from it before the grace is over."""

    node: NodeId
    incarnation: Incarnation


class NodeLost(Event, frozen=True, kw_only=True, tag="node_lost"):
    """A node that was not told to go is gone."""

    node: NodeId
    incarnation: Incarnation
    silent_for: Seconds
    """Since it was last heard, on control's clock."""
    connection_closed: bool
    """Its connection was closed and not renewed (the process is gone), as opposed to silence (perhaps the network)."""


class NodeLeft(Event, frozen=True, kw_only=True, tag="node_left"):
    """A node said good-bye."""

    node: NodeId
    incarnation: Incarnation
    reason: str = ""


class NodeRefused(Event, frozen=True, kw_only=True, tag="node_refused"):
    node: NodeId
    host: str
    reason: str


class TimePassed(Event, frozen=True, kw_only=True, tag="time_passed"):
    """A deadline of control's own was reached. Recorded so that a replay decides alike."""

    deadline: str
    """Which one: join, hold, grow, acks."""


# --- from an agent ---------------------------------------------------------------------------------------------------


class NodeReady(Event, frozen=True, kw_only=True, tag="node_ready"):
    """Its fork server has done the imports (or there is none): workers can start in milliseconds."""

    node: NodeId
    warm: bool
    """False: workers are spawned, because the fork server was refused or is unsafe; `note` says why."""
    seconds: Seconds
    note: str = ""


class NodeGathered(Event, frozen=True, kw_only=True, tag="node_gathered"):
    """No worker of an earlier generation is alive on the node; the store listens if the node hosts it."""

    node: NodeId
    generation: GenerationNumber
    store: Address | None
    last_step: int | None
    """Highest step that its workers of the earlier generation had finished, if they told."""


class WorkersStarted(Event, frozen=True, kw_only=True, tag="workers_started"):
    node: NodeId
    generation: GenerationNumber
    pids: tuple[int, ...]
    """In local-rank order."""
    forked: bool


class StepsBegun(Event, frozen=True, kw_only=True, tag="steps_begun"):
    """All ranks of the node have finished their first step of the generation."""

    node: NodeId
    generation: GenerationNumber
    step: int
    """Number of that step; steps count from where the script says it resumed, else from 1."""


class CaughtUp(Event, frozen=True, kw_only=True, tag="caught_up"):
    """All ranks of the node have passed the highest step of the generations before."""

    node: NodeId
    generation: GenerationNumber
    step: int


class SavePassed(Event, frozen=True, kw_only=True, tag="save_passed"):
    """A rank of the node has ended a checkpoint phase, for the first time or once more; a good moment to grow."""

    node: NodeId
    generation: GenerationNumber
    step: int


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    """A Python exception that ended a worker, from its error file."""

    type: str
    message: str
    where: str
    """`file:line` of the innermost frame outside installed packages."""
    traceback: str


class MemoryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Why a SIGKILL is an out-of-memory kill, with the figures."""

    by: str
    """`kernel` or `cgroup`."""
    limit: Bytes | None
    usage: Bytes | None
    """Of the cgroup or the machine, at the kill."""
    rss: Bytes | None
    """Of the worker, last seen."""
    line: str
    """Kernel line or counter that tells."""


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker_exited"):
    """A worker ended by itself or by someone else; those that the agent ends on order are not reported."""

    node: NodeId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    step: int | None
    error: WorkerError | None = None
    memory: MemoryEvidence | None = None
    log_tail: str = ""
    """Last lines of its stderr, where they are kept."""


class WorkerStopped(Event, frozen=True, kw_only=True, tag="worker_stopped"):
    """A worker has been in state T (SIGSTOP) for `stopped_for`."""

    node: NodeId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    pid: int
    stopped_for: Seconds
    step: int | None


class WorkerStalled(Event, frozen=True, kw_only=True, tag="worker_stalled"):
    """A worker has made no progress for longer than its limit, and shows no evidence of work."""

    node: NodeId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    pid: int
    phase: str
    step: int | None
    silent_for: Seconds
    limit: Seconds
    limit_source: str
    """Which rule gave the limit, as in `learned: 5 x p99 of 0.41 s`."""
    process_state: str
    """Of /proc: S, D, R …"""


class WorkerUnkillable(Event, frozen=True, kw_only=True, tag="worker_unkillable"):
    """A worker outlived SIGKILL (state D): its node is unfit until someone has looked."""

    node: NodeId
    generation: GenerationNumber
    rank: Rank
    pid: int
    waited: Seconds
    process_state: str


class StoreLost(Event, frozen=True, kw_only=True, tag="store_lost"):
    """The store process of a running generation ended."""

    node: NodeId
    generation: GenerationNumber
    exit_code: int | None
    signal: int | None


class ForkServerLost(Event, frozen=True, kw_only=True, tag="fork_server_lost"):
    """The next workers are spawned until a new fork server is warm. Harms nobody that runs."""

    node: NodeId
    exit_code: int | None
    signal: int | None


class StartFailed(Event, frozen=True, kw_only=True, tag="start_failed"):
    """A worker or the store could not be started at all: no such program, no permission, no memory."""

    node: NodeId
    generation: GenerationNumber
    reason: str


class DrainAcked(Event, frozen=True, kw_only=True, tag="drain_acked"):
    """The agent has read an order to drain, and says where its workers stand."""

    node: NodeId
    generation: GenerationNumber
    tells: bool
    """All its workers tell their steps, so that they can be stopped at one."""
    last_step: int
    """Highest finished step of its workers, -1: none."""
    step_seconds: float | None
    """Median of the last steps."""


class NodeFenced(Event, frozen=True, kw_only=True, tag="node_fenced"):
    """The agent reached neither control nor a majority of its peers for a lease and ended its workers."""

    node: NodeId
    generation: GenerationNumber
    silent_for: Seconds


# --- the generation (control writes them) ----------------------------------------------------------------------------


class GenerationBegan(Event, frozen=True, kw_only=True, tag="generation_began"):
    assignment: Assignment
    because: str


class GenerationRunning(Event, frozen=True, kw_only=True, tag="generation_running"):
    """Every member has started its workers."""

    generation: GenerationNumber


class EndDecided(Event, frozen=True, kw_only=True, tag="end_decided"):
    """The job is over but for its newest checkpoint, which is brought from memory to storage until `until`."""

    exit_code: int
    reason: str
    until: Instant


class JobEnded(Event, frozen=True, kw_only=True, tag="job_ended"):
    """The job is over; only its nodes' good-byes follow in a log."""

    exit_code: int
    reason: str


# --- checkpoints (control writes them, of what the memory servers report) ---------------------------------------------


class CheckpointCommitted(Event, frozen=True, kw_only=True, tag="checkpoint_committed"):
    """Every rank's part exists at `level`: from now on this step is not lost, up to what the level survives."""

    checkpoint: CheckpointId
    level: Level
    nbytes: Bytes
    """Of all ranks."""
    store: str = ""
    """Address of the storage to which checkpoints of this job go; empty: they stay in memory."""
    stall: Seconds | None = None
    """How long the copy has kept the training, on the slowest rank."""
    seconds: Seconds | None = None
    """From the first part that was there to the last one, hashed and where asked for replicated."""


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag="checkpoint_skipped"):
    """Due, and never to be complete: some rank had no free slot, so all skip it."""

    checkpoint: CheckpointId
    nodes: tuple[NodeId, ...]


class CheckpointStored(Event, frozen=True, kw_only=True, tag="checkpoint_stored"):
    """It is in storage, committed there."""

    checkpoint: CheckpointId
    path: str
    nbytes: Bytes
    seconds: Seconds | None = None
    """From the order to write it."""


class CheckpointChosen(Event, frozen=True, kw_only=True, tag="checkpoint_chosen"):
    """What all ranks of `generation` restore; None: nothing has ever been saved, they begin at step 0."""

    generation: GenerationNumber
    checkpoint: CheckpointId | None
    from_memory: int
    """Ranks whose slot is read from some node's memory; the others' from storage, or as `rebuilt` says."""
    rebuilt: tuple[int, ...] = ()
    """Ranks whose slots are lost, and made again from parity."""
    missing: tuple[int, ...] = ()
    """Ranks whose own state (random numbers, data position) is lost."""


class CheckpointRestored(Event, frozen=True, kw_only=True, tag="checkpoint_restored"):
    """All ranks of `generation` have it in their tensors."""

    generation: GenerationNumber
    checkpoint: CheckpointId
    seconds: Seconds
    """Of the slowest rank."""
    sources: dict[str, dict[int, Bytes]]
    """Bytes by where they came from (own memory, a peer's, storage), and there by rank."""


class CheckpointSetAside(Event, frozen=True, kw_only=True, tag="checkpoint_set_aside"):
    """It was restored and is bad, as the script says: it is not restored again, nor is what was saved after it."""

    checkpoint: CheckpointId
    reason: str


class CheckpointTrouble(Event, frozen=True, kw_only=True, tag="checkpoint_trouble"):
    """A node cannot do its part: no room, no permission, a store that refuses. Training goes on."""

    node: NodeId
    what: str


AnyEvent = (
    JobSubmitted
    | ControlStarted
    | StopRequested
    | NodeJoined
    | NodeDisconnected
    | NodeLost
    | NodeLeft
    | NodeRefused
    | TimePassed
    | NodeReady
    | NodeGathered
    | WorkersStarted
    | StepsBegun
    | CaughtUp
    | SavePassed
    | WorkerExited
    | WorkerStopped
    | WorkerStalled
    | WorkerUnkillable
    | StoreLost
    | ForkServerLost
    | StartFailed
    | DrainAcked
    | NodeFenced
    | GenerationBegan
    | GenerationRunning
    | CheckpointCommitted
    | CheckpointSkipped
    | CheckpointStored
    | CheckpointChosen
    | CheckpointRestored
    | CheckpointSetAside
    | CheckpointTrouble
    | EndDecided
    | JobEnded
)
"""Every event there is; decoding and `assert_never` go over it."""
