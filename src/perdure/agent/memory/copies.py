"""Replicas of this node's slots: what is sealed here is offered to the partners that control names, until they have it.

A slow, stopped or dead partner costs an acknowledgement that does not come. How bytes travel: `transfer`.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from perdure.agent.memory.asking import NotNowError
from perdure.agent.memory.ring import Key, Ring, is_spent
from perdure.agent.memory.tier import Tier
from perdure.errors import PerdureError
from perdure.vocab.checkpoint import CheckpointId, Level, SlotState
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Seconds
from perdure.wire.slots import SlotHeader

FIRST_RETRY: Seconds = 0.5
LONGEST_RETRY: Seconds = 10.0
SOON: Seconds = 0.05
"""First wait for a partner that is there and has no room for one more yet: the same orders free it there and here, and
it may get them a moment later. Waiting as for a dead one, no step of a short-stepped job was ever whole for half a
minute (2026-12-01)."""

Offer = Callable[[Address, str, SlotHeader], Awaitable[None]]
"""Sends the sealed slot at that path; returns when the other side has verified and sealed it. Raises PerdureError."""
Errand = tuple[Key, Address]


class Copies:
    """`run` is its task; `wake` tells it that something has changed."""

    def __init__(self, node: NodeId, tier: Tier, offer: Offer) -> None:
        self._node, self._tier, self._offer = node, tier, offer
        self._acked: dict[Errand, CheckpointId] = {}
        self._under_way: set[Errand] = set()
        self._retry: dict[Address, Seconds] = {}
        self._news = anyio.Event()
        self.trouble = ""

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Never ends by itself."""
        async with anyio.create_task_group() as group:
            while True:
                self._news = anyio.Event()
                self._settle_levels()
                self._begin(group)
                await self._news.wait()

    @property
    def _partners(self) -> tuple[Address, ...]:
        orders = self._tier.orders
        return () if orders is None else orders.partners.get(self._node, ())

    def _begin(self, group: TaskGroup) -> None:
        for address in self._partners:
            for rank in {rank for rank, _ in self._tier.ring.slots}:
                key = next_to_send(self._tier.ring, rank, partial(self._has, address))
                if key is not None and not any(e[0][0] == rank and e[1] == address for e in self._under_way):
                    self._under_way.add((key, address))
                    group.start_soon(self._send, key, address)

    async def _send(self, key: Key, address: Address) -> None:
        slot, checkpoint = self._tier.files[key], self._tier.ring.slots[key].checkpoint
        try:
            await self._offer(address, slot.path, slot.header)
        except PerdureError as problem:
            if self._is_there_still(key, checkpoint):
                self.trouble = f"a replica of rank {key[0]} does not reach {address}: {problem}"
                await self._wait(address, is_soon=isinstance(problem, NotNowError))
        else:
            assert checkpoint is not None
            self._acked[key, address] = checkpoint
            self._retry.pop(address, None)
            self.trouble = ""
        finally:
            self._under_way.discard((key, address))
        self.wake()

    def _is_there_still(self, key: Key, checkpoint: CheckpointId | None) -> bool:
        """What is not there any more need not be sent: the next one is looked for at once."""
        slot = self._tier.ring.slots.get(key)
        return slot is not None and slot.state is SlotState.SEALED and slot.checkpoint == checkpoint

    async def _wait(self, address: Address, *, is_soon: bool) -> None:
        """Longer with each failure; for a partner that is there only until control says something new."""
        wait = self._retry.get(address, SOON if is_soon else FIRST_RETRY)
        self._retry[address] = min(2 * wait, LONGEST_RETRY)
        before = self._tier.ring.committed, self._tier.ring.aborted
        with anyio.move_on_after(wait):
            while not is_soon or (self._tier.ring.committed, self._tier.ring.aborted) == before:
                await self._tier.changed.wait()
            self._retry.pop(address, None)

    def _has(self, address: Address, key: Key) -> bool:
        slot = self._tier.ring.slots.get(key)
        return slot is not None and self._acked.get((key, address)) == slot.checkpoint

    def _settle_levels(self) -> None:
        """A slot is replicated while every partner that there is now has it."""
        partners = self._partners
        for key, slot in tuple(self._tier.ring.slots.items()):
            if slot.state is SlotState.SEALED and slot.checkpoint is not None:
                is_so = bool(partners) and all(self._has(address, key) for address in partners)
                if is_so != (slot.level is Level.REPLICATED):
                    self._tier.replicated(key, slot.checkpoint, is_so=is_so)


def next_to_send(ring: Ring, rank: int, has: Callable[[Key], bool]) -> Key | None:
    """The oldest sealed slot of a rank that is still worth sending: what is committed comes before what hopes to be.

    The partner keeps two per rank. One after the other in this order never asks it to give up the committed one.
    """
    candidates = [
        (slot.checkpoint, key)
        for key, slot in ring.slots.items()
        if key[0] == rank
        and slot.state is SlotState.SEALED
        and slot.checkpoint is not None
        and not is_spent(ring, slot.checkpoint)
        and not has(key)
    ]
    return min(candidates, default=(None, None))[1]
