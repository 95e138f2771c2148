"""The answering side of the channel: HTTP/1.1 on h11, keep-alive, a token in every request, every wait bounded.

Knows how a request becomes a `Request` and how a `Response` or a stream of lines goes back; does not know any message.
"""

import math
import ssl
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from hmac import compare_digest
from urllib.parse import parse_qsl, unquote

import anyio
import h11
import msgspec
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream, TaskGroup
from anyio.streams.tls import TLSStream

from perdure.errors import ConfigError, PerdureError
from perdure.vocab.generation import Address
from perdure.wire.exchange import Handler, RefusedError, Request, Response, Streamed
from perdure.wire.messages import Problem
from perdure.wire.tcp import GoneError, Listener, receive, send, tune

IDLE_TIMEOUT = 60.0
"""Seconds that a connection may be without a request."""
READ_TIMEOUT = 10.0
"""Seconds for a TLS handshake, and for a request from its first byte to its last."""
SEND_TIMEOUT = 10.0
LOOK_EVERY = 1.0
"""Seconds between looks for connections that are late: cheaper than starting three timers in every request."""
LINGER = 1.0
CLOSING_TIMEOUT = 5.0
"""Seconds for a stream's source to clean up once it is closed."""
HEAD_LIMIT = 16 * 1024
BODY_LIMIT = 16 * 1024 * 1024


def report_error(error: Exception) -> None:
    """The default for errors that a handler did not expect: one JSON line on stderr."""
    line = {"level": "error", "where": "wire", "error": repr(error), "traceback": traceback.format_exception(error)}
    sys.stderr.write(msgspec.json.encode(line).decode() + "\n")


class _Service(msgspec.Struct, frozen=True):
    handler: Handler
    authorization: bytes | None
    on_denied: Callable[[str], None] | None
    on_error: Callable[[Exception], None]
    tls: bool
    connections: "set[_Connection]"


async def serve(
    handler: Handler,
    listener: Listener,
    *,
    token: str | None,
    on_denied: Callable[[str], None] | None = None,
    on_error: Callable[[Exception], None] = report_error,
) -> None:
    """Answer requests until cancelled; then every connection and the listener are closed.

    `token` None: no request needs one. `on_denied` gets the peer of a request with a wrong or no token. A handler
    refuses by RefusedError (its status) or ConfigError (409); other errors go to `on_error` and are answered with 500.
    """
    authorization = None if token is None else f"Bearer {token}".encode()
    service = _Service(handler, authorization, on_denied, on_error, listener.tls is not None, set())
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_end_late_ones, service.connections)
            for door in listener.doors:
                group.start_soon(_accept, door, listener, service, group)
    finally:
        await listener.aclose()


async def _accept(door: SocketListener, listener: Listener, service: _Service, group: TaskGroup) -> None:
    while True:
        try:
            stream = await door.accept()
        except OSError as exc:
            # Out of descriptors or memory, or the peer left the queue: this one is lost, the door stays open.
            service.on_error(exc)
            await anyio.sleep(0.1)
        else:
            group.start_soon(_welcome, stream, listener, service)


async def _end_late_ones(connections: "set[_Connection]") -> None:
    while True:
        await anyio.sleep(LOOK_EVERY)
        now = time.monotonic()
        for connection in connections:
            if connection.deadline < now:
                connection.scope.cancel()


async def _welcome(raw: SocketStream, listener: Listener, service: _Service) -> None:
    stream: ByteStream = raw
    try:
        tune(raw)
        if listener.tls is not None:
            with anyio.fail_after(READ_TIMEOUT):
                stream = await _secure(raw, listener.tls)
        remote = raw.extra(SocketAttribute.remote_address)
        connection = _Connection(stream, str(Address(str(remote[0]), int(remote[1]))), service)
        service.connections.add(connection)
        try:
            with connection.scope:
                await connection.run()
        finally:
            service.connections.discard(connection)
    except (GoneError, OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        pass  # The client went, or never spoke our protocol: nobody is left to be told.
    except Exception as exc:  # noqa: BLE001 - top of a connection's loop; the server must outlive it
        service.on_error(exc)
    finally:
        await anyio.aclose_forcefully(stream)


async def _secure(raw: SocketStream, tls: ssl.SSLContext) -> ByteStream:
    """TLS over `raw`. A client that speaks plain HTTP is told so, since it could not tell that from a broken server."""
    try:
        return await TLSStream.wrap(raw, server_side=True, ssl_context=tls, standard_compatible=False)
    except ssl.SSLError as exc:
        if exc.reason == "HTTP_REQUEST":
            await raw.send(_PLAIN_REFUSED)
            await raw.send_eof()
        raise


_PLAIN_BODY = msgspec.json.encode(Problem("plain HTTP is not spoken here, but TLS: give this machine --tls-ca"))
_PLAIN_REFUSED = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_PLAIN_BODY), _PLAIN_BODY)
)
_END = h11.EndOfMessage()


@lru_cache(maxsize=256)
def _head(status: int, content_type: str, length: int, close: bool) -> h11.Response:
    """Kept, since h11 checks every header when it makes one, and answers are much alike."""
    headers = [("content-type", content_type), ("content-length", str(length))]
    return h11.Response(status_code=status, headers=[*headers, ("connection", "close")] if close else headers)


