"""The way to storage: control names a checkpoint, a child with torch writes this node's part, one node commits it.

The child (`python -m perdure.trainer.checkpoint.drain`) lives on for the next time; one that dies is an error and is
started again. What is written, and how the store works, is the child's and `store.checkpoints`' business.
"""

import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from perdure.agent.memory.door import complain
from perdure.agent.memory.marking import mark_all, unmarked
from perdure.agent.memory.tier import Tier
from perdure.agent.memory.trainers import House
from perdure.errors import HostError, PerdureError
from perdure.store import checkpoints, retention
from perdure.store.medium import is_lasting
from perdure.vocab.checkpoint import CheckpointId, Shards, Stored
from perdure.vocab.ids import JobId, Rank
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.memory import DrainFailure, DrainOrder, DrainReply, DrainRequest, Parts

T = TypeVar("T")
ARGV = (sys.executable, "-P", "-m", "perdure.trainer.checkpoint.drain")
REPLY_WITHIN: Seconds = 600.0
"""Without one more byte: as long as control waits for it."""
LINE_LIMIT = 1 << 20
FIRST_RETRY: Seconds = 0.5
LONGEST_RETRY: Seconds = 10.0
LONGEST_WAIT: Seconds = 30.0
"""For news: should some ever be missed, it is looked again."""
KEPT_PARTS = 4


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
        with _held_back(signal.SIGTERM):  # a scheduler's, to every process: the child must live to ignore it
            self._process = await anyio.open_process(self._argv, stderr=None)
        assert self._process.stdout is not None
        self._lines, self._is_warm = BufferedByteReceiveStream(self._process.stdout), False

    async def ask(
        self, request: DrainRequest, on_progress: Callable[[Bytes], None] = lambda nbytes: None
    ) -> DrainReply:
        """Its answer; a dead or silent child is an answer with an error. It is started where there is none.

        `on_progress` hears meanwhile how many bytes have been written for this request.
        """
        try:
            return await self._ask(request, on_progress)
        except TimeoutError:
            problem = f"the drain has written nothing for {REPLY_WITHIN:g} s"
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

    async def _ask(self, request: DrainRequest, on_progress: Callable[[Bytes], None]) -> DrainReply:
        await self.start()
        if not self._is_warm:
            await self._hear(0, on_progress)
            self._is_warm = True
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked += 1
        await self._process.stdin.send(msgspec.json.encode(msgspec.structs.replace(request, id=self._asked)) + b"\n")
        return await self._hear(self._asked, on_progress)

    async def _hear(self, wanted: int, on_progress: Callable[[Bytes], None]) -> DrainReply:
        assert self._lines is not None
        while True:
            with anyio.fail_after(REPLY_WITHIN):
                line = await self._lines.receive_until(b"\n", LINE_LIMIT)
            reply = msgspec.json.decode(line, type=DrainReply)
            if reply.id == wanted and reply.is_done:
                return reply
            if reply.id == wanted:
                on_progress(reply.nbytes)

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
        self._parts: dict[int, Parts] = {}
        self._before = 0  # bytes written for requests that are over
        self.failure: DrainFailure | None = None
        self.stored: tuple[Stored, ...] = ()
        self.free: Bytes | None = None
        """Room in the storage when this node looked last."""
        self.nbytes: Bytes = 0
        """Written by this life of the server."""
        self.trouble = ""
        self.is_busy = False

    @property
    def parts(self) -> tuple[Parts, ...]:
        return tuple(self._parts.values())

    @property
    def unlooked(self) -> str:
        """Why the storage has not been listed by this node, though it is the one that should."""
        if not self._lists or not self._house.store or self._looked_at == self._house.store:
            return ""
        return self.trouble or f"{self._house.store} has not been listed yet"

    @property
    def owes(self) -> bool:
        """Whether there is an order that this node can still do something for."""
        orders = self._tier.orders
        order = None if orders is None or not self._house.store else orders.drain
        if order is None or self._is_over(order):
            return False
        return bool(self._todo(order)) or order.committer == self._house.node

    def wake(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()

    async def run(self) -> None:
        """Never ends by itself. Looking does not wait for writing: ranks that start may wait for what is found."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep_on, self._look_around)
                group.start_soon(self._keep_on, self._do_order)
        finally:
            await self._child.close()

    async def _keep_on(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do `step` whenever there are news; what goes wrong is told as `trouble`, and done again."""
        retry = FIRST_RETRY
        while True:
            news, is_well = self._news, False
            try:
                await step()
                retry, is_well = FIRST_RETRY, True
            except Exception as problem:  # noqa: BLE001 - a store's library may raise anything: the tier outlives it
                self._note(_words(problem))
            self._on_news()
            if is_well:
                with anyio.move_on_after(LONGEST_WAIT):
                    await news.wait()
            else:  # whatever the news: a store that is broken is not asked at every save
                await anyio.sleep(retry)
                retry = min(2 * retry, LONGEST_RETRY)

    @property
    def _lists(self) -> bool:
        """Whether this node looks into the storage, commits there, and deletes: rank 0's, or who stands in for it."""
        orders = self._tier.orders
        if Rank(0) in self._tier.ring.members:
            return True
        if orders is None:
            return False
        return self._house.node in (orders.stand_in, None if orders.drain is None else orders.drain.committer)

    def _is_over(self, order: DrainOrder) -> bool:
        failed = self.failure is not None and self.failure.number == order.number
        return failed or order.checkpoint in {each.checkpoint for each in self.stored}

    def _todo(self, order: DrainOrder) -> tuple[int, ...]:
        """Ranks whose parts are written here, and are not there yet."""
        done = self._parts.get(order.number)
        return tuple(rank for rank in order.writers.get(self._house.node, ()) if done is None or rank not in done.ranks)

    async def _look_around(self) -> None:
        """See what is in storage, and mark there what was set aside."""
        url = self._house.store
        if not url or not self._lists:
            self._looked_at, self.stored = "", ()  # another node looks now; what we saw gets old
            return
        if self._looked_at != url:
            await self._look(url)
            self._looked_at, self.trouble = url, ""
            self.wake()
        wanted = unmarked(self.stored, self._tier.asides)
        if wanted:
            await _in_thread(lambda: mark_all(url, wanted))
            await self._look(url)

    async def _do_order(self) -> None:
        """What control has ordered. A drain that failed waits for control's word."""
        url, orders = self._house.store, self._tier.orders
        if not url:
            return
        await self._child.start()
        order = None if orders is None else orders.drain
        if order is None or self._is_over(order) or self.unlooked:
            return
        self.is_busy = True
        try:
            await self._serve(url, order)
        except Exception as problem:  # noqa: BLE001 - as in `_keep_on`
            lasting = problem.lasting if isinstance(problem, _RefusedError) else is_lasting(problem)
            self.failure = DrainFailure(number=order.number, why=_words(problem), lasting=lasting)
            self._note(self.failure.why)
        finally:
            self.is_busy = False

    async def _look(self, url: str) -> None:
        self.stored = await _in_thread(lambda: checkpoints.list_stored(url))
        self.free = await _in_thread(lambda: checkpoints.free_in(url))

    async def _serve(self, url: str, order: DrainOrder) -> None:
        """Write what is to be written here; then, when control says that all parts are there, commit it."""
        orders = self._tier.orders
        wanted, hurry = order.checkpoint, orders is not None and orders.hurry
        request = DrainRequest(
            id=0,
            store=url,
            name=await _in_thread(lambda: checkpoints.begin(url, wanted)),
            checkpoint=wanted,
            by_rank=self._shards_of(wanted),
            ranks=order.ranks,
            bytes_per_second=None if hurry else self._pace,
            hurry=hurry,
        )
        todo = self._todo(order)
        if todo:
            pin = self._tier.pin(wanted, todo)
            try:
                if pin.slots:
                    await self._ask(msgspec.structs.replace(request, slots=pin.slots))
            finally:
                self._tier.unpin(pin)
            # A slot that was given away meanwhile is no failure: control sees that it is not here, and asks others.
            self._written(order, pin.slots)
        if order.committer == self._house.node and order.is_written:
            await self._finish(url, request)

    def _written(self, order: DrainOrder, ranks: Iterable[int]) -> None:
        before = self._parts.pop(order.number, Parts(number=order.number, ranks=()))
        self._parts = dict([*self._parts.items()][-KEPT_PARTS:])
        self._parts[order.number] = Parts(number=order.number, ranks=tuple(sorted({*before.ranks, *ranks})))
        if not self._todo(order):
            self._tier.drained(order.number)
        self.trouble = ""
        self._on_news()

    async def _finish(self, url: str, request: DrainRequest) -> None:
        """Commit it: all parts are there. Then delete what is beyond the number to keep."""
        await self._ask(msgspec.structs.replace(request, finish=True))
        job, keep = self._job, self._house.policy.keep
        await _in_thread(lambda: checkpoints.commit(url, request.name, job, request.by_rank, request.ranks))
        await self._look(url)
        self.trouble = ""
        self._on_news()
        try:
            spare = [each for each in (self._tier.ring.committed, self._tier.ring.chosen) if each is not None]
            await _in_thread(lambda: retention.retain(url, keep, job, [request.checkpoint, *spare]))
            await _in_thread(lambda: retention.clean(url, [request.checkpoint]))
            await self._look(url)
        except PerdureError as problem:
            self._note(str(problem))  # it is stored; that old ones stay is no reason to write it once more

    async def _ask(self, request: DrainRequest) -> None:
        reply = await self._child.ask(request, self._progress)
        self._before = self.nbytes = self._before + reply.nbytes
        if reply.error:
            raise _RefusedError(reply.error, lasting=reply.lasting)

    def _progress(self, nbytes: Bytes) -> None:
        self.nbytes = self._before + nbytes
        self._on_news()

    def _shards_of(self, checkpoint: CheckpointId) -> tuple[str, ...]:
        orders = self._tier.orders
        told: Shards | None = None if orders is None else orders.drain_world
        for world in (*self._tier.worlds, told):
            if world is not None and (world.attempt, world.generation) == checkpoint.life:
                return world.by_rank
        raise HostError(f"{checkpoint} cannot be stored by this node, which has come after it; a later one will be")

    def _note(self, problem: str) -> None:
        if problem != self.trouble:
            complain(problem)
        self.trouble = problem


def _words(problem: Exception) -> str:
    return str(problem) if isinstance(problem, PerdureError) else f"{type(problem).__name__}: {problem}"


class _RefusedError(HostError):
    """The drain's child has said so."""

    def __init__(self, text: str, *, lasting: bool) -> None:
        super().__init__(text)
        self.lasting = lasting


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """This thread, and a process that it starts, get the signal later: when they let it through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _in_thread(work: Callable[[], T]) -> T:
    """Stores are slow, and may hang: their thread is left behind when we end."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
