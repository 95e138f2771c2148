"""The node's slots at work: what trainers, control and hashing threads tell goes into the ring, and what follows from
it into files and pages. The decisions are the ring's.
"""

import time
from collections.abc import Callable, Container, Mapping

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from perdure.agent.memory import ring as facts
from perdure.agent.memory.door import complain
from perdure.agent.memory.files import Folder, SlotFile, held
from perdure.agent.memory.page import GrantPage
from perdure.agent.memory.ring import Key, Line, Ring, Slot
from perdure.agent.memory.sameness import Sameness
from perdure.agent.memory.seal import seal, verify
from perdure.errors import CorruptCheckpointError, HostError
from perdure.vocab.checkpoint import Aside, CheckpointId, Held, Level, Shards, SlotState, put_together
from perdure.vocab.ids import Incarnation, Rank
from perdure.vocab.units import Seconds
from perdure.wire.memory import Attachment, MemoryOrders


class Seat:
    """One attached trainer: its page, and which slots it knows by which index."""

    def __init__(
        self, rank: Rank, line: Line, trainer: Incarnation, numbers: tuple[int, ...], about: Attachment
    ) -> None:
        self.rank, self.line, self.trainer, self.numbers, self.about = rank, line, trainer, numbers, about
        self.page = GrantPage()
        self.begun = False
        """It has restored, or does without: what was there before it came may be given to it, where the gate allows."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that are being read for long, and are not overwritten meanwhile."""

    checkpoint: CheckpointId
    keys: tuple[Key, ...]
    slots: Mapping[int, str]
    """Path by the rank that wrote it."""


