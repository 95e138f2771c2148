"""What one trainer and the server say to each other, from Attach to Close. The slots are the tier's business."""

import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from perdure.agent.memory.attaching import give_slots, read_layout
from perdure.agent.memory.door import Connection, EndedError, complain
from perdure.agent.memory.lock import is_alive
from perdure.agent.memory.tier import Seat, Tier
from perdure.errors import ConfigError, HostError, PerdureError, WireError
from perdure.vocab.checkpoint import CheckpointId, Chosen
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId, NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire.memory import (
    Attach,
    Attached,
    Close,
    Fetch,
    Fetched,
    Flush,
    Flushed,
    MemoryOrders,
    Policy,
    Refused,
    Restore,
    RestorePlan,
    Skipped,
    TrainerOut,
    Written,
)

ATTACH_WITHIN: Seconds = 10.0
"""A connection without an Attach for so long is closed."""
OLD_LIFE_WITHIN: Seconds = 5.0
"""How long an earlier process of the same rank may take to be gone, after its successor is here."""


class Brings(Protocol):
    """Fetches chunks of a slot from other nodes' memory servers (`transfer.fetch`). Raises PerdureError."""

    def __call__(
        self, addresses: Sequence[Address], checkpoint: CheckpointId, rank: Rank, chunks: Sequence[int], folder: str
    ) -> Awaitable[Path]: ...


class House:
    """What all trainers of this node share."""

    def __init__(self, job: JobId, node: NodeId, tier: Tier, fetch: Brings, on_news: Callable[[], None]) -> None:
        self.job, self.node, self.tier, self.fetch, self.on_news = job, node, tier, fetch, on_news
        self.policy, self.store, self.world_size = Policy(), "", 0
        self.talks: dict[Rank, Talk] = {}
        self.closed_well: set[Rank] = set()
        self.left_at = time.monotonic()
        """When the last trainer went; nobody has come yet: when we started."""
        self.making = anyio.Lock()
        """One trainer at a time gets slots: what is free is counted, then taken."""

    @property
    def flushing(self) -> bool:
        return any(talk.flushes for talk in self.talks.values())

    @property
    def is_done(self) -> bool:
        """All ranks that the present line has here have ended well."""
        return bool(self.closed_well) and not self.talks and self.closed_well >= self.tier.ring.members

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
        told = (attach.policy, attach.store, attach.world_size)
        if line == ring.line and told != (self.policy, self.store, self.world_size):
            raise ConfigError(
                f"rank {attach.rank} has another checkpoint policy, store or world size than the ranks before it; give"
                " all ranks the same"
            )
        if line > ring.line:
            self.closed_well.clear()
        self.policy, self.store, self.world_size = told


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
                case Written():
                    self._house.tier.write(seat, message.slot, message.checkpoint, message.stall)
                case Skipped():
                    self._house.tier.skip(seat, message.checkpoint)
                case Restore():
                    self._ask(seat, message)
                case Fetch():
                    group.start_soon(self._fetch, message)
                case Flush():
                    group.start_soon(self._flush, seat, message)
                case Close():
                    self._house.closed_well.add(seat.rank)
                    return
                case Attach():
                    raise WireError(f"process {self._link.pid} attached twice")

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
        seat.about = msgspec.structs.replace(seat.about, restoring=question.id or 1, restore_step=question.step)
        if self._house.tier.orders is not None:
            self.heard(self._house.tier.orders)
        self._house.on_news()

    def heard(self, orders: MemoryOrders) -> None:
        """Control's orders may answer a question."""
        seat, question = self._seat, self._question
        if seat is None or question is None or (orders.attempt, orders.generation) != seat.line:
            return
        if orders.chosen is not None:
            self._chosen = orders.chosen
            here = self._house.tier.here(orders.chosen.checkpoint)
            self._send.send_nowait(RestorePlan(id=question.id, chosen=orders.chosen, here=here))
        elif orders.refused:
            self._send.send_nowait(Refused(id=question.id, reason=orders.refused, corrupt=True))
        else:
            return
        self._question = None
        seat.about = msgspec.structs.replace(seat.about, restoring=0, restore_step=None)
        seat.begun = True
        self._house.tier.settle()

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
        if not addresses:
            raise HostError(f"no other node's memory has {chosen.checkpoint} of rank {wanted.rank}")
        folder = self._house.tier.folder.path
        return await self._house.fetch(addresses, chosen.checkpoint, wanted.rank, wanted.chunks, folder)

    # --- flush -------------------------------------------------------------------------------------------------------

    async def _flush(self, seat: Seat, wanted: Flush) -> None:
        self.flushes[wanted.id] = time.monotonic() + wanted.deadline
        self._house.on_news()
        with anyio.move_on_after(wanted.deadline):
            while self._house.store and not self._is_flushed(seat):
                await self._house.tier.changed.wait()
        error = ""
        if not self._house.store:
            error = "there is no storage tier; give run.checkpoint(store=...)"
        elif not self._is_flushed(seat):
            error = f"{self._newest(seat)} is not in storage after {wanted.deadline:g} s"
        del self.flushes[wanted.id]
        orders = self._house.tier.orders
        durable = orders.durable if orders is not None else None
        self._send.send_nowait(Flushed(id=wanted.id, checkpoint=durable, error=error))
        self._house.on_news()

    def _newest(self, seat: Seat) -> CheckpointId | None:
        """What should reach storage: the last that this trainer wrote, if all did, else the last committed one."""
        ring = self._house.tier.ring
        mine = [slot.checkpoint for slot in ring.of(seat.rank).values() if slot.checkpoint is not None]
        hoped = [one for one in mine if one not in ring.aborted and (one.attempt, one.generation) == seat.line]
        return max([*hoped, *([ring.committed] if ring.committed is not None else [])], default=None)

    def _is_flushed(self, seat: Seat) -> bool:
        newest, orders = self._newest(seat), self._house.tier.orders
        if newest is None:
            return True
        return orders is not None and orders.durable is not None and orders.durable >= newest
