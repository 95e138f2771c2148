"""What trainers, memory servers and control tell each other about checkpoints.

A memory server is one process per node beside the agent (`python -m perdure.agent.memory`): it owns the node's slots.

    trainer       ↔ its memory server     Unix SEQPACKET socket, one JSON message per packet; and the `SavePage`
    memory server → control               POST /v1/memory: MemoryReport, answered by MemoryOrders when there is news
    memory server → memory server         GET /v1/slots/…: slots and ranges of them (`agent.memory.transfer`)

Both ways are level-triggered, as orders are (decision 0001): each message is the whole of what its sender knows or
wants, so that a lost, repeated or late one is healed by the next.
"""

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from perdure.vocab.checkpoint import Aside, Cadence, CheckpointId, Chosen, Held, Member, Parity, Shards, Stored
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Incarnation, JobId, NodeId, Rank
from perdure.vocab.units import Bytes, Seconds

# --- trainer → memory server ------------------------------------------------------------------------------------------


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How checkpoints are kept; the same on every rank (a rank with another one is refused)."""

    every: int | None = None
    """Steps between two checkpoints in memory; None: as `policy.cadence` finds."""
    store_every: int | None = None
    """Steps between two checkpoints in storage; None: as `policy.cadence` finds."""
    replicas: int = 0
    xor: int = 0
    """Nodes whose slots share one node's worth of parity in groups of `xor` + 1; 0: none. Not with replicas."""
    keep: int = 3
    """Checkpoints kept in storage."""
    overhead: float = 0.01
    """Share of the time that checkpoints may cost."""
    slots: int = 0
    """Per rank; 0: two, and one more where a store is given."""
    check_steps: int = 10
    """Steps after a restore in which `check` is asked whether it was a good one. Nothing is saved meanwhile."""
    discards: int = 3
    """Checkpoints in a row that may be set aside as bad; then restore() refuses, for the fault may lie elsewhere."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """First packet of a trainer. Answered by Attached or Refused.

    The layout may be long: it is not here but in the packet's one file descriptor (a memory file).
    """

    job: JobId
    attempt: int
    generation: GenerationNumber
    rank: Rank
    world_size: int
    local_world_size: int
    trainer: Incarnation
    layout: str
    """Hash of the layout in the descriptor."""
    shards: str
    tail_room: Bytes
    store: str = ""
    """Address of the storage tier as the user gave it; empty: none."""
    policy: Policy = Policy()
    fresh: bool = False
    """Never restore; what exists is left alone until a newer one is committed."""
    turn: int = 0
    """`CheckpointId.turn` of what it saves now: not 0 where it attaches again."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """The trainer has written a checkpoint into slot `slot`; its header says WRITTEN. No answer."""

    slot: int
    checkpoint: CheckpointId
    stall: Seconds
    """How long the training thread was kept."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """The step was due and this rank had no slot for it. No answer."""

    checkpoint: CheckpointId


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """Which checkpoint do all ranks take? Answered by RestorePlan or Refused, when all have asked."""

    step: int | None = None
    """Exactly this one; None: the newest complete one."""
    number: int = 1
    """1, 2, 3 … of this generation, the same on all ranks. It begins with 2 where a rank has saved before it asked."""
    hold: bool = False
    """Older copies here are kept after the answer too, until `Trusted`: what is restored may turn out to be bad."""
    id: int = 0


class HasRestored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """The chosen checkpoint is in this trainer's tensors. No answer."""

    checkpoint: CheckpointId
    seconds: Seconds
    sources: Mapping[str, Bytes]
    """Bytes by where they came from: own memory, a peer's, storage."""


