"""The way to storage: control names a checkpoint, a child with torch writes this node's part, one node commits it.

The child (`python -m perdure.trainer.checkpoint.drain`) lives on for the next time; one that dies is an error and is
started again. What is written, and how the store works, is the child's and `store.checkpoints`' business.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from perdure.agent.memory.door import complain
from perdure.agent.memory.tier import Tier
from perdure.agent.memory.trainers import House
from perdure.errors import HostError, PerdureError
from perdure.store import checkpoints, retention
from perdure.vocab.checkpoint import CheckpointId, Stored
from perdure.vocab.ids import JobId, Rank
from perdure.vocab.units import Seconds
from perdure.wire.memory import DrainReply, DrainRequest

T = TypeVar("T")
ARGV = (sys.executable, "-P", "-m", "perdure.trainer.checkpoint.drain")
REPLY_WITHIN: Seconds = 1800.0
"""For one part: as long as control waits for it."""
LINE_LIMIT = 1 << 20
TRIES = 3
"""Of a part, before control is told that it has failed and may choose a newer one."""
FIRST_RETRY: Seconds = 0.5
LONGEST_RETRY: Seconds = 10.0


class DrainChild:
    """The process that writes. One request at a time."""

    def __init__(self, argv: Sequence[str] = ARGV) -> None:
        self._argv = argv
        self._process: Process | None = None
        self._lines: BufferedByteReceiveStream | None = None
        self._is_warm = False
        self._asked = 0

    async def start(self) -> None:
        """Have it run. It needs seconds to import torch: long before the first drain, which may be the last."""
        if self._process is not None and self._process.returncode is None:
            return
        await self.close()
        self._process = await anyio.open_process(self._argv, stderr=None)
        assert self._process.stdout is not None
        self._lines, self._is_warm = BufferedByteReceiveStream(self._process.stdout), False

    async def ask(self, request: DrainRequest) -> DrainReply:
        """Its answer; a dead or silent child is an answer with an error. It is started where there is none."""
        try:
            with anyio.fail_after(REPLY_WITHIN):
                return await self._ask(request)
        except TimeoutError:
            problem = f"the drain did not answer within {REPLY_WITHIN:g} s"
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            problem = f"the drain has died ({type(exc).__name__}{self._code()}); it is started again"
        except (anyio.IncompleteRead, anyio.DelimiterNotFound, msgspec.DecodeError) as exc:
            problem = f"the drain has died in the middle of an answer ({type(exc).__name__})"
        await self.close()
        return DrainReply(id=request.id, error=problem)

    async def close(self) -> None:
        """It ends by itself too, when its input does."""
        process, self._process, self._lines = self._process, None, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()

    async def _ask(self, request: DrainRequest) -> DrainReply:
        await self.start()
        if not self._is_warm:
            await self._hear(0)
            self._is_warm = True
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked += 1
        await self._process.stdin.send(msgspec.json.encode(msgspec.structs.replace(request, id=self._asked)) + b"\n")
        return await self._hear(self._asked)

    async def _hear(self, wanted: int) -> DrainReply:
        assert self._lines is not None
        while True:
            line = await self._lines.receive_until(b"\n", LINE_LIMIT)
            reply = msgspec.json.decode(line, type=DrainReply)
            if reply.id == wanted:
                return reply

    def _code(self) -> str:
        return "" if self._process is None or self._process.returncode is None else f", {self._process.returncode}"


class Drain:
    """One node's side of the storage tier. `run` is its task; `wake` tells it that something has changed."""

    def __init__(
        self,
        job: JobId,
        house: House,
        tier: Tier,
        *,
        child: DrainChild,
        pace: float | None,
        on_news: Callable[[], None],
    ) -> None:
        self._job, self._house, self._tier, self._child, self._pace = job, house, tier, child, pace
        self._on_news = on_news
        self._news = anyio.Event()
        self._looked_at = ""
        self._failed: list[CheckpointId] = []
        self._parts: list[CheckpointId] = []
        self.stored: tuple[Stored, ...] = ()
        self.trouble = ""
        self.is_busy = False

    @property
    def failed(self) -> tuple[CheckpointId, ...]:
        return tuple(self._failed)

    @property
    def parts(self) -> tuple[CheckpointId, ...]:
        return tuple(one for one in self._parts if one not in {each.checkpoint for each in self.stored})

    @property
    def unlooked(self) -> str:
        """Why the storage has not been listed by this node, though it is the one that should."""
        if not self._is_first or not self._house.store or self._looked_at == self._house.store:
            return ""
        return self.trouble or f"{self._house.store} has not been listed yet"

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Never ends by itself; what goes wrong is tried again, and told as `trouble`."""
        retry, tries = FIRST_RETRY, 0
        try:
            while True:
                self._news = anyio.Event()
                try:
                    self.is_busy = True
                    await self._step()
                    retry, tries = FIRST_RETRY, 0
                except PerdureError as problem:
                    tries += 1
                    self._note(str(problem), tries)
                finally:
                    self.is_busy = False
                self._on_news()
                if tries:
                    await anyio.sleep(retry)
                    retry = min(2 * retry, LONGEST_RETRY)
                else:
                    await self._news.wait()
        finally:
            await self._child.close()

    @property
    def _is_first(self) -> bool:
        """Whether this node has the lowest rank: it looks into the storage, commits there, and deletes."""
        return Rank(0) in self._tier.ring.members

    async def _step(self) -> None:
        url, orders = self._house.store, self._tier.orders
        if not url:
            return
        await self._child.start()
        if not self._is_first:
            self._looked_at, self.stored = "", ()  # another node looks now; what we saw gets old
        elif self._looked_at != url:
            self.stored = await _in_thread(lambda: checkpoints.list_stored(url))
            self._looked_at, self.trouble = url, ""
            self._on_news()
        if orders is None or orders.drain is None or orders.drain in self._failed:
            return
        wanted = orders.drain
        if wanted not in {each.checkpoint for each in self.stored}:
            await self._drain(url, wanted, frozenset(orders.partners))

    async def _drain(self, url: str, wanted: CheckpointId, present: frozenset[str]) -> None:
        by_rank = self._shards_of(wanted)
        name = await _in_thread(lambda: checkpoints.begin(url, wanted))
        request = DrainRequest(
            id=0, store=url, name=name, checkpoint=wanted, by_rank=by_rank, bytes_per_second=self._pace
        )
        if wanted not in self._parts:
            pin = self._tier.pin(wanted, _Others(present))
            try:
                if pin.slots:
                    await self._ask(msgspec.structs.replace(request, slots=pin.slots))
            finally:
                self._tier.unpin(pin)
            self._parts = [*self._parts[-15:], wanted]
            self.trouble = ""
            self._on_news()
        if self._is_first:
            await self._finish(url, request)

    async def _finish(self, url: str, request: DrainRequest) -> None:
        """Commit it when all parts are there, then delete what is beyond the number to keep."""
        retry, until = FIRST_RETRY, time.monotonic() + REPLY_WITHIN
        while not await self._is_whole(request):
            if time.monotonic() > until:
                raise HostError(f"not all parts of {request.checkpoint} came to {url} within {REPLY_WITHIN:g} s")
            with anyio.move_on_after(retry):
                await self._tier.changed.wait()
            retry = min(2 * retry, LONGEST_RETRY)
            orders = self._tier.orders
            if orders is not None and orders.drain != request.checkpoint:
                return  # control has given it up
        job, keep = self._job, self._house.policy.keep
        await _in_thread(lambda: checkpoints.commit(url, request.name, job, request.by_rank))
        self.stored = await _in_thread(lambda: checkpoints.list_stored(url))
        self._on_news()
        spare = [one.checkpoint for one in self.stored if one.checkpoint == self._tier.ring.chosen]
        await _in_thread(lambda: retention.retain(url, keep, job, [request.checkpoint, *spare]))
        await _in_thread(lambda: retention.clean(url, [request.checkpoint]))
        self.stored = await _in_thread(lambda: checkpoints.list_stored(url))

    async def _is_whole(self, request: DrainRequest) -> bool:
        """Ask for the end; False where a part is still awaited."""
        reply = await self._child.ask(msgspec.structs.replace(request, finish=True))
        if reply.error:
            self.trouble = reply.error
        return not reply.error

    async def _ask(self, request: DrainRequest) -> None:
        reply = await self._child.ask(request)
        if reply.error:
            raise HostError(reply.error)

    def _shards_of(self, checkpoint: CheckpointId) -> tuple[str, ...]:
        for world in self._tier.worlds:
            if (world.attempt, world.generation) == (checkpoint.attempt, checkpoint.generation):
                return world.by_rank
        raise HostError(f"which shards the ranks of generation {checkpoint.generation} had is not known here")

    def _note(self, problem: str, tries: int) -> None:
        if problem != self.trouble:
            complain(problem)
        self.trouble = problem
        orders = self._tier.orders
        if tries >= TRIES and orders is not None and orders.drain is not None:
            self._failed = [*self._failed[-15:], orders.drain]


class _Others:
    """All nodes but those that are present (control names partners for each that is)."""

    def __init__(self, present: frozenset[str]) -> None:
        self._present = present

    def __contains__(self, node: object) -> bool:
        return bool(self._present) and node not in self._present


async def _in_thread(work: Callable[[], T]) -> T:
    """Stores are slow, and may hang: their thread is left behind when we end."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
