"""A made-up memory server: the real ring, made-up slots, hashing and sending that take made-up time.

It follows `agent.memory.tier` in what it does with orders and what it reports; it has no files and no bytes.
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.agent.memory import ring as facts
from perdure.agent.memory.copies import next_to_send
from perdure.agent.memory.ring import Key, Line, Ring
from perdure.vocab.checkpoint import CheckpointId, Held, Level, Member, Parity, Shards, SlotState, Stored
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, Incarnation, NodeId, Rank
from perdure.vocab.units import Instant, Seconds
from perdure.wire.memory import Attachment, DrainOrder, MemoryOrders, MemoryReport, Parts, Policy, Told
from perdure.wire.parity import FILES

REPLICAS_KEPT = 2
"""Of one rank of one node: the newer one and the one before."""


class Seat(msgspec.Struct):
    """One trainer."""

    line: Line
    step: int = -1
    restoring: int = 0
    """Number of its question."""
    wish: int | None = None
    turn: int = 0
    fresh: bool = False
    begun: bool = False


class MemoryServer:
    """One life of one node's memory: it ends with the node. `restart` is a new process on the same files."""

    def __init__(self, node: NodeId, index: int, boot: str, policy: Policy, has_store: bool) -> None:
        self.node, self.address, self.boot = node, Address(node, 1000 + index), boot
        self.policy, self.has_store = policy, has_store
        self.ring = Ring()
        self.seats: dict[Rank, Seat] = {}
        self.replicas: dict[tuple[NodeId, Rank], list[CheckpointId]] = {}
        self.parity: dict[CheckpointId, Parity] = {}
        self.sizes: dict[CheckpointId, int] = {}
        """World that wrote it."""
        self.orders: MemoryOrders | None = None
        self.acked: dict[tuple[Key, Address], CheckpointId] = {}
        self.skipped: set[CheckpointId] = set()
        self.worlds: dict[Line, Shards] = {}
        self.parts: dict[int, tuple[int, ...]] = {}
        """Ranks whose parts this node has written, by the number of the drain."""
        self.world_size = 0
        self.number, self.life, self.heard_of = 0, 1, 0
        self.is_up = True
        self.commit_seconds: Seconds | None = None

    # --- trainers ----------------------------------------------------------------------------------------------------

    def attach(self, rank: Rank, line: Line, world_size: int, slots: int) -> None:
        mine = self.ring.of(rank)
        free = (number for number in range(slots + len(mine)) if number not in mine)
        self.ring = facts.attached(self.ring, rank, line, [next(free) for _ in range(slots - len(mine))])
        self.seats[rank] = Seat(line)
        self.world_size = world_size

    def leave_all(self) -> None:
        """The trainers have died: what they were writing is torn."""
        for rank in tuple(self.seats):
            del self.seats[rank]
            self.ring = facts.trainer_gone(self.ring, rank)

    def ask(self, rank: Rank, number: int, wish: int | None) -> None:
        """A trainer asks what to restore."""
        seat = self.seats[rank]
        seat.restoring, seat.wish, seat.begun, seat.step = number, wish, False, -1

    def grant(self, rank: Rank) -> int | None:
        number = facts.grant(self.ring, rank)
        if number is None:
            return None
        slot = self.ring.slots[rank, number]
        if not slot.given:
            if slot.checkpoint is not None and not self.seats[rank].begun:
                return None
            self.ring = facts.given(self.ring, (rank, number))
        return number

    def write(self, key: Key, checkpoint: CheckpointId) -> None:
        self.ring = facts.written(self.ring, key, checkpoint)
        self.sizes[checkpoint] = self.world_size

    def seal(self, key: Key, checkpoint: CheckpointId) -> bool:
        slot = self.ring.slots.get(key)
        if not self.is_up or slot is None or (slot.state, slot.checkpoint) != (SlotState.WRITTEN, checkpoint):
            return False
        self.ring = facts.sealed(self.ring, key)
        return True

    def restart(self) -> list[tuple[Key, CheckpointId]]:
        """Begin anew on the same slots; gives those that are to be hashed once more."""
        self.life += 1
        self.number, self.orders, self.acked = 0, None, {}
        self.skipped.clear()
        self.parts.clear()
        slots = {
            key: msgspec.structs.replace(slot, given=False, pinned=False, level=None)
            for key, slot in self.ring.slots.items()
        }
        self.ring = facts.adopted(Ring(), slots)
        for rank, seat in self.seats.items():
            self.ring = facts.attached(self.ring, rank, seat.line, turn=seat.turn)
            seat.begun = False
        return [
            (k, s.checkpoint) for k, s in slots.items() if s.state is SlotState.WRITTEN and s.checkpoint is not None
        ]

    # --- control -----------------------------------------------------------------------------------------------------

    def apply(self, orders: MemoryOrders) -> None:
        self.orders = orders
        line = (orders.attempt, int(orders.generation))
        ring = facts.aborted(facts.committed(self.ring, orders.committed), orders.aborted)
        if orders.chosen is not None:
            ring = facts.chosen(ring, line, orders.chosen.checkpoint, orders.turn)
        self.ring = ring
        done = orders.committed
        self.skipped = {s for s in self.skipped if s not in ring.aborted and (done is None or s > done)}
        if orders.world is not None:
            self.worlds[line] = orders.world
        if done is not None and ring.line > (0, 0) and done.line >= ring.branch:
            for whose, kept in self.replicas.items():
                self.replicas[whose] = [c for c in kept if c.life >= done.life]
            self.parity = {c: kept for c, kept in self.parity.items() if c.life >= done.life}
        for key in facts.removable(self.ring):
            self.ring = facts.removed(self.ring, key)
        self._reserve()

    def _reserve(self) -> None:
        """What is to be drained is not given away before it is written, as `agent.memory.tier` has it."""
        order = None if self.orders is None else self.orders.drain
        waits = order is not None and not order.is_written and self.to_write(order)
        self.ring = facts.draining(self.ring, order.checkpoint if order is not None and waits else None)

    def to_write(self, order: DrainOrder) -> tuple[int, ...]:
        """Ranks whose parts this node is to write, and has not."""
        return tuple(rank for rank in order.writers.get(self.node, ()) if rank not in self.parts.get(order.number, ()))

    def wrote(self, order: DrainOrder, ranks: Iterable[int]) -> None:
        self.parts = {order.number: tuple(sorted({*self.parts.get(order.number, ()), *ranks}))}
        self._reserve()

    def line_orders(self, line: Line) -> MemoryOrders | None:
        """What control wants, if it is of this line."""
        orders = self.orders
        return orders if orders is not None and (orders.attempt, int(orders.generation)) == line else None

    # --- copies ------------------------------------------------------------------------------------------------------

    def to_send(self, rank: Rank, address: Address) -> tuple[Key, CheckpointId] | None:
        """The slot of `rank` that this partner should have next."""

        def has(key: Key) -> bool:
            return self.acked.get((key, address)) == self.ring.slots[key].checkpoint

        key = next_to_send(self.ring, rank, has)
        checkpoint = None if key is None else self.ring.slots[key].checkpoint
        return None if key is None or checkpoint is None else (key, checkpoint)

    def take(self, sender: NodeId, rank: Rank, checkpoint: CheckpointId, world_size: int) -> bool:
        """Keep a replica, as `agent.memory.shelf` does; whether it could."""
        kept = self.replicas.setdefault((sender, rank), [])
        if checkpoint in kept:
            return True
        if len(kept) >= REPLICAS_KEPT:
            spent = [c for c in kept if facts.is_spent(self.ring, c)]
            if not spent or checkpoint < min(spent):
                return False
            kept.remove(min(spent))
        kept.append(checkpoint)
        self.sizes[checkpoint] = world_size
        return True

    def parity_wanted(self) -> tuple[CheckpointId, tuple[Member, ...]] | None:
        """The oldest that is not here yet, where there is a file for it: as `agent.memory.protecting` chooses."""
        for one in () if self.orders is None else self.orders.protect:
            for members in one.groups:
                mine = any(member.node == self.node for member in members)
                kept = self.parity.get(one.checkpoint)
                if mine and (kept is None or kept.members != members):
                    return (one.checkpoint, members) if self._has_file(one.checkpoint) else None
        return None

    def keep_parity(self, checkpoint: CheckpointId, members: tuple[Member, ...]) -> bool:
        """All slots of the group have been read; whether there was still a file for it."""
        if not self._has_file(checkpoint):
            return False
        self.parity.pop(checkpoint, None)
        if len(self.parity) >= FILES:
            del self.parity[min(c for c in self.parity if facts.is_spent(self.ring, c))]
        roots = {rank: f"{checkpoint}/{rank}" for member in members for rank in member.ranks}
        self.parity[checkpoint] = Parity(checkpoint=checkpoint, members=members, roots=roots, nbytes=1)
        return True

    def _has_file(self, checkpoint: CheckpointId) -> bool:
        kept = self.parity
        return checkpoint in kept or len(kept) < FILES or any(facts.is_spent(self.ring, c) for c in kept)

    def has(self, checkpoint: CheckpointId) -> set[int]:
        """Ranks of which a copy is here."""
        own = {int(rank) for rank, _ in self.ring.holding(checkpoint)}
        return own | {int(rank) for (_, rank), kept in self.replicas.items() if checkpoint in kept}

    # --- reports -----------------------------------------------------------------------------------------------------

    def report(self, now: Instant, stored: Mapping[CheckpointId, Stored], step_seconds: Seconds) -> MemoryReport:
        attempt, generation = self.ring.line
        self.number += 1
        orders = self.line_orders(self.ring.line)
        held = {
            (slot.checkpoint, int(key[0])): slot.level or Level.SEALED
            for key, slot in self.ring.slots.items()
            if slot.state is SlotState.SEALED and slot.checkpoint is not None
        }
        for (_, rank), kept in self.replicas.items():
            held.update({(checkpoint, int(rank)): Level.SEALED for checkpoint in kept})
        return MemoryReport(
            node=self.node,
            incarnation=Incarnation(pid=1, started_ticks=self.life, boot_id=self.boot),
            address=self.address,
            domain=self.node,
            attempt=attempt,
            generation=GenerationNumber(generation),
            number=self.number,
            told=Told()
            if orders is None
            else Told(
                committed=orders.committed,
                cadence=orders.cadence,
                once=orders.once,
                answered=0 if orders.chosen is None else orders.question,
                chosen=None if orders.chosen is None else orders.chosen.checkpoint,
            ),
            world_size=self.world_size,
            attached=tuple(
                Attachment(
                    rank=rank,
                    shards=f"s{rank}",
                    step=seat.step,
                    restoring=0 if self._is_hashing(rank) else seat.restoring,
                    restore_step=seat.wish,
                    fresh=seat.fresh,
                    turn=seat.turn,
                )
                for rank, seat in sorted(self.seats.items())
                if seat.line == self.ring.line
            ),
            policy=self.policy,
            held=tuple(self._held(c, rank, level) for (c, rank), level in sorted(held.items())),
            parity=tuple(self.parity.values()),
            skipped=tuple(sorted(self.skipped)),
            worlds=tuple(self.worlds.values()),
            stored=tuple(stored.values()) if Rank(0) in self.seats else (),
            store="memory://" if self.has_store else "",
            parts=tuple(Parts(number=number, ranks=ranks) for number, ranks in self.parts.items()),
            step_seconds=step_seconds,
            stall_seconds=0.1,
            commit_seconds=self.commit_seconds,
            seen=0 if self.orders is None else self.orders.version,
        )

    def _is_hashing(self, rank: Rank) -> bool:
        return any(slot.state is SlotState.WRITTEN for slot in self.ring.of(rank).values())

    def _held(self, checkpoint: CheckpointId, rank: int, level: Level) -> Held:
        return Held(
            checkpoint=checkpoint,
            rank=Rank(rank),
            world_size=self.sizes[checkpoint],
            level=level,
            layout="l",
            shards=f"s{rank}",
            root=f"{checkpoint}/{rank}",
            nbytes=1,
        )
