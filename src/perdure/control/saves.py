"""The commit protocol of checkpoints in memory: reports of all memory servers in, one set of orders out. Pure.

Each function gives the state after something has happened; `orders` says what all servers are to do then. It knows no
socket and no clock (`control.memory_door` has them).
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from perdure.control.answer import RESTORE_PATIENCE, answer
from perdure.control.choice import Choice
from perdure.control.commits import commit, know_bad, next_late
from perdure.control.inventory import Life, copies_of, marked_in
from perdure.control.memories import (
    GATHER_PATIENCE,
    SavesState,
    attachments,
    awaited,
    is_gathered,
    policy,
    present,
    stand_in,
)
from perdure.control.parity import named_in, protect
from perdure.control.storing import drain_order, is_urgent, next_due, store
from perdure.control.tempo import once_at, pace
from perdure.policy.cadence import Failures
from perdure.policy.replicas import partners
from perdure.vocab.checkpoint import CheckpointId, Held, Shards, put_together
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.vocab.units import Instant
from perdure.wire.memory import MemoryOrders, MemoryReport, Told

__all__ = [
    "SavesState",
    "asked_to_save",
    "began",
    "gone",
    "hurried",
    "next_deadline",
    "noticed",
    "opened",
    "orders",
    "reported",
    "ticked",
]

VERSIONS_PER_SECOND = 1000
"""Of the orders of one life of control: the next life begins with greater ones."""
WORLDS_KEPT = 16


# --- what happens ----------------------------------------------------------------------------------------------------


def opened(now: Instant) -> SavesState:
    """The state of a control that has heard nobody yet."""
    return SavesState(version=int(now * VERSIONS_PER_SECOND), opened_at=now)


def began(
    state: SavesState,
    attempt: int,
    generation: GenerationNumber,
    nodes: Iterable[NodeId] | None,
    world_size: int,
    now: Instant,
) -> SavesState:
    """A generation began, or its members are known better. `nodes` None: whoever reports it is a member."""
    members = None if nodes is None else frozenset(nodes)
    life = attempt, generation
    if life < state.life:
        return state
    after = msgspec.structs.replace(state, members=members, world_size=world_size)
    if life > state.life:
        after = msgspec.structs.replace(
            after,
            attempt=attempt,
            generation=generation,
            began_at=now,
            world=None,
            asked_at=None,
            choice=None,
            question=0,
            turn=0,
            cadence=None,
            once=None,
            stopping=False,
            noticed=False,
            committed=None if state.finished else state.committed,
            closed=frozenset(),
            finished=False,
            problem=None if state.problem is None or not state.problem.lasting else state.problem,
            partners={},
            told=Told(),
            node_went=False,
            went=frozenset(),
            failures=_counted(state, members),
        )
    return _settled(state, after, now)


def reported(state: SavesState, report: MemoryReport, now: Instant) -> SavesState:
    """A memory server has said what it has. An older report that comes late changes nothing."""
    known = state.reports.get(report.node)
    if known is not None and _is_older(report, known):
        return state
    life = report.attempt, report.generation
    if state.members is None and report.generation > 0 and life > state.life:
        state = began(state, report.attempt, report.generation, None, report.world_size, now)
    after = msgspec.structs.replace(
        state,
        reports={**state.reports, report.node: report},
        heard={**state.heard, report.node: now},
        went=state.went - {report.node},
        copies=_with_copies(state, report.node, copies_of(report)),
        worlds=_with_worlds(state, report.worlds),
        asides=put_together((*state.asides, *report.asides, *marked_in(report))),
        told=_remembered(state, report.told) if life == state.life else state.told,
    )
    if life == after.life:
        ranks = frozenset(int(rank) for rank in report.ranks)
        closed = after.closed | ranks if report.done else after.closed - ranks
        is_all = report.world_size > 0 and closed >= set(range(report.world_size))
        after = msgspec.structs.replace(after, closed=closed, finished=is_all)
    return _settled(state, after, now)


def gone(state: SavesState, node: NodeId, now: Instant) -> SavesState:
    """A node is lost, or its memory server has not been heard for too long: nothing that it had counts any more."""
    if node not in state.reports:
        return state
    after = msgspec.structs.replace(
        state,
        reports={other: report for other, report in state.reports.items() if other != node},
        heard={other: at for other, at in state.heard.items() if other != node},
        copies=_with_copies(state, node, {}),
        node_went=state.node_went or node in present(state),
        went=state.went | {node},
    )
    return _settled(state, after, now)


def asked_to_save(state: SavesState, now: Instant, *, step: int | None = None) -> SavesState:
    """The job stops, or a node will: all save once more, after `step` or soon, and that one goes to storage."""
    once = state.once if state.stopping and step is None else step if step is not None else once_at(state, now)
    return _settled(state, msgspec.structs.replace(state, once=once, stopping=True), now)


def hurried(state: SavesState, now: Instant) -> SavesState:
    """The trainers are gone, and perhaps for good: what was committed last goes to storage."""
    return state if state.stopping else _settled(state, msgspec.structs.replace(state, stopping=True), now)


def noticed(state: SavesState, now: Instant) -> SavesState:
    """Something is about to happen: all save once more, soon, and that one goes to storage; the job goes on."""
    once = once_at(state, now) if not state.noticed else state.once
    return _settled(state, msgspec.structs.replace(state, once=once, noticed=True), now)


def ticked(state: SavesState, now: Instant) -> SavesState:
    """Time has passed (`next_deadline`)."""
    return _settled(state, state, now)


# --- what follows ----------------------------------------------------------------------------------------------------


def orders(state: SavesState, now: Instant) -> MemoryOrders:
    """What all memory servers are to do now. The same state gives the same orders."""
    return _orders(ticked(state, now))


def next_deadline(state: SavesState, now: Instant) -> Instant | None:
    """When `ticked` may change something although nobody says anything; None: never."""
    times = [next_late(state, now), next_due(state, now)]
    if state.generation > 0:
        times.append(max(state.began_at, state.opened_at) + GATHER_PATIENCE)
    if state.asked_at is not None:
        times.append(state.asked_at + RESTORE_PATIENCE)
    return min((time for time in times if time is not None and time > now), default=None)


def _orders(state: SavesState) -> MemoryOrders:
    choice = state.choice or Choice()
    wanted = protect(state)
    addressed = named_in(choice.chosen, wanted) & state.reports.keys()
    return MemoryOrders(
        version=state.version,
        attempt=state.attempt,
        generation=state.generation,
        committed=state.committed,
        aborted=tuple(sorted(state.aborted)),
        asides=state.asides,
        cadence=state.cadence,
        once=state.once,
        world=state.world,
        partners=state.partners,
        protect=wanted,
        addresses={node: state.reports[node].address for node in sorted(addressed)},
        present=tuple(sorted(awaited(state))),
        stand_in=stand_in(state),
        hurry=is_urgent(state),
        drain=drain_order(state),
        drain_world=_drain_world(state),
        store_trouble="" if state.problem is None else state.problem.why,
        unstorable=state.unstorable,
        durable=state.durable,
        chosen=choice.chosen,
        refused=choice.refused,
        question=state.question,
        turn=state.turn,
    )


def _drain_world(state: SavesState) -> Shards | None:
    life = None if state.drain is None else state.drain.checkpoint.life
    return None if life is None or life == state.life else state.worlds.get(life)


def _settled(before: SavesState, state: SavesState, now: Instant) -> SavesState:
    """`state` with everything that follows from it, and a new version where that changes the orders."""
    state = know_bad(_know_world(state))
    state = answer(state, now)
    state = commit(state, now)
    state = pace(state, now)
    state = _pair(state, now)
    state = store(state, now)
    unchanged = _meaning(state) == _meaning(before)
    return msgspec.structs.replace(state, version=before.version if unchanged else before.version + 1)


def _meaning(state: SavesState) -> MemoryOrders:
    return msgspec.structs.replace(_orders(state), version=0)


def _know_world(state: SavesState) -> SavesState:
    """Note which shards the ranks of the generation have, once all have attached."""
    attached = attachments(state)
    if state.members is None and state.world_size == 0:
        state = msgspec.structs.replace(
            state, world_size=max((r.world_size for r in present(state).values()), default=0)
        )
    if state.world is not None or state.world_size == 0 or not attached.keys() >= set(range(state.world_size)):
        return state
    shards = tuple(attached[rank].shards for rank in range(state.world_size))
    world = Shards(attempt=state.attempt, generation=state.generation, by_rank=shards)
    return msgspec.structs.replace(state, world=world, worlds={**state.worlds, state.life: world})


def _pair(state: SavesState, now: Instant) -> SavesState:
    """Tell each node where its replicas go, once all members are known; anew when one comes or goes."""
    here = present(state)
    gathered = is_gathered(state, now)
    if gathered != state.gathered:
        state = msgspec.structs.replace(state, gathered=gathered)
    copies = policy(state).replicas
    if copies <= 0 or not gathered:
        return state if not state.partners else msgspec.structs.replace(state, partners={})
    sends = partners([(node, report.domain) for node, report in here.items()], copies)
    addresses = {node: tuple(here[other].address for other in others) for node, others in sends.items() if others}
    addresses = {**addresses, **_left_behind(state, here)}
    return state if addresses == state.partners else msgspec.structs.replace(state, partners=addresses)


def _left_behind(state: SavesState, here: Mapping[NodeId, MemoryReport]) -> dict[NodeId, tuple[Address, ...]]:
    """Where nodes that are no members any more send what they alone have of the chosen checkpoint.

    Until every part of it has its copies the one that was committed before is kept beside it, and with both of them
    in a partner's two places nothing new could be committed (`commits._follow_choice`).
    """
    answer = None if state.choice is None else state.choice.chosen
    chosen = None if answer is None else answer.checkpoint
    if chosen is None or chosen == state.committed or (state.committed is not None and chosen < state.committed):
        return {}
    sends: dict[NodeId, tuple[Address, ...]] = {}
    for node, report in state.reports.items():
        ranks = {held.rank for held in report.held if held.checkpoint == chosen}
        takers = [other for other in sorted(here) if not _has(here[other], chosen, ranks)]
        if node not in here and takers:
            sends[node] = (here[takers[0]].address,)
    return sends


def _has(report: MemoryReport, checkpoint: CheckpointId, ranks: Collection[int]) -> bool:
    return set(ranks) <= {held.rank for held in report.held if held.checkpoint == checkpoint}


# --- bookkeeping -----------------------------------------------------------------------------------------------------


def _is_older(report: MemoryReport, known: MemoryReport) -> bool:
    """Whether `report` was made before `known`, by the same life or by an earlier one on the same machine."""
    new, old = report.incarnation, known.incarnation
    if new == old:
        return 0 < report.number < known.number
    return new.boot_id == old.boot_id and new.started_ticks < old.started_ticks


def _remembered(state: SavesState, more: Told) -> Told:
    """The newest of all that was told. An answer that some ranks have is never taken back."""
    told = state.told
    if state.turn > 0 and more.answered < state.question:
        return told  # a server that has not heard yet that the ranks have gone back
    newest = max((each.committed for each in (told, more) if each.committed is not None), default=None)
    cadences = [each.cadence for each in (told, more) if each.cadence is not None]
    once = [each.once for each in (told, more) if each.once is not None]
    answer = told if told.answered >= more.answered else more
    return Told(
        committed=newest,
        cadence=max(cadences, key=lambda each: each.first, default=None),
        once=max(once, default=None),
        answered=answer.answered,
        chosen=answer.chosen,
    )


def _with_copies(
    state: SavesState, node: NodeId, has: dict[CheckpointId, tuple[Held, ...]]
) -> dict[CheckpointId, dict[NodeId, tuple[Held, ...]]]:
    """`state.copies`, in which `node` now `has` these and no others."""
    copies = {checkpoint: dict(nodes) for checkpoint, nodes in state.copies.items()}
    for nodes in copies.values():
        nodes.pop(node, None)
    for checkpoint, parts in has.items():
        copies.setdefault(checkpoint, {})[node] = parts
    return {checkpoint: nodes for checkpoint, nodes in copies.items() if nodes}


def _with_worlds(state: SavesState, told: Iterable[Shards]) -> dict[Life, Shards]:
    worlds = {**state.worlds, **{(each.attempt, each.generation): each for each in told}}
    if state.world is not None:
        worlds[state.life] = state.world
    kept = {checkpoint.life for checkpoint in state.copies} | {state.life}
    newest = set(sorted(worlds, reverse=True)[:WORLDS_KEPT])
    return {life: world for life, world in worlds.items() if life in kept or life in newest}


def _counted(state: SavesState, members: frozenset[NodeId] | None) -> Failures:
    """The job's history with what ended the present generation: a process at least, or a node. Growth is no failure."""
    if state.generation == 0:
        return state.failures
    known = members is not None and state.members is not None
    went = state.node_went or (known and bool((state.members or frozenset()) - (members or frozenset())))
    if went:
        return msgspec.structs.replace(state.failures, node=state.failures.node + 1)
    if known and state.members != members:
        return state.failures
    return msgspec.structs.replace(state.failures, process=state.failures.process + 1)
