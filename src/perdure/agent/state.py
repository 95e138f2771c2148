"""What an agent knows and what follows from it. Pure: facts in, actions out; `loop` carries them out.

Level-triggered: `act` compares what control orders with what runs here, so a lost, repeated or late message is healed
by the next one. Times are the agent's monotonic clock.
"""

from collections.abc import Mapping

import msgspec

from perdure.agent.progress import Progress
from perdure.vocab.event import AnyEvent
from perdure.vocab.generation import Address
from perdure.vocab.ids import EventId, GenerationNumber, NodeId, Rank
from perdure.vocab.units import Instant, Seconds
from perdure.wire.messages import Duty, Orders

EXIT_FENCED = 75
"""EX_TEMPFAIL of sysexits.h: the launcher starts the agent anew."""
IN_TOUCH = 0.4
"""Share of the lease: a node that control has answered within it is in touch with control (it reports every fifth)."""
STOP_GRACE: Seconds = 2.0
"""From SIGTERM to SIGKILL when the job has ended; clean-up as a whole never takes more than 10 s."""
SIGTERM, SIGKILL = 15, 9


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one worker."""

    pid: int
    local_rank: int
    rank: Rank
    generation: GenerationNumber
    progress: Progress
    forked: bool = False
    """From the fork server, as opposed to spawned."""
    state_letter: str = "R"
    asked_at: Instant | None = None
    """When it was sent SIGTERM by us to end."""
    killed_at: Instant | None = None
    """When it was sent SIGKILL by us."""
    ended: bool = False
    abandoned: bool = False
    """It outlived SIGKILL; nothing waits for it any more."""

    @property
    def is_alive(self) -> bool:
        return not self.ended and not self.abandoned


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    generation: GenerationNumber
    address: Address | None = None
    pid: int | None = None
    ending: bool = False


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an agent's actions may rest on."""

    node: NodeId
    slots: int
    orders: Orders | None = None
    workers: Mapping[int, WorkerState] = {}
    """By pid: the living and those whose end has not been told."""
    store: StoreState | None = None
    ready: bool = False
    """Workers and stores can be started: the fork server has spoken, or there will be none."""
    gathered: GenerationNumber = GenerationNumber(0)
    """Newest generation for which NodeGathered was told."""
    starting: GenerationNumber = GenerationNumber(0)
    """Newest generation whose workers were ordered to start."""
    launching: bool = False
    """A StartWorkers is being carried out: nobody can say yet which processes there will be."""
    up: GenerationNumber = GenerationNumber(0)
    """Newest generation for which WorkersStarted was told."""
    begun: GenerationNumber = GenerationNumber(0)
    caught_up: GenerationNumber = GenerationNumber(0)
    saves: int = 0
    last_step: int | None = None
    """Highest step told by any worker of an earlier generation here."""
    acked_drain: GenerationNumber = GenerationNumber(0)
    drain_seen: Instant | None = None
    """When the order to drain was first seen."""
    forwarded: GenerationNumber = GenerationNumber(0)
    stop_after: int | None = None
    contact: Instant = 0.0
    """Send time of the last report that control has answered."""
    peers_ok: Instant = 0.0
    """When a majority of the members was last known to be reachable."""
    peers_asked: Instant = 0.0
    vouched: Mapping[NodeId, Instant] = {}
    """When this node last told another that it may go on without control; see `vouch`."""
    fenced: str | None = None
    """Why this life is over."""
    exiting: bool = False

    def alive(self) -> tuple[WorkerState, ...]:
        return tuple(w for w in self.workers.values() if w.is_alive)

    def of(self, generation: GenerationNumber) -> tuple[WorkerState, ...]:
        """Workers of `generation` in local-rank order, ended ones too."""
        return tuple(
            sorted((w for w in self.workers.values() if w.generation == generation), key=lambda w: w.local_rank)
        )


# --- actions ---------------------------------------------------------------------------------------------------------


class Signal(msgspec.Struct, frozen=True):
    """Send `number` to these workers and their children."""

    pids: tuple[int, ...]
    number: int


class StartStore(msgspec.Struct, frozen=True):
    generation: GenerationNumber


class EndStore(msgspec.Struct, frozen=True):
    pid: int


class StartWorkers(msgspec.Struct, frozen=True):
    """Start all ranks of this node as `orders` say."""

    orders: Orders


