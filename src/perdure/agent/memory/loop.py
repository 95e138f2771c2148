"""The memory server: trainers' messages, control's orders and finished threads in; slots, replicas and parts out.

One process per node. No decisions: `ring` says which slot may be lost, control what is committed.
"""

import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from perdure.agent.memory import door, transfer
from perdure.agent.memory.config import MemoryConfig
from perdure.agent.memory.copies import Copies
from perdure.agent.memory.drain import ARGV, Drain, DrainChild
from perdure.agent.memory.files import Folder, base_folder, default_folder
from perdure.agent.memory.gathering import Gathering, gather
from perdure.agent.memory.link import MemoryLink
from perdure.agent.memory.lock import Owner, remove_dead
from perdure.agent.memory.protecting import Parities
from perdure.agent.memory.rebuild import Lost, rebuild
from perdure.agent.memory.report import Reporter
from perdure.agent.memory.tier import Tier
from perdure.agent.memory.trainers import House, Talk
from perdure.host.proc import incarnation
from perdure.vocab.checkpoint import CheckpointId, Chosen, Group, Member
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire.bulk import Pace
from perdure.wire.channel import Channel, client_tls, listen
from perdure.wire.memory import Fetch, MemoryOrders
from perdure.wire.parity import Sheet
from perdure.wire.slots import SlotHeader
from perdure.wire.tokens import peer_token

TEND_EVERY: Seconds = 0.5
REPORT_STEPS_EVERY: Seconds = 1.0
"""Control must know about where the ranks are, to announce what all of them can still hear of."""
LAST_WORDS_AFTER: Seconds = 5.0
"""Trainers that are started again are back within it, as a rule."""
ALONE_AFTER: Seconds = 120.0
"""A control that was lost is started again long before."""
AFTER_DONE: Seconds = 1.0
"""A detached server whose trainers have all ended well waits so long for another one."""