class Trusted(msgspec.Struct, frozen=True, kw_only=True, tag="trusted"):
    """What was restored is good: nothing older is kept for its sake. No answer."""


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag="discard"):
    """What was restored is bad. Answered by Discarded when the node will remember it, whoever dies."""

    id: int
    aside: Aside


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Bring chunks of another rank's slot here; answered by Fetched. Only what `RestorePlan` named may be asked for."""

    id: int
    rank: Rank
    chunks: tuple[int, ...]
    """Empty: the header, the layout, the hashes and the tail only."""


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Answered by Flushed when the newest committed checkpoint has reached storage, or at the deadline."""

    id: int
    deadline: Seconds


class Close(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """The trainer has ended well and needs no slot any more. No answer."""


TrainerIn = Attach | Written | Skipped | Restore | HasRestored | Trusted | Discard | Fetch | Flush | Close

# --- memory server → trainer ------------------------------------------------------------------------------------------


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """The slots exist, are allocated and faulted in. The packet carries a descriptor for the page and one per slot."""

    slots: int
    file_bytes: Bytes
    durable: bool
    """Whether there is a storage tier."""


class Troubled(msgspec.Struct, frozen=True, kw_only=True, tag="troubled"):
    """What checkpoints suffer from now, for the user's terminal: told once, to one trainer of the node."""

    text: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """`reason` is one sentence: what, where, what to do."""

    reason: str
    corrupt: bool = False
    """Checkpoints exist and none can be read (NoCheckpointError)."""
    id: int = 0


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What all ranks restore."""

    id: int
    chosen: Chosen
    turn: int = 0
    """`CheckpointId.turn` of what is saved from here on."""
    here: Mapping[int, str] = {}
    """Path of the sealed slot file on this node, by the rank that wrote it."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    """The chunks are in the (sparse) file at `path`, verified."""

    id: int
    path: str = ""
    error: str = ""
    """Why no holder could give them."""


class Discarded(msgspec.Struct, frozen=True, kw_only=True, tag="discarded"):
    id: int


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    id: int
    checkpoint: CheckpointId | None
    """Newest in storage."""
    error: str = ""


TrainerOut = Attached | Refused | RestorePlan | Discarded | Fetched | Flushed | Troubled


class SavePage(IntEnum):
    """Words (int64, aligned) of the page that a memory server shares with one trainer.

    The first six are the server's. It makes VERSION odd, writes, and makes it even again; a reader that saw an odd one
    or another one afterwards reads again. So asking "is a checkpoint due?" costs a few loads and no system call.
    """

    VERSION = 0
    FIRST = 1
    """`Cadence.first`; with EVERY 0 nothing is due."""
    EVERY = 2
    ONCE = 3
    """One more step after which all save (a stop, a notice), NO_STEP: none."""
    GRANT = 4
    """Slot to write next, NO_SLOT: none is free."""
    COMMITTED = 5
    """Step of the newest committed checkpoint of this generation, NO_STEP: none."""
    STEP = 8
    """The trainer's: last step that it told to `save_if_due`."""
    STEP_AT = 9
    """The trainer's: CLOCK_MONOTONIC of that in ns."""


SAVE_PAGE_WORDS = 16
NO_SLOT = -1

# --- memory server ↔ control ------------------------------------------------------------------------------------------


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer at one memory server."""

    rank: Rank
    shards: str
    step: int = -1
    """Last step that it told."""
    restoring: int = 0
    """Number of its restore question that has no answer yet; 0: none."""
    restore_step: int | None = None
    fresh: bool = False
    turn: int = 0
    """Of what it saves now."""
    restored: HasRestored | None = None
    """What it has put back last."""
    flushing: bool = False
    """It waits for its last checkpoint to reach storage, has saved all that it will, and all of that is hashed."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has written to storage for a drain."""

    number: int
    """`DrainOrder.number`."""
    ranks: tuple[int, ...]


class DrainFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node could not do its part of a drain."""

    number: int
    """`DrainOrder.number`."""
    why: str
    lasting: bool = False
    """The store refuses: trying again soon does not help."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What this server was last told for its generation: a control that begins anew goes on from there."""

    committed: CheckpointId | None = None
    cadence: Cadence | None = None
    once: int | None = None
    answered: int = 0
    """Number of the restore question of this generation that `chosen` answers; 0: none has an answer."""
    chosen: CheckpointId | None = None
    """`Chosen.checkpoint` of that answer; None: none to restore."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/memory: everything that one memory server has. The answer is held back up to `wait` for news."""

    node: NodeId
    incarnation: Incarnation
    """Of the memory server."""
    address: Address
    """Where other memory servers reach it."""
    domain: str
    """Failure domain: rack, switch, power feed; by default the host."""
    attempt: int
    generation: GenerationNumber
    """Newest one that a trainer here belongs to; 0: none has attached."""
    number: int = 0
    """One more with every report of this incarnation: an older one that comes late is not noted. 0: not counted."""
    told: Told = Told()
    world_size: int = 0
    ranks: tuple[Rank, ...] = ()
    """That have attached here in this generation, also those that have gone since."""
    attached: tuple[Attachment, ...] = ()
    policy: Policy = Policy()
    held: tuple[Held, ...] = ()
    """All copies here, of own ranks and for other nodes."""
    parity: tuple[Parity, ...] = ()
    """Whole parity here, of the groups that this node is a member of."""
    skipped: tuple[CheckpointId, ...] = ()
    """Due here, and not saved: they will never be complete."""
    done: bool = False
    """All ranks that the present line has here have ended well: what is in memory is given back, and not missed."""
    asides: tuple[Aside, ...] = ()
    """Known here to be bad (kept beside the slots)."""
    worlds: tuple[Shards, ...] = ()
    """Known here of earlier generations (kept beside the slots)."""
    stored: tuple[Stored, ...] = ()
    """What is in storage, as far as this node has looked; only the lowest rank's node looks."""
    store: str = ""
    """Address of the storage tier, as the trainers here gave it; empty: none."""
    unlooked: str = ""
    """Why this node, which should, has not listed the storage (yet). While it is not empty nothing counts as absent."""
    flushing: bool = False
    """A trainer here waits for the newest committed checkpoint to reach storage (`Flush`)."""
    parts: tuple[Parts, ...] = ()
    """What this node has written for the drains that were ordered last."""
    drain_bytes: Bytes = 0
    """Written to storage by this life of the server, as far as it has got: a drain that goes on is not given up."""
    drain_failure: DrainFailure | None = None
    """Of the last drain that was ordered."""
    step_seconds: Seconds | None = None
    stall_seconds: Seconds | None = None
    """Of the last checkpoint, the slowest rank's."""
    commit_seconds: Seconds | None = None
    """From written to replicated, the slowest rank's."""
    free_store: Bytes | None = None
    """Room that is left in the storage, as the node that lists it has seen it last; None: unknown."""
    trouble: tuple[str, ...] = ()
    """What cannot be done here now, one sentence each; each is told to the user once."""
    seen: int = 0
    """`MemoryOrders.version` of the last answer."""
    wait: Seconds = 0.0


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, to be written to storage by those who have it, each rank's part by one node."""

    number: int
    """Of this attempt: what failed under another number is tried again."""
    checkpoint: CheckpointId
    ranks: tuple[int, ...] = ()
    """Whose slots make up the whole. Empty: all ranks. Fewer, where some are lost and the others have all shards."""
    writers: Mapping[NodeId, tuple[int, ...]] = {}
    """Whose slots each node writes: its own ones and, where their node is gone, replicas of others."""
    committer: NodeId
    """Commits it when all parts are there, and deletes what is beyond the number to keep."""
    is_written: bool = False
    """All parts are there."""