class Tier:
    """One node's. Lives in the event loop; hashing and large files are left to threads."""

    def __init__(self, folder: Folder, hash_threads: int, group: TaskGroup, on_news: Callable[[], None]) -> None:
        self.folder, self._threads, self._group, self._on_news = folder, hash_threads, group, on_news
        self.ring = Ring()
        self.files: dict[Key, SlotFile] = {}
        self.seats: dict[Rank, Seat] = {}
        self.orders: MemoryOrders | None = None
        self.changed = anyio.Event()
        """Set, and made anew, with every change."""
        self.skipped: frozenset[CheckpointId] = frozenset()
        self.worlds: tuple[Shards, ...] = folder.worlds()
        self.asides: tuple[Aside, ...] = folder.asides()
        self.sameness = Sameness()
        self.stall: Seconds | None = None
        self.commit: Seconds | None = None
        self._written_at: dict[Key, tuple[CheckpointId, float]] = {}
        self._stalls: tuple[CheckpointId, Seconds] | None = None
        self._pinned: frozenset[CheckpointId] = frozenset()
        self._drained = 0
        """Number of the drain to which nothing more is needed from here."""
        self._hashing = anyio.CapacityLimiter(1)
        self._sealing = 0

    @property
    def is_sealing(self) -> bool:
        return self._sealing > 0

    def adopt(self, found: dict[Key, SlotFile]) -> None:
        """Take over what an earlier server has left."""
        for key, slot in found.items():
            self.files[key] = slot
            self.ring = facts.adopted(self.ring, {key: Slot()})
            self._look_at(key)
            if slot.header.state is SlotState.SEALED:
                self._group.start_soon(self._verify, key, slot.header.checkpoint)
        self.settle()

    # --- trainers ----------------------------------------------------------------------------------------------------

    def seat(self, seat: Seat) -> None:
        self.seats[seat.rank] = seat
        self.settle()

    def leave(self, seat: Seat) -> None:
        """A trainer has gone, well or not: what it was writing is torn, or whole after all."""
        if self.seats.get(seat.rank) is seat:
            del self.seats[seat.rank]
            self.look(seat.rank)
            self.settle()
        seat.page.close()

    def look(self, rank: Rank) -> None:
        """Read the headers of a rank without a trainer: what was given to it may be anything now."""
        for number in self.ring.of(rank):
            self._look_at((rank, number))
        self.ring = facts.trainer_gone(self.ring, rank)

    def write(self, seat: Seat, index: int, checkpoint: CheckpointId, stall: Seconds) -> None:
        """A trainer says that it has written slot `index`."""
        seat.begun = True
        key = (seat.rank, seat.numbers[index] if 0 <= index < len(seat.numbers) else -1)
        slot = self.ring.slots.get(key)
        if slot is None or not slot.given:
            complain(f"rank {seat.rank} wrote into slot {index}, which it was not given")
            return
        self._note_stall(checkpoint, stall)
        self._look_at(key)
        self.settle()

    def skip(self, seat: Seat, checkpoint: CheckpointId) -> None:
        seat.begun = True
        self.skipped |= {checkpoint}
        self.settle()

    def set_aside(self, aside: Aside) -> None:
        """What a trainer restored is bad. Raises HostError where that cannot be kept."""
        self._keep_asides((aside,))
        self.settle()

    # --- control -----------------------------------------------------------------------------------------------------

    def apply(self, orders: MemoryOrders) -> None:
        """Take over what control wants."""
        self.orders = orders
        line = (orders.attempt, int(orders.generation))
        ring = facts.aborted(facts.committed(self.ring, orders.committed), orders.aborted)
        if orders.chosen is not None:
            ring = facts.chosen(ring, line, orders.chosen.checkpoint, orders.turn)
        self.ring = ring
        self._reserve()
        done = orders.committed
        self.skipped = frozenset(
            one for one in self.skipped if one not in ring.aborted and (done is None or one > done)
        )
        self._keep_worlds(orders.world)
        try:
            self._keep_asides(orders.asides)
        except HostError as problem:
            complain(str(problem))
        if done is not None and ring.line > (0, 0) and done.line >= ring.branch:
            self._drop_old_copies(done)
        self.settle()

    def held(self) -> tuple[Held, ...]:
        """Every copy that this node can give out."""
        own = tuple(
            held(self.files[key].header, slot.level or Level.SEALED)
            for key, slot in sorted(self.ring.slots.items())
            if slot.state is SlotState.SEALED and slot.checkpoint is not None
        )
        return own + tuple(held(header, Level.SEALED) for header in self.folder.replicas().values())

    def here(self, checkpoint: CheckpointId | None) -> dict[int, str]:
        """Paths of the copies of one checkpoint, by the rank that wrote them; own ones rather than replicas."""
        paths = {
            int(header.rank): path
            for path, header in self.folder.replicas().items()
            if header.checkpoint == checkpoint is not None
        }
        if checkpoint is not None:
            paths.update({int(key[0]): self.files[key].path for key in self.ring.holding(checkpoint)})
        return paths

    # --- pins and copies ---------------------------------------------------------------------------------------------

    def pin(self, checkpoint: CheckpointId, ranks: Container[int]) -> Pin:
        """Keep the copies here of some ranks' slots until `unpin`, own ones rather than replicas."""
        keys = tuple(key for key in self.ring.holding(checkpoint) if key[0] in ranks)
        for key in keys:
            self.ring = facts.pinned(self.ring, key)
        slots = {rank: path for rank, path in self.here(checkpoint).items() if rank in ranks}
        if len(slots) > len(keys):
            self._pinned |= {checkpoint}  # else replicas need not wait for a drain that reads own slots only
        return Pin(checkpoint=checkpoint, keys=keys, slots=slots)

    def unpin(self, pin: Pin) -> None:
        self._pinned -= {pin.checkpoint}
        for key in pin.keys:
            self.ring = facts.unpinned(self.ring, key)
        self.settle()

    def drained(self, number: int) -> None:
        """What this node had to write for that drain is written."""
        if self._drained != number:
            self._drained = number
            self._reserve()
            self.settle()

    def _reserve(self) -> None:
        """What is to be drained may be given away only when it is written: the order says so before we come to it."""
        order = None if self.orders is None else self.orders.drain
        waits = order is not None and not order.is_written and order.number != self._drained
        self.ring = facts.draining(self.ring, order.checkpoint if order is not None and waits else None)

    def is_spent(self, checkpoint: CheckpointId) -> bool:
        """Whether a replica of it may be overwritten. Called in threads: both values are replaced whole."""
        return checkpoint not in self._pinned and facts.is_spent(self.ring, checkpoint)

    def replicated(self, key: Key, checkpoint: CheckpointId, *, is_so: bool = True) -> None:
        self.ring = facts.replicated(self.ring, key, checkpoint, is_so=is_so)
        if is_so:
            self._note_commit(key, checkpoint)
        self.settle()

    # --- what follows ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give out what may be given, remove what nobody needs, show it on the pages, tell control."""
        for key in facts.removable(self.ring):
            self._group.start_soon(anyio.to_thread.run_sync, self.folder.remove, self.forget(key))
        for seat in self.seats.values():
            self._show(seat, self._grant(seat))
        self.changed.set()
        self.changed = anyio.Event()
        self._on_news()

    def forget(self, key: Key) -> SlotFile:
        """It is no slot any more; the caller removes the file."""
        self.ring = facts.removed(self.ring, key)
        return self.files.pop(key)

    def _grant(self, seat: Seat) -> int | None:
        number = facts.grant(self.ring, seat.rank)
        if number is None:
            return None
        key = (seat.rank, number)
        slot = self.ring.slots[key]
        if slot.given:
            return number
        if slot.checkpoint is not None and not seat.begun:
            return None  # what was here before is not touched until all have restored
        if self.files[key].header.state is not SlotState.FREE:
            self.files[key].clear()
        self.ring = facts.given(self.ring, key)
        return number

    def _show(self, seat: Seat, number: int | None) -> None:
        orders, committed = self.orders, None
        if orders is None or (orders.attempt, orders.generation) != seat.line:
            seat.page.show(None, None, _index(seat, number), None)
            return
        done = orders.committed
        if done is not None and done.life == seat.line and done.line == self.ring.branch:
            committed = done.step
        seat.page.show(orders.cadence, orders.once, _index(seat, number), committed)

    def _look_at(self, key: Key) -> None:
        """Believe the header of a slot that is not hashed, nor known to be sealed."""
        slot, known = self.files[key], self.ring.slots[key]
        if known.state in (SlotState.WRITTEN, SlotState.SEALED):
            return
        try:
            header = slot.reread()
        except CorruptCheckpointError as problem:
            complain(f"{slot.path} is given up: {problem}")
            self._group.start_soon(anyio.to_thread.run_sync, self.folder.remove, self.forget(key))
            return
        if header.checkpoint is None or header.state in (SlotState.FREE, SlotState.WRITING):
            if header.state is not SlotState.FREE:
                slot.clear()
            self.ring = facts.torn(self.ring, key)
            return
        self.ring = facts.written(self.ring, key, header.checkpoint)
        if header.state is SlotState.SEALED:
            self.ring = facts.sealed(self.ring, key)
            return
        self._written_at[key] = header.checkpoint, time.monotonic()
        self._sealing += 1
        self._group.start_soon(self._seal, key, header.checkpoint)

    async def _seal(self, key: Key, checkpoint: CheckpointId) -> None:
        slot = self.files[key]
        try:
            data = await anyio.to_thread.run_sync(seal, slot, checkpoint, self._threads, limiter=self._hashing)
        except (CorruptCheckpointError, OSError) as problem:
            complain(f"{checkpoint} of rank {key[0]} is lost: {problem}")
            slot.clear()
            self.ring = facts.torn(self.ring, key)
        else:
            self.ring = facts.sealed(self.ring, key)
            self.sameness.note(key[0], checkpoint, data)
            if self.orders is None or not self.orders.partners:
                self._note_commit(key, checkpoint)
        finally:
            self._sealing -= 1
        self.settle()

    async def _verify(self, key: Key, checkpoint: CheckpointId | None) -> None:
        """What was sealed by another life is read once before it is needed."""
        slot = self.files[key]
        try:
            bad = await anyio.to_thread.run_sync(verify, slot, self._threads, limiter=self._hashing)
            problem = f"chunks {', '.join(map(str, bad[:8]))} of {slot.path} are not what was sealed" if bad else ""
        except (CorruptCheckpointError, OSError, ValueError) as exc:
            problem = str(exc)
        known = self.ring.slots.get(key)
        if problem and known is not None and known.state is SlotState.SEALED and known.checkpoint == checkpoint:
            complain(f"{checkpoint} of rank {key[0]} is lost here: {problem}")
            slot.clear()
            self.ring = facts.torn(self.ring, key)
            self.settle()

    # --- small notes -------------------------------------------------------------------------------------------------

    def _note_stall(self, checkpoint: CheckpointId, stall: Seconds) -> None:
        before = self._stalls[1] if self._stalls is not None and self._stalls[0] == checkpoint else 0.0
        self._stalls = checkpoint, max(before, stall)
        self.stall = self._stalls[1]

    def _note_commit(self, key: Key, checkpoint: CheckpointId) -> None:
        noted = self._written_at.get(key)
        if noted is not None and noted[0] == checkpoint:
            self.commit = time.monotonic() - noted[1]

    def _keep_worlds(self, world: Shards | None) -> None:
        needed = {one.checkpoint.life for one in self.held()} | {self.ring.line}
        if self.orders is not None and self.orders.drain is not None:
            needed.add(self.orders.drain.checkpoint.life)  # who commits it need not have a part of it
        if world is not None and world not in self.worlds:
            self.folder.keep_world(world)
            self.worlds = (*self.worlds, world)
        for one in self.worlds:
            if (one.attempt, one.generation) not in needed and one != world:
                self.folder.drop_world(one)
        self.worlds = tuple(one for one in self.worlds if (one.attempt, one.generation) in needed or one == world)

    def _keep_asides(self, more: tuple[Aside, ...]) -> None:
        asides = put_together((*self.asides, *more))
        if asides != self.asides:
            self.folder.keep_asides(asides)
            self.asides = asides

    def _drop_old_copies(self, done: CheckpointId) -> None:
        """The present line has a checkpoint of its own: nobody reads replicas and borrowed parts of earlier ones."""
        for path, header in self.folder.replicas().items():
            old = header.checkpoint
            if (
                old not in self._pinned
                and old is not None
                and (old.attempt, old.generation) < (done.attempt, done.generation)
            ):
                self.folder.drop(path)
        self.folder.drop_borrowed()


def _index(seat: Seat, number: int | None) -> int | None:
    return seat.numbers.index(number) if number in seat.numbers else None


def attachment(seat: Seat, ring: Ring) -> Attachment:
    """What control is told of a trainer. Its questions wait until what it had written before has been hashed."""
    hashing = any(slot.state is SlotState.WRITTEN for slot in ring.of(seat.rank).values())
    restoring, flushing = (0, False) if hashing else (seat.about.restoring, seat.about.flushing)
    return msgspec.structs.replace(seat.about, step=seat.page.step, restoring=restoring, flushing=flushing)
