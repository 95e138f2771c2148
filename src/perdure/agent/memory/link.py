"""The memory server's line to control: one report after another, each answered with the orders when there is news.

Control that cannot be reached costs nothing here: what was ordered last holds on, and the report is tried again.
"""

import time
from collections.abc import Callable

import anyio

from perdure.agent.memory.door import complain
from perdure.errors import AccessDeniedError, UntrustedError, WireError
from perdure.vocab.units import Seconds
from perdure.wire.channel import Channel
from perdure.wire.memory import MemoryOrders, MemoryReport

WAIT: Seconds = 10.0
"""How long control may hold an answer back."""
PATIENCE: Seconds = 3.0
"""How much longer than that an answer is waited for."""
FIRST_RETRY, LONGEST_RETRY = 0.05, 2.0
SAY_AFTER: Seconds = 30.0
"""Control that has been away for so long is mentioned, once."""


class MemoryLink:
    """`run` is its task. `make_report` gets (version last seen, how long the answer may be held)."""

    def __init__(
        self,
        channel: Channel,
        make_report: Callable[[int, Seconds], MemoryReport],
        on_orders: Callable[[MemoryOrders], None],
    ) -> None:
        self._channel, self._make_report, self._on_orders = channel, make_report, on_orders
        self._news = anyio.Event()
        self._seen = 0
        self._away_since: float | None = None
        self._said = False

    def wake(self) -> None:
        """Something here has changed: an answer that is being waited for is left for a new question."""
        self._news.set()

    @property
    def away(self) -> Seconds:
        """How long control has not been reached."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    async def run(self) -> None:
        """Never ends by itself."""
        retry = FIRST_RETRY
        while True:
            self._news = anyio.Event()
            try:
                await self._ask()
            except WireError as problem:
                self._note_away(problem)
                await anyio.sleep(retry)
                retry = min(2 * retry, LONGEST_RETRY)
            else:
                retry, self._away_since, self._said = FIRST_RETRY, None, False

    async def _ask(self) -> None:
        """One question, to its answer or to news of our own."""
        report, failure = self._make_report(self._seen, WAIT), None
        async with anyio.create_task_group() as group:
            group.start_soon(self._wait_for_news, group.cancel_scope)
            try:
                self._take(
                    await self._channel.call("POST", "/v1/memory", report, MemoryOrders, timeout=WAIT + PATIENCE)
                )
            except WireError as problem:
                failure = problem
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _wait_for_news(self, asking: anyio.CancelScope) -> None:
        await self._news.wait()
        asking.cancel()

    def _take(self, orders: MemoryOrders) -> None:
        self._seen = orders.version
        self._on_orders(orders)

    def _note_away(self, problem: WireError) -> None:
        now = time.monotonic()
        self._away_since = self._away_since or now
        lasting = isinstance(problem, AccessDeniedError | UntrustedError) or now - self._away_since > SAY_AFTER
        if lasting and not self._said:
            self._said = True
            complain(f"control cannot be told what is in memory here: {problem}; trying on")