class _Connection:
    """One client's connection, from its first request to its last."""

    def __init__(self, stream: ByteStream, peer: str, service: _Service) -> None:
        self._stream = stream
        self._peer = peer
        self._service = service
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
        self.scope = anyio.CancelScope()
        self.deadline = math.inf
        """On the monotonic clock; when it has passed, `scope` is cancelled."""

    async def run(self) -> None:
        while True:
            try:
                request = await self._request()
            except RefusedError as refusal:
                await self._refuse(refusal)
                return
            if request is None:
                return
            answer = await self._handle(request)
            if isinstance(answer, Streamed):
                await self._stream_lines(answer.lines)
                return
            await self._answer(answer, is_head=request.method == "HEAD")
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    # --- in ---

    async def _request(self) -> Request | None:
        """The next request; None when there is none any more. Raises RefusedError, after which nothing can follow."""
        try:
            event: object = self._http.next_event()
            if event is h11.NEED_DATA:
                self._allow(IDLE_TIMEOUT)
                self._http.receive_data(await receive(self._stream))
            self._allow(READ_TIMEOUT)
            if event is h11.NEED_DATA:
                event = await self._event()
            if not isinstance(event, h11.Request):
                return None
            self._check_token(event)
            return self._parse(event, await self._body())
        except h11.RemoteProtocolError as exc:
            raise RefusedError(exc.error_status_hint, f"this is not HTTP: {exc}") from None

    def _allow(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._allow(READ_TIMEOUT)
            self._http.receive_data(await receive(self._stream))
        return event

    def _check_token(self, head: h11.Request) -> None:
        if self._service.authorization is None:
            return
        given = next((value for name, value in head.headers if name == b"authorization"), b"")
        if not compare_digest(given, self._service.authorization):
            if self._service.on_denied is not None:
                self._service.on_denied(self._peer)
            raise RefusedError(401, "wrong or missing token; every node of a job needs the token of its control")

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while isinstance(event := await self._event(), h11.Data):
            parts.append(event.data)
            size += len(event.data)
            if size > BODY_LIMIT:
                raise RefusedError(413, f"the body is larger than {BODY_LIMIT} bytes")
        return b"".join(parts)

    def _parse(self, head: h11.Request, body: bytes) -> Request:
        path, _, query = head.target.decode("ascii").partition("?")
        pairs = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
        return Request(head.method.decode("ascii"), unquote(path), pairs, body, self._peer)

    # --- between ---

    async def _handle(self, request: Request) -> Response | Streamed:
        self.deadline = math.inf  # a handler may wait as long as it likes
        try:
            return await self._service.handler(request)
        except RefusedError as exc:
            return Response.of(Problem(str(exc)), exc.status)
        except ConfigError as exc:
            return Response.of(Problem(str(exc)), 409)
        except Exception as exc:  # noqa: BLE001 - top of a request's loop: it becomes an answer and a report
            self._service.on_error(exc)
            text = str(exc) if isinstance(exc, PerdureError) else f"internal error ({type(exc).__name__}), see the log"
            return Response.of(Problem(text), 500)

    # --- out ---

    async def _answer(self, answer: Response, *, is_head: bool = False, close: bool = False) -> None:
        head = _head(answer.status, answer.content_type, len(answer.body), close)
        body = [h11.Data(data=answer.body)] if answer.body and not is_head else []
        await self._send(head, *body, _END)

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(part for event in events if (part := self._http.send(event)) is not None)
        self._allow(SEND_TIMEOUT)
        await send(self._stream, data)
        self.deadline = math.inf

    async def _refuse(self, refusal: RefusedError) -> None:
        """Answer and close; reads on for a moment, since closing with bytes unread resets the answer away."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._answer(Response.of(Problem(str(refusal)), refusal.status), close=True)
        if not self._service.tls:
            await self._stream.send_eof()
        with anyio.move_on_after(LINGER):
            left = BODY_LIMIT
            while left > 0 and (data := await receive(self._stream)):
                left -= len(data)

    async def _stream_lines(self, lines: AsyncIterator[bytes]) -> None:
        headers = [("content-type", "application/x-ndjson"), ("connection", "close")]
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_when_gone, group.cancel_scope)
            try:
                await self._send(h11.Response(status_code=200, headers=headers))
                async for line in lines:
                    await self._send(h11.Data(data=line if line.endswith(b"\n") else line + b"\n"))
                await self._send(_END)
            except GoneError:
                pass
            except Exception as exc:  # noqa: BLE001 - the head is sent: the client sees a stream without its end
                self._service.on_error(exc)
            finally:
                await self._close(lines)
                group.cancel_scope.cancel()

    async def _cancel_when_gone(self, scope: anyio.CancelScope) -> None:
        """Read beside the stream: a client that goes shows itself only here while there is nothing to send."""
        try:
            while await receive(self._stream):
                pass
        except GoneError:
            pass
        scope.cancel()

    async def _close(self, lines: AsyncIterator[bytes]) -> None:
        close = getattr(lines, "aclose", None)
        if close is None:
            return
        try:
            with anyio.move_on_after(CLOSING_TIMEOUT, shield=True):
                await close()
        except Exception as exc:  # noqa: BLE001 - the handler's own clean-up failed
            self._service.on_error(exc)
