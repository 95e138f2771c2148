"""This node's parity of its group's slots: kept in two files in turn, made when control says that all is sealed.

Which file may be overwritten follows from the ring. How bytes travel: `gathering`.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import anyio.to_thread

from perdure.agent.memory.door import complain
from perdure.agent.memory.parity import NAME, verified
from perdure.agent.memory.tier import Tier
from perdure.errors import CorruptCheckpointError, PerdureError
from perdure.vocab.checkpoint import CheckpointId, Member, Parity
from perdure.vocab.ids import JobId, NodeId
from perdure.vocab.units import Seconds
from perdure.wire.parity import FILES, Sheet

FIRST_RETRY: Seconds = 0.5
LONGEST_RETRY: Seconds = 5.0


class Gathers(Protocol):
    """Makes the parity of a group in the file at `path`. Raises PerdureError, OSError: there is none then."""

    def __call__(self, path: str, checkpoint: CheckpointId, members: tuple[Member, ...]) -> Awaitable[Sheet]: ...


class Parities:
    """`run` is its task; `wake` tells it that something has changed."""

    def __init__(self, job: JobId, node: NodeId, tier: Tier, gather: Gathers, on_news: Callable[[], None]) -> None:
        self._job, self._node, self._tier, self._gather, self._on_news = job, node, tier, gather, on_news
        self._here: dict[str, Sheet] = {}
        """Whole and verified, by path."""
        self._news = anyio.Event()
        self._wait = FIRST_RETRY
        self.trouble = ""

    def wake(self) -> None:
        self._news.set()

    def held(self) -> tuple[Parity, ...]:
        """For control."""
        return tuple(sheet.parity() for _, sheet in sorted(self._here.items()))

    def path_of(self, checkpoint: CheckpointId) -> str | None:
        """Where the parity of a checkpoint is, if it is whole."""
        return next((path for path, sheet in self._here.items() if sheet.checkpoint == checkpoint), None)

    async def run(self) -> None:
        """Never ends by itself."""
        for path in filter(os.path.lexists, self._paths):
            await self._adopt(path)
        while True:
            self._news = anyio.Event()
            self._drop_old()
            wanted = self._next()
            if wanted is None:
                self.trouble = ""
            elif (free := self._free_path()) is not None:
                await self._make(free, *wanted)
                continue
            await self._news.wait()

    @property
    def _paths(self) -> tuple[str, ...]:
        return tuple(os.path.join(self._tier.folder.path, NAME.format(k)) for k in range(FILES))

    async def _adopt(self, path: str) -> None:
        """What an earlier server has left counts when it has been read."""
        try:
            sheet = await anyio.to_thread.run_sync(verified, path)
            if (sheet.job, sheet.node) != (self._job, self._node):
                raise CorruptCheckpointError("it is of another job or node")
        except (PerdureError, OSError) as problem:
            complain(f"{path} is given up: {problem}")
            self._tier.folder.drop(path)
        else:
            self._here[path] = sheet
            self._on_news()

    def _next(self) -> tuple[CheckpointId, tuple[Member, ...]] | None:
        """The oldest that is wanted and not here: what is committed comes before what hopes to be."""
        orders = self._tier.orders
        for one in () if orders is None else orders.protect:
            for members in one.groups:
                is_mine = any(member.node == self._node for member in members)
                if is_mine and not self._has(one.checkpoint, members):
                    return one.checkpoint, members
        return None

    def _has(self, checkpoint: CheckpointId, members: tuple[Member, ...]) -> bool:
        return any((s.checkpoint, s.members) == (checkpoint, members) for s in self._here.values())

    def _free_path(self) -> str | None:
        """The file to write next; None: both are still needed."""
        for path in self._paths:
            if path not in self._here:
                return path
        spent = [(s.checkpoint, path) for path, s in self._here.items() if self._is_spent(s)]
        return min(spent, default=(None, None))[1]

    def _is_spent(self, sheet: Sheet) -> bool:
        """Nobody goes back to it; or another group is wanted for it now."""
        if self._tier.is_spent(sheet.checkpoint):
            return True
        orders = self._tier.orders
        groups = (
            [m for one in orders.protect if one.checkpoint == sheet.checkpoint for m in one.groups] if orders else []
        )
        return any(member.node == self._node for group in groups for member in group) and sheet.members not in groups

    async def _make(self, path: str, checkpoint: CheckpointId, members: tuple[Member, ...]) -> None:
        if self._here.pop(path, None) is not None:
            self._on_news()
        try:
            self._here[path] = await self._gather(path, checkpoint, members)
        except (PerdureError, OSError) as problem:
            self.trouble = f"no parity of {checkpoint} is made on {self._node}: {problem}"
            self._on_news()
            await anyio.sleep(self._wait)
            self._wait = min(2 * self._wait, LONGEST_RETRY)
        else:
            self.trouble, self._wait = "", FIRST_RETRY
            self._on_news()

    def _drop_old(self) -> None:
        """The present line has a checkpoint of its own: nobody reads parity of earlier ones."""
        ring = self._tier.ring
        done = ring.committed
        if done is None or ring.line == (0, 0) or done.line < ring.branch:
            return
        for path in [path for path, sheet in self._here.items() if sheet.checkpoint.life < done.life]:
            del self._here[path]
            self._tier.folder.drop(path)
            self._on_news()
