"""The agent's line to control: joins, streams orders down, brings events up until they are acknowledged.

It knows when control last answered; what follows from silence is decided in `state`.
"""

import time
from collections.abc import Callable
from urllib.parse import quote

import anyio

from perdure.errors import AccessDeniedError, UntrustedError, WireError
from perdure.vocab.event import AnyEvent
from perdure.vocab.ids import JobId
from perdure.vocab.node import Node
from perdure.wire.channel import Channel, RefusedError
from perdure.wire.messages import Beat, Join, Leave, Observed, Orders, Pong, Reply, Report

FIRST_RETRY, LONGEST_RETRY = 0.02, 1.0
"""Seconds between tries while control cannot be reached."""
BEATS_PER_LEASE = 0.3
PATIENCE_PER_LEASE, LONGEST_PATIENCE = 0.25, 5.0
"""How long an answer is waited for. TCP doubles its pauses while a network is cut, so that after a cut of 2 s it may
try again only 3 s later, beyond the lease; a new connection is tried at once."""
SEND_AT_ONCE = 200
STREAM_LAG = 1.0
"""Seconds after which orders that control has pushed and that have not come make the stream a dead one."""


class JoinRefusedError(WireError):
    """Control will not have this node; trying again does not help."""


class ControlLink:
    """One agent's line. `run_orders` and `run_reports` are its two tasks."""

    def __init__(
        self,
        channel: Channel,
        node: Node,
        job: JobId,
        *,
        on_orders: Callable[[Orders], None],
        on_answer: Callable[[float], None],
        on_fenced: Callable[[str], None],
        say_beat: Callable[[], Beat],
    ) -> None:
        self._channel, self._node, self._job = channel, node, job
        self._on_orders, self._on_answer, self._on_fenced, self._say_beat = on_orders, on_answer, on_fenced, say_beat
        self._outbox: list[tuple[int, AnyEvent]] = []
        self._seq = 0
        self._wake = anyio.Event()
        self._acked = anyio.Event()
        self._joined = anyio.Event()
        self._stream_scope = anyio.CancelScope()
        self._version = 0
        self._behind_since: float | None = None
        self.beat_seconds = LONGEST_RETRY
        self._patience = LONGEST_PATIENCE

    def tell(self, event: AnyEvent) -> None:
        """Send `event` as soon as possible, and again until it is in the log."""
        self._seq += 1
        self._outbox.append((self._seq, event))
        self._wake.set()

    def set_lease(self, lease: float) -> None:
        self.beat_seconds = lease * BEATS_PER_LEASE
        self._patience = min(LONGEST_PATIENCE, lease * PATIENCE_PER_LEASE)

    # --- orders ------------------------------------------------------------------------------------------------------

    async def run_orders(self, join_timeout: float) -> None:
        """Join, follow the stream, join again when it ends.

        Raises JoinRefusedError; and, as long as control was never reached, AccessDeniedError, UntrustedError, and
        WireError after `join_timeout` seconds. Later, whoever answers so is not our control, which is away.
        """
        retry, began = FIRST_RETRY, time.monotonic()
        while True:
            try:
                await self._join()
                retry = FIRST_RETRY
                await self._follow()
            except JoinRefusedError:
                raise
            except (AccessDeniedError, UntrustedError):
                if not self._joined.is_set():
                    raise
            except RefusedError as refusal:
                # 410: lost in between, the next join says what that means; 5xx: control cannot answer now.
                if refusal.status != 410 and refusal.status < 500:
                    raise
            except WireError as problem:
                if not self._joined.is_set() and time.monotonic() - began > join_timeout:
                    raise WireError(f"control was not reached within {join_timeout:g} s: {problem}") from None
            await anyio.sleep(retry)
            retry = min(retry * 1.5, LONGEST_RETRY)

    async def _join(self) -> None:
        if not self._joined.is_set():
            await self._check_job()
        sent_at = time.monotonic()
        try:
            reply = await self._channel.call("POST", "/v1/join", Join(node=self._node), Reply)
        except RefusedError as refusal:
            if refusal.status == 409:
                raise JoinRefusedError(str(refusal)) from None
            raise
        if reply.fenced:
            self._on_fenced("control has declared this node lost in the meantime")
            return
        self._acknowledge(reply)
        self._on_answer(sent_at)
        if reply.orders is not None:
            self._take(reply.orders)
        self._joined.set()

    async def _check_job(self) -> None:
        pong = await self._channel.call("GET", "/v1/ping", None, Pong)
        if pong.job != self._job:
            raise JoinRefusedError(
                f"control at {self._channel.address} runs job {pong.job}, but this node was started for job"
                f" {self._job}: check --rdzv-endpoint and --rdzv-id"
            )

    async def _follow(self) -> None:
        path = f"/v1/orders?node={quote(self._node.id)}&incarnation={quote(str(self._node.incarnation))}"
        with anyio.CancelScope() as self._stream_scope:
            async with self._channel.stream(path, Orders) as stream:
                async for orders in stream:
                    self._take(orders)

    def _take(self, orders: Orders) -> None:
        self._version = max(self._version, orders.version)
        self._behind_since = None
        self._on_orders(orders)

    # --- reports -----------------------------------------------------------------------------------------------------

    async def run_reports(self) -> None:
        """Report every beat, and at once when there is something to tell."""
        await self._joined.wait()
        retry = FIRST_RETRY
        while True:
            if not self._outbox:
                with anyio.move_on_after(self.beat_seconds):
                    await self._wake.wait()
            self._wake = anyio.Event()
            try:
                await self._report()
                retry = FIRST_RETRY
            except WireError:
                await anyio.sleep(retry)
                retry = min(retry * 1.5, LONGEST_RETRY)

    async def _report(self) -> None:
        sent_at = time.monotonic()
        observed = tuple(
            Observed(seq=seq, age=max(0.0, sent_at - event.at), event=event)
            for seq, event in self._outbox[:SEND_AT_ONCE]
        )
        report = Report(
            node=self._node.id, incarnation=self._node.incarnation, observed=observed, beat=self._say_beat()
        )
        reply = await self._channel.call("POST", "/v1/report", report, Reply, timeout=self._patience)
        if reply.fenced:
            self._on_fenced("control has declared this node lost in the meantime")
            return
        self._acknowledge(reply)
        self._on_answer(sent_at)
        self._check_stream(reply.pushed)

    def _acknowledge(self, reply: Reply) -> None:
        self._outbox = [(seq, event) for seq, event in self._outbox if seq > reply.acked]
        self._acked.set()
        self._acked = anyio.Event()

    def _check_stream(self, pushed: int) -> None:
        """A stream whose other end is gone without a word is left for a new one."""
        now = time.monotonic()
        if pushed <= self._version:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > STREAM_LAG:
            self._behind_since = None
            self._stream_scope.cancel()

    async def flush(self, seconds: float) -> None:
        """Bring what is left, for at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self._outbox:
                await self._acked.wait()

    async def leave(self, reason: str) -> None:
        """Say good-bye; if that fails the lease does the rest."""
        leave = Leave(node=self._node.id, incarnation=self._node.incarnation, reason=reason)
        try:
            await self._channel.call("POST", "/v1/leave", leave, Reply, timeout=1.0)
        except WireError:
            return
