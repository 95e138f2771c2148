"""Control's door for memory servers: POST /v1/memory, answered when there is news. No decisions; `saves` makes them.

Main control and the desk (`control.desk`) use the same one.
"""

import math
from collections.abc import Callable

import anyio

from perdure.control import saves
from perdure.control.saves import SavesState
from perdure.ports import Clock
from perdure.vocab.ids import NodeId
from perdure.vocab.units import Instant, Seconds
from perdure.wire.channel import RefusedError, Request, Response, Streamed
from perdure.wire.memory import MemoryOrders, MemoryReport

PATH = "/v1/memory"
LONGEST_WAIT: Seconds = 30.0
"""An answer is held back for as long at most, whatever the server asked for."""
LONGEST_TICK: Seconds = 1.0
SHORTEST_TICK: Seconds = 0.01


class MemoryDoor:
    """Holds the one `SavesState` of a job. `run` keeps its deadlines, `answer` is a report's way in.

    `on_change` gets the states before and after whatever has changed: what is to be logged is seen there.
    `lose_after`: a memory server is counted as gone so many seconds after its next report was due; None: never, since
    the owner knows better and says `gone`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lose_after: Seconds | None = None,
        on_change: Callable[[SavesState, SavesState], None] | None = None,
    ) -> None:
        self._clock, self._lose_after, self._on_change = clock, lose_after, on_change
        self.state = saves.opened(clock.now())
        self._changed = anyio.Event()
        self._due: dict[NodeId, Instant] = {}
        """When each server's next report is due."""
        self._waiting = 0

    @property
    def is_busy(self) -> bool:
        """Whether some server waits for an answer."""
        return self._waiting > 0

    async def handle(self, request: Request) -> Response | Streamed:
        """For `wire.channel.serve`."""
        if (request.method, request.path) != ("POST", PATH):
            raise RefusedError(404, f"there is nothing at {request.method} {request.path}")
        return Response.of(await self.answer(request.read(MemoryReport)))

    async def answer(self, report: MemoryReport) -> MemoryOrders:
        """Note the report; give the orders at once if they are news to its sender, else within `report.wait`."""
        wait = min(report.wait, LONGEST_WAIT) if math.isfinite(report.wait) else LONGEST_WAIT
        now = self._clock.now()
        self._due[report.node] = now + wait
        self.become(saves.reported(self.state, report, now))
        self._waiting += 1
        try:
            with anyio.move_on_after(wait):
                while self.state.version == report.seen:
                    await self._changed.wait()
        finally:
            self._waiting -= 1
        return saves.orders(self.state, self._clock.now())

    def become(self, state: SavesState) -> None:
        """Take over what a function of `saves` gave; who waits for news is woken where there is some."""
        before, self.state = self.state, state
        if state is not before and self._on_change is not None:
            self._on_change(before, state)
        if state.version != before.version:
            self._changed.set()
            self._changed = anyio.Event()

    async def run(self) -> None:
        """Keep deadlines, without end."""
        while True:
            now = self._clock.now()
            times = [t for t in (saves.next_deadline(self.state, now), self._next_loss()) if t is not None]
            wait = min((t - now for t in times), default=LONGEST_TICK)
            await anyio.sleep(min(max(wait, SHORTEST_TICK), LONGEST_TICK))
            self._lose_silent_ones()
            self.become(saves.ticked(self.state, self._clock.now()))

    def _next_loss(self) -> Instant | None:
        if self._lose_after is None:
            return None
        return min((due + self._lose_after for due in self._due.values()), default=None)

    def _lose_silent_ones(self) -> None:
        if self._lose_after is None:
            return
        now = self._clock.now()
        for node in [node for node, due in self._due.items() if now >= due + self._lose_after]:
            del self._due[node]
            self.become(saves.gone(self.state, node, now))