class Tell(msgspec.Struct, frozen=True):
    """Send an event to control; its id and time are filled in by the sender."""

    event: AnyEvent


class AskPeers(msgspec.Struct, frozen=True):
    """Ask the other members whether they live, and which generation they know."""


class StopAfter(msgspec.Struct, frozen=True):
    """Write the step after which telling scripts end into the heartbeat page."""

    step: int


class Exit(msgspec.Struct, frozen=True):
    """Everything has ended here."""

    code: int
    reason: str


AgentAction = Signal | StartStore | EndStore | StartWorkers | Tell | AskPeers | StopAfter | Exit

Step = tuple[AgentState, list[AgentAction]]
"""What a rule gives: the state that remembers, and what is to be done."""
UNSENT = EventId("")
"""Id of an event that has no number yet."""


# --- facts -----------------------------------------------------------------------------------------------------------


def ordered(state: AgentState, orders: Orders) -> AgentState:
    """Newer orders; older ones are ignored."""
    if state.orders is not None and orders.version < state.orders.version:
        return state
    return msgspec.structs.replace(state, orders=orders)


def started(state: AgentState, worker: WorkerState) -> AgentState:
    return msgspec.structs.replace(state, workers={**state.workers, worker.pid: worker})


def warmed(state: AgentState) -> AgentState:
    """Processes can be started from now on."""
    return msgspec.structs.replace(state, ready=True)


def launched(state: AgentState) -> AgentState:
    """The last StartWorkers has been carried out, or has failed."""
    return msgspec.structs.replace(state, launching=False)


def changed(state: AgentState, worker: WorkerState, **changes: object) -> AgentState:
    return started(state, msgspec.structs.replace(worker, **changes))


def store_listens(state: AgentState, generation: GenerationNumber, pid: int, address: Address) -> AgentState:
    return msgspec.structs.replace(state, store=StoreState(generation=generation, pid=pid, address=address))


def store_ended(state: AgentState, pid: int) -> AgentState:
    if state.store is None or state.store.pid != pid:
        return state
    return msgspec.structs.replace(state, store=None)


def answered(state: AgentState, sent_at: Instant) -> AgentState:
    """Control has answered a report that was sent at `sent_at`."""
    return msgspec.structs.replace(state, contact=max(state.contact, sent_at))


def peers_answered(state: AgentState, reachable: int, members: int, asked_at: Instant) -> AgentState:
    """`reachable` other members have vouched for this node (`vouch`), of `members` in all, this node included.

    `members` are all that are asked, spares too: any of them might be a part of the generation that replaces this one.
    """
    if 2 * (reachable + 1) > members:
        return msgspec.structs.replace(state, peers_ok=max(state.peers_ok, asked_at))
    return state


def vouch(state: AgentState, asker: NodeId, now: Instant) -> tuple[AgentState, bool]:
    """Whether `asker`, which does not reach control, may go on for another lease as far as this node knows.

    No, if this node is in touch with control: then it is the asker that is cut off, and will be replaced. A yes binds:
    this node gathers for no generation without the asker until the lease that it gave is over (`decide.act`).
    """
    orders = state.orders
    if orders is None or state.fenced is not None or asker not in {peer.node for peer in orders.peers}:
        return state, False
    if now - state.contact <= IN_TOUCH * orders.rules.lease:
        return state, False
    return msgspec.structs.replace(state, vouched={**state.vouched, asker: now}), True


def bound_until(state: AgentState) -> Instant:
    """Until when a lease given by `vouch` forbids to gather for the ordered generation."""
    orders = state.orders
    if orders is None or orders.assignment is None:
        return 0.0
    left_out = (at for node, at in state.vouched.items() if orders.assignment.member(node) is None)
    return max((at + orders.rules.lease for at in left_out), default=0.0)


def fence(state: AgentState, reason: str) -> AgentState:
    """This life is over: it may have been replaced."""
    return state if state.fenced is not None else msgspec.structs.replace(state, fenced=reason)


def generation_of(state: AgentState) -> GenerationNumber:
    """The generation whose workers may live here; 0: none may."""
    orders = state.orders
    if orders is None or state.fenced is not None or orders.duty not in (Duty.GATHER, Duty.RUN):
        return GenerationNumber(0)
    return orders.generation
