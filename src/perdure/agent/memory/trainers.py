"""What one trainer and the server say to each other, from Attach to Close. The slots are the tier's business."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from perdure.agent.memory.attaching import give_slots, read_layout
from perdure.agent.memory.bringing import Brings, Rebuilds
from perdure.agent.memory.door import Connection, EndedError, complain
from perdure.agent.memory.lock import is_alive
from perdure.agent.memory.tier import Seat, Tier
from perdure.errors import ConfigError, HostError, PerdureError, WireError
from perdure.store import checkpoints
from perdure.store.medium import is_lasting, reason_of
from perdure.vocab.checkpoint import CheckpointId, Chosen
from perdure.vocab.ids import JobId, NodeId, Rank
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.memory import (
    Attach,
    Attached,
    Close,
    Discard,
    Discarded,
    Fetch,
    Fetched,
    Flush,
    Flushed,
    HasRestored,
    MemoryOrders,
    Policy,
    Refused,
    Restore,
    RestorePlan,
    Skipped,
    TrainerOut,
    Troubled,
    Trusted,
    Written,
)
from perdure.wire.transfer import shown

ATTACH_WITHIN: Seconds = 10.0
"""A connection without an Attach for so long is closed."""
PROBE_WITHIN: Seconds = 20.0
"""For a store to show that it can be written to, before a trainer gets its slots without knowing."""
OLD_LIFE_WITHIN: Seconds = 5.0
"""How long an earlier process of the same rank may take to be gone, after its successor is here."""


class House:
    """What all trainers of this node share."""

    def __init__(
        self, job: JobId, node: NodeId, tier: Tier, fetch: Brings, rebuild: Rebuilds, on_news: Callable[[], None]
    ) -> None:
        self.job, self.node, self.tier, self.on_news = job, node, tier, on_news
        self.fetch, self.rebuild = fetch, rebuild
        self.policy, self.store, self.world_size = Policy(), "", 0
        self.talks: dict[Rank, Talk] = {}
        self.closed_well: set[Rank] = set()
        self.last_words = False
        """The trainers are gone, perhaps for good, and what was committed last is not in storage."""
        self.left_at = time.monotonic()
        """When the last trainer went; nobody has come yet: when we started."""
        self.making = anyio.Lock()
        """One trainer at a time gets slots: what is free is counted, then taken."""
        self.alone = ""
        """Why control cannot have anything stored now."""
        self.trouble = ""
        """Why the store could not be used when a trainer came; it is tried all the same."""
        self._probed = ""
        self._said: set[str] = set()

    @property
    def flushing(self) -> bool:
        return self.last_words or any(talk.flushes for talk in self.talks.values())

    @property
    def is_done(self) -> bool:
        """All ranks that the present line has here have ended well."""
        return bool(self.closed_well) and not self.talks and self.closed_well >= self.tier.ring.members

    async def probe(self, store: str, least: Bytes, *, is_first: bool) -> None:
        """Find out whether the store can be written to, once. Raises ConfigError where it refuses for good.

        Only in the first generation: a job that has trained goes on training, whatever has become of the store.
        """
        if store in ("", self._probed):
            return
        self.trouble = ""
        try:
            with anyio.fail_after(PROBE_WITHIN):
                await anyio.to_thread.run_sync(checkpoints.probe, store, least, abandon_on_cancel=True)
        except TimeoutError:
            self.trouble = f"the store {store} has not answered within {PROBE_WITHIN:g} s; it is tried again"
        except (PerdureError, OSError) as problem:
            said = str(problem) if isinstance(problem, PerdureError) else reason_of(problem)
            text = said if store in said else f"the store {store} cannot be used: {said}"
            if is_lasting(problem) and is_first:
                raise ConfigError(text) from problem
            self.trouble = f"{text}; it is tried again"
        self._probed = store

    def tell(self, troubles: Iterable[str]) -> None:
        """Have the user see them, each once, by way of a trainer that is here."""
        talk = next((talk for _, talk in sorted(self.talks.items())), None)
        if talk is not None:
            for text in set(troubles) - self._said:
                self._said.add(text)
                talk.tell(text)

    def answer(self, orders: MemoryOrders) -> None:
        """Control has news: who waits for it is told."""
        for talk in tuple(self.talks.values()):
            talk.heard(orders)

    def admit(self, attach: Attach) -> None:
        """Raise ConfigError where this trainer is none of ours."""
        line, ring = (attach.attempt, int(attach.generation)), self.tier.ring
        if attach.job != self.job:
            raise ConfigError(f"this is the memory server of job {self.job}, not of {attach.job}: check PERDURE_MEMORY")
        if line < ring.line:
            raise ConfigError(
                f"rank {attach.rank} is of generation {attach.generation}, which {ring.line[1]} has followed"
            )
        if not 0 <= attach.rank < attach.world_size or not 1 <= attach.local_world_size <= attach.world_size:
            raise ConfigError(f"rank {attach.rank} is none of a world of {attach.world_size}")
        if attach.policy.xor and attach.policy.replicas:
            raise ConfigError(f"rank {attach.rank} wants replicas and xor; they protect from the same loss: give one")
        told = (attach.policy, attach.store, attach.world_size)
        if line == ring.line and told != (self.policy, self.store, self.world_size):
            raise ConfigError(
                f"rank {attach.rank} has another checkpoint policy, store or world size than the ranks before it; give"
                " all ranks the same"
            )

    def follow(self, attach: Attach) -> None:
        """What this trainer was told counts for the node: it has been admitted, and its store can be used."""
        if (attach.attempt, int(attach.generation)) > self.tier.ring.line:
            self.closed_well.clear()
        self.policy, self.store, self.world_size = attach.policy, attach.store, attach.world_size


class Talk:
    """One connection. `run` is its task; it ends with the connection and never raises for what a trainer does."""

    def __init__(self, house: House, link: Connection) -> None:
        self._house, self._link = house, link
        self._seat: Seat | None = None
        self._question: Restore | None = None
        self._chosen: Chosen | None = None
        self.flushes: dict[int, float] = {}
        """Deadline on the monotonic clock, by the question's number."""
        self._send, self._outbox = anyio.create_memory_object_stream[TrainerOut](math.inf)
        self._ended = anyio.Event()

    async def run(self) -> None:
        try:
            seat = await self._attach()
            async with anyio.create_task_group() as group:
                group.start_soon(self._post)
                await self._listen(seat, group)
                group.cancel_scope.cancel()
        except* EndedError:
            pass  # the ordinary end
        except* WireError as problems:
            complain(str(problems.exceptions[0]))
        finally:
            self._leave()

    async def _listen(self, seat: Seat, group: TaskGroup) -> None:
        while True:
            message, fds = await self._link.receive()
            for fd in fds:
                os.close(fd)
            match message:
                case Fetch():
                    group.start_soon(self._fetch, message)
                case Flush():
                    group.start_soon(self._flush, seat, message)
                case Close():
                    self._house.closed_well.add(seat.rank)
                    return
                case Attach():
                    raise WireError(f"process {self._link.pid} attached twice")
                case _:
                    self._note(seat, message)

    def _note(self, seat: Seat, message: Written | Skipped | Restore | HasRestored | Trusted | Discard) -> None:
        tier = self._house.tier
        match message:
            case Written():
                tier.write(seat, message.slot, message.checkpoint, message.stall)
            case Skipped():
                tier.skip(seat, message.checkpoint)
            case HasRestored():
                seat.about = msgspec.structs.replace(seat.about, restored=message)
                self._house.on_news()
            case Restore():
                self._ask(seat, message)
            case Trusted():
                seat.begun = True
                tier.settle()
            case Discard():
                self._set_aside(seat, message)

    def tell(self, trouble: str) -> None:
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._send.send_nowait(Troubled(text=trouble))

    async def _post(self) -> None:
        async for message in self._outbox:
            await self._link.send(message)

    # --- attach ------------------------------------------------------------------------------------------------------

    async def _attach(self) -> Seat:
        try:
            with anyio.fail_after(ATTACH_WITHIN):
                attach, fds = await self._link.receive()
        except TimeoutError:
            raise WireError(f"process {self._link.pid} connected and said nothing for {ATTACH_WITHIN:g} s") from None
        try:
            if not isinstance(attach, Attach) or len(fds) != 1:
                raise WireError(f"process {self._link.pid} did not begin with an Attach and its layout")
            layout, text = await anyio.to_thread.run_sync(read_layout, attach, fds[0])
            async with self._house.making:
                await self._follow(attach)
                self._house.admit(attach)
                await self._house.probe(attach.store, layout.data_bytes, is_first=attach.generation <= 1)
                self._house.follow(attach)
                seat = self._seat = await give_slots(self._house.tier, attach, layout, text)
                self._house.talks[seat.rank] = self
        except (ConfigError, HostError) as problem:
            await self._link.send(Refused(reason=str(problem)))
            raise EndedError("refused") from problem
        finally:
            for fd in fds:
                os.close(fd)
        self._house.closed_well.discard(seat.rank)
        tier = self._house.tier
        tier.seat(seat)
        files = [tier.files[seat.rank, number] for number in seat.numbers]
        answer = Attached(slots=len(files), file_bytes=files[0].header.file_bytes, durable=bool(attach.store))
        await self._link.send(answer, (seat.page.fd, *(slot.fd for slot in files)))
        return seat

    async def _follow(self, attach: Attach) -> None:
        """End the talk with an earlier life of this rank. Raises ConfigError where that life goes on."""
        before = self._house.talks.get(attach.rank)
        if before is None or before._seat is None:
            return
        trainer = before._seat.trainer
        if trainer == attach.trainer or not is_alive(trainer):
            before._link.close()
        with anyio.move_on_after(OLD_LIFE_WITHIN):
            await before._ended.wait()
        if not before._ended.is_set():
            raise ConfigError(f"rank {attach.rank} is process {trainer.pid} already, which is alive; end it first")

    def _leave(self) -> None:
        house, seat = self._house, self._seat
        if seat is not None:
            if house.talks.get(seat.rank) is self:
                del house.talks[seat.rank]
            house.left_at = time.monotonic()
            house.tier.leave(seat)
        self._link.free()
        self._send.close()
        self._outbox.close()
        self._ended.set()
        house.on_news()

    # --- restore -----------------------------------------------------------------------------------------------------

    def _ask(self, seat: Seat, question: Restore) -> None:
        self._question = question
        seat.begun = False  # what it may want is not given away from here on
        seat.about = msgspec.structs.replace(seat.about, restoring=question.number, restore_step=question.step)
        if self._house.tier.orders is not None:
            self.heard(self._house.tier.orders)
        self._house.on_news()

    def heard(self, orders: MemoryOrders) -> None:
        """Control's orders may answer a question."""
        seat, question = self._seat, self._question
        if seat is None or question is None or (orders.attempt, orders.generation) != seat.line:
            return
        if orders.question < question.number:
            return
        turn = seat.about.turn
        if orders.question > question.number:
            why = f"the other ranks have called restore() more often than rank {seat.rank}; call it on all ranks"
            self._send.send_nowait(Refused(id=question.id, reason=why, corrupt=True))
        elif orders.chosen is not None:
            self._chosen, turn = orders.chosen, orders.turn
            here = self._house.tier.here(orders.chosen.checkpoint)
            self._send.send_nowait(RestorePlan(id=question.id, chosen=orders.chosen, turn=turn, here=here))
        else:
            self._send.send_nowait(Refused(id=question.id, reason=orders.refused, corrupt=True))
        self._question = None
        seat.about = msgspec.structs.replace(seat.about, restoring=0, restore_step=None, turn=turn)
        seat.begun = not question.hold
        self._house.tier.settle()

    def _set_aside(self, seat: Seat, wanted: Discard) -> None:
        if wanted.aside.line[:2] != seat.line:
            reason = f"rank {seat.rank} sets aside what another generation restored"
            self._send.send_nowait(Refused(id=wanted.id, reason=reason))
            return
        try:
            reason = shown(wanted.aside.reason)
            self._house.tier.set_aside(msgspec.structs.replace(wanted.aside, reason=reason))
        except HostError as problem:
            self._send.send_nowait(Refused(id=wanted.id, reason=str(problem)))
        else:
            self._send.send_nowait(Discarded(id=wanted.id))

    async def _fetch(self, wanted: Fetch) -> None:
        try:
            path = await self._bring(wanted)
        except (PerdureError, OSError) as problem:
            self._send.send_nowait(Fetched(id=wanted.id, error=str(problem) or type(problem).__name__))
        else:
            self._send.send_nowait(Fetched(id=wanted.id, path=str(path)))

    async def _bring(self, wanted: Fetch) -> Path:
        orders, chosen = self._house.tier.orders, self._chosen
        if chosen is None or chosen.checkpoint is None or orders is None:
            raise ConfigError("nothing has been chosen that could be fetched")
        nodes = [node for node in chosen.holders.get(int(wanted.rank), ()) if node != self._house.node]
        addresses = [orders.addresses[node] for node in nodes if node in orders.addresses]
        folder, problem = self._house.tier.folder.path, ""
        if addresses:
            try:
                return await self._house.fetch(addresses, chosen.checkpoint, wanted.rank, wanted.chunks, folder)
            except WireError as exc:
                problem = str(exc)
        group = next((one for one in chosen.groups if wanted.rank in one.rebuildable(chosen.holders)), None)
        if group is None:
            raise HostError(problem or f"no other node's memory has {chosen.checkpoint} of rank {wanted.rank}")
        return await self._house.rebuild(chosen, group, orders.addresses, wanted, folder)

    # --- flush -------------------------------------------------------------------------------------------------------

    async def _flush(self, seat: Seat, wanted: Flush) -> None:
        """Wait for storage: until it is there, until control says that it will not be, or for as long as asked."""
        self.flushes[wanted.id] = time.monotonic() + wanted.deadline
        seat.about = msgspec.structs.replace(seat.about, flushing=True)
        self._house.on_news()
        with anyio.move_on_after(wanted.deadline):
            while self._house.store and not self._is_flushed(seat) and not self._unstorable(seat):
                await self._house.tier.changed.wait()
        error = ""
        if not self._house.store:
            error = "there is no storage tier; give run.checkpoint(store=...)"
        elif not self._is_flushed(seat):
            error = self._unstorable(seat) or f"{self._newest(seat)} is not in storage after {wanted.deadline:g} s"
        del self.flushes[wanted.id]
        seat.about = msgspec.structs.replace(seat.about, flushing=bool(self.flushes))
        orders = self._house.tier.orders
        durable = orders.durable if orders is not None else None
        self._send.send_nowait(Flushed(id=wanted.id, checkpoint=durable, error=error))
        self._house.on_news()

    def _unstorable(self, seat: Seat) -> str:
        """Why waiting has no sense any more; empty: it has. An answer from before we began to wait is empty."""
        orders = self._house.tier.orders
        if orders is None or (orders.attempt, orders.generation) != seat.line:
            return self._house.alone
        return orders.unstorable or self._house.alone

    def _newest(self, seat: Seat) -> CheckpointId | None:
        """What should reach storage: the last that this trainer wrote, if all did, else the last committed one."""
        ring = self._house.tier.ring
        mine = [slot.checkpoint for slot in ring.of(seat.rank).values() if slot.checkpoint is not None]
        hoped = [one for one in mine if one not in ring.aborted and one.life == seat.line]
        return max([*hoped, *([ring.committed] if ring.committed is not None else [])], default=None)

    def _is_flushed(self, seat: Seat) -> bool:
        newest, orders = self._newest(seat), self._house.tier.orders
        if newest is None:
            return True
        return orders is not None and orders.durable is not None and orders.durable >= newest