class MemoryServer:
    """One life of one node's checkpoint memory."""

    def __init__(self, config: MemoryConfig, drain_argv: Sequence[str] = ARGV) -> None:
        self._config = config
        self._me = incarnation(os.getpid())
        self._path = config.folder or default_folder(config.job, config.node)
        self._token = peer_token(config.token)
        self._child = DrainChild(drain_argv)
        rate = config.replica_bytes_per_second
        self._pace = None if rate is None else Pace(rate)
        self._ended = anyio.Event()
        self._is_over = self._is_told = False
        self._reported_at = 0.0

    async def run(self) -> int:
        """Until SIGTERM, or with `linger` until nobody needs it; gives the exit code. Raises PerdureError."""
        folder = await anyio.to_thread.run_sync(self._open_folder)
        try:
            entrance = self._open_door(folder)
            listener = await listen(self._config.address, 0)
            async with anyio.create_task_group() as group:
                await self._assemble(folder, listener.address, group)
                for task in (
                    self._link.run,
                    self._copies.run,
                    self._parities.run,
                    self._drain.run,
                    self._tend,
                    self._wait_for_signals,
                ):
                    group.start_soon(task)
                group.start_soon(self._let_in, entrance, group)
                group.start_soon(
                    lambda: transfer.serve(
                        listener,
                        self._token,
                        lambda checkpoint, rank: self._tier.here(checkpoint).get(int(rank)),
                        job=self._config.job,
                        node=self._config.node,
                        folder=self._path,
                        spent=self._tier.is_spent,
                        parity=self._parities.path_of,
                        on_sealed=self._take_replica,
                    )
                )
                await self._ended.wait()
                group.cancel_scope.cancel()
        finally:
            folder.close(remove=self._is_over)
        return 0

    def _open_folder(self) -> Folder:
        parent = (incarnation(os.getppid()),) if self._config.linger is None else ()
        if os.path.dirname(os.path.dirname(os.path.realpath(self._path))) == base_folder():
            for gone in remove_dead(base_folder(), spare=self._path):
                door.complain(f"removed {gone}, which a dead run had left")
        return Folder(self._path, Owner(job=self._config.job, server=self._me, owners=self._config.owners or parent))

    def _open_door(self, folder: Folder) -> socket.socket:
        if self._config.socket_fd is not None:
            return door.inherited(self._config.socket_fd)
        return door.listen(self._config.socket or os.path.join(folder.path, "door"))

    async def _assemble(self, folder: Folder, address: Address, group: TaskGroup) -> None:
        config = self._config
        tier = self._tier = Tier(folder, config.hash_threads, group, self._spread)
        self._house = House(config.job, config.node, tier, self._fetch, self._rebuild, self._spread)
        self._copies = Copies(config.node, tier, self._offer)
        self._parities = Parities(config.job, config.node, tier, self._gather, self._wake_link)
        self._drain = Drain(
            config.job,
            self._house,
            tier,
            child=self._child,
            pace=config.drain_bytes_per_second,
            on_news=self._wake_link,
        )
        domain = config.domain or os.uname().nodename
        self._reporter = Reporter(
            config, self._me, address, domain, self._house, self._drain, self._copies, self._parities
        )
        tls = client_tls(config.tls_ca) if config.tls_ca is not None else None
        self._link = MemoryLink(Channel(config.control, config.token, tls), self._reporter.make, self._take_orders)
        tier.adopt(await anyio.to_thread.run_sync(folder.adopt))

    # --- in ----------------------------------------------------------------------------------------------------------

    async def _let_in(self, entrance: socket.socket, group: TaskGroup) -> None:
        with entrance:
            while True:
                group.start_soon(Talk(self._house, await door.accept(entrance)).run)

    def _take_orders(self, orders: MemoryOrders) -> None:
        self._tier.apply(orders)
        self._house.answer(orders)

    def _take_replica(self, node: NodeId, path: Path, header: SlotHeader) -> None:
        del node, path, header  # the folder itself is read for every report
        self._tier.settle()

    def _wake_link(self) -> None:
        self._link.wake()

    def _spread(self) -> None:
        """Something has changed: whoever may have to do something looks for itself."""
        for one in (self._link, self._copies, self._parities, self._drain):
            one.wake()

    async def _wait_for_signals(self) -> None:
        last: int = self._config.end_signal
        with anyio.open_signal_receiver(*{signal.SIGTERM, signal.SIGINT, last}) as signals:  # type: ignore[arg-type]
            async for number in signals:
                if number == last:
                    break
        self._is_told = True
        with anyio.move_on_after(self._config.grace):
            self._note_last_words(time.monotonic())
            while self._is_busy:
                with anyio.move_on_after(TEND_EVERY):
                    await self._tier.changed.wait()
        # Whoever is our parent ends us so when the job has ended here; a detached server may be started again.
        self._is_over = self._config.linger is None or self._house.is_done
        self._ended.set()

    async def _tend(self) -> None:
        """What no message tells: steps go on, and a detached server ends when nobody needs it."""
        while True:
            await anyio.sleep(TEND_EVERY)
            now = time.monotonic()
            if self._reporter.clock.read(self._tier.seats) and now - self._reported_at > REPORT_STEPS_EVERY:
                self._reported_at = now
                self._link.wake()
            self._note_last_words(now)
            self._note_away()
            linger = self._config.linger
            if linger is not None:  # control under `perdure run` tells the user; a desk has no terminal
                orders = self._tier.orders
                stored = () if orders is None or not orders.store_trouble else (orders.store_trouble,)
                self._house.tell((*self._reporter.troubles, *stored))
            if linger is None or self._house.talks or self._is_busy:
                continue
            if now - self._house.left_at > (min(AFTER_DONE, linger) if self._house.is_done else linger):
                self._is_over = True
                self._ended.set()

    def _note_away(self) -> None:
        """Without control nothing gets to storage: who waits for that is told when it has been away for long."""
        away = self._link.away
        text = f"control has not been reached for {away:.0f} s" if away > ALONE_AFTER else ""
        if bool(text) != bool(self._house.alone):
            self._house.alone = text
            self._tier.settle()

    def _note_last_words(self, now: float) -> None:
        """A detached server whose trainers have died, or that is to end, has what is in memory only brought to storage.

        Not at once: torchrun may be starting them again. An agent's server is told by control what the end is.
        """
        linger, house = self._config.linger, self._house
        if linger is None:
            return
        gone = now - house.left_at
        is_time = self._is_told or (not house.talks and LAST_WORDS_AFTER < gone < LAST_WORDS_AFTER + max(linger, 60.0))
        wanted = is_time and self._owes
        if wanted != house.last_words:
            house.last_words = wanted
            self._link.wake()

    @property
    def _owes(self) -> bool:
        """Whether the newest committed checkpoint is in memory only, though there is a storage."""
        orders = self._tier.orders
        if orders is None or orders.committed is None or not self._house.store:
            return False
        return orders.durable is None or orders.durable < orders.committed

    @property
    def _is_busy(self) -> bool:
        return self._tier.is_sealing or self._drain.is_busy or self._house.flushing or self._drain.owes

    # --- out ---------------------------------------------------------------------------------------------------------

    async def _fetch(
        self, addresses: Sequence[Address], checkpoint: CheckpointId, rank: Rank, chunks: Iterable[int], folder: str
    ) -> Path:
        return await transfer.fetch(addresses, self._token, checkpoint, rank, chunks, folder)

    async def _offer(self, address: Address, path: str, header: SlotHeader) -> None:
        await transfer.offer(address, self._token, self._config.node, path, header, pace=self._pace)

    async def _gather(self, path: str, checkpoint: CheckpointId, members: tuple[Member, ...]) -> Sheet:
        orders, own = self._tier.orders, self._tier.here(checkpoint)
        addresses = {} if orders is None else dict(orders.addresses)
        work = Gathering(self._config.job, self._config.node, checkpoint, members, own, addresses, self._token)
        return await gather(work, path)

    async def _rebuild(
        self, chosen: Chosen, group: Group, addresses: Mapping[NodeId, Address], wanted: Fetch, folder: str
    ) -> Path:
        assert chosen.checkpoint is not None
        slots = {
            rank: tuple(addresses[node] for node in nodes if node in addresses)
            for rank, nodes in chosen.holders.items()
        }
        lost = Lost(chosen.checkpoint, wanted.rank, group, dict(addresses), slots, self._token)
        return await rebuild(lost, wanted.chunks, folder)