class Protect(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint is sealed: each member of a group makes its parity of the slots of the others."""

    checkpoint: CheckpointId
    groups: tuple[tuple[Member, ...], ...]


class MemoryOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What control wants of all memory servers."""

    version: int
    attempt: int
    generation: GenerationNumber
    committed: CheckpointId | None = None
    """Newest checkpoint that is complete at the level that the policy asks for."""
    aborted: tuple[CheckpointId, ...] = ()
    """Will never be committed: their slots are free."""
    asides: tuple[Aside, ...] = ()
    """All that were set aside, for every node to remember."""
    cadence: Cadence | None = None
    once: int | None = None
    """One more step after which all save."""
    world: Shards | None = None
    """Of the present generation, when all ranks have attached."""
    partners: Mapping[NodeId, tuple[Address, ...]] = {}
    """Where each node sends its replicas."""
    protect: tuple[Protect, ...] = ()
    """Of which checkpoints parity is wanted, the oldest first."""
    addresses: Mapping[NodeId, Address] = {}
    """Where the memory servers are that `chosen` and `protect` name."""
    present: tuple[NodeId, ...] = ()
    """Nodes that are there, or are awaited: what is held for any other one is written to storage by who holds it."""
    stand_in: NodeId | None = None
    """Looks into the storage and commits there in the place of rank 0's node, which is gone."""
    hurry: bool = False
    """The end is near: what goes to storage is not held back for the sake of the training."""
    drain: DrainOrder | None = None
    """What is to be written to storage."""
    drain_world: Shards | None = None
    """Of the generation that wrote it, where that is not the present one: who commits it may have come since."""
    store_trouble: str = ""
    """Why nothing gets into the storage, as control sees it; it tries again."""
    unstorable: str = ""
    """Why those who wait for storage (`Flush`) need not wait any longer. Only while somebody waits."""
    durable: CheckpointId | None = None
    chosen: Chosen | None = None
    """Answer to the restore question `question` of this generation."""
    refused: str = ""
    """Why there is no answer to it: the list of what was found."""
    question: int = 0
    turn: int = 0
    """Of the generation's present line: what was saved in turns before is history."""


# --- memory server → drain (`python -m perdure.trainer.checkpoint.drain`: JSON lines on its stdin and stdout) ---------


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Write this node's part of a checkpoint into the uncommitted folder `name` below `store`."""

    id: int
    store: str
    name: str
    checkpoint: CheckpointId
    slots: Mapping[int, str] = {}
    """Path of the sealed (and pinned) slot file, by rank."""
    by_rank: tuple[str, ...]
    """`Shards.by_rank`: replicas share the writing of what they all have."""
    ranks: tuple[int, ...] = ()
    """Whose slots are written, here and by other nodes: equal in all requests of one checkpoint. Empty: all of them."""
    finish: bool = False
    """All parts are there (after `slots` have been written): make torch's `.metadata` of them. Then it can be
    committed (`store.checkpoints.commit`). One node asks for it, the lowest rank's."""
    bytes_per_second: float | None = None
    """Pace; None: as fast as a niced process gets."""
    hurry: bool = False
    """The end is near: with the share of processor and disk of any other process, as far as that is allowed."""


class DrainReply(msgspec.Struct, frozen=True, kw_only=True):
    """The part is durable, or `error` says why not. With `id` 0: the drain has started and imported torch."""

    id: int
    nbytes: Bytes = 0
    """Of all parts; while `is_done` is false, what has been written since the drain started."""
    seconds: Seconds = 0.0
    error: str = ""
    lasting: bool = False
    """The store refuses: trying again soon does not help."""
    is_done: bool = True
    """False: it goes on, and has written more than when it said so last."""
