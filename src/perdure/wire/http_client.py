"""The asking side of the channel: calls on a pool of keep-alive connections, and streams of lines.

Knows how to ask and what can fail on the way; does not know any message, and retries nothing but a connection that the
server had closed in the meantime.
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import lru_cache
from typing import TypeVar

import anyio
import h11
import msgspec
from anyio.abc import ByteStream

from perdure.errors import AccessDeniedError, WireError
from perdure.vocab.generation import Address
from perdure.wire.exchange import RefusedError, name_of
from perdure.wire.messages import Problem
from perdure.wire.tcp import GoneError, connect, receive, send
from perdure.wire.tokens import parse_token

ANSWER_LIMIT = 64 * 1024 * 1024
LINE_LIMIT = 16 * 1024 * 1024
HEAD_LIMIT = 16 * 1024
IDLE_LINKS = 8

T = TypeVar("T")


Headers = tuple[tuple[str, str], ...]


@lru_cache(maxsize=256)
def _head(method: str, path: str, headers: Headers, length: int) -> h11.Request:
    """Kept, since h11 checks every header when it makes one, and requests are much alike."""
    return h11.Request(method=method, target=path, headers=[*headers, ("content-length", str(length))])


class _NoAnswerError(Exception):
    """The connection ended before a byte of the answer: the server had closed it, or died."""


class _Link:
    """One connection to the server."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        self._heard = False

    async def ask(self, method: str, path: str, headers: Headers, body: bytes) -> int:
        """Send a request; gives the status of the answer. Raises _NoAnswerError, GoneError, RemoteProtocolError."""
        self._heard = False
        data = self._http.send(_head(method, path, headers, len(body)))
        if body:
            data += self._http.send(h11.Data(data=body))
        self._http.send(h11.EndOfMessage())
        try:
            await send(self.stream, data)
            event = await self._event()
        except GoneError as exc:
            if self._heard:
                raise
            raise _NoAnswerError(str(exc)) from exc
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        if not isinstance(event, h11.Response):
            raise _NoAnswerError("the connection was closed")
        return event.status_code

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The parts of the answer's body, as they come."""
        while isinstance(event := await self._event(), h11.Data):
            yield event.data

    async def whole_body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while isinstance(event := await self._event(), h11.Data):
            parts.append(event.data)
            size += len(event.data)
            if size > ANSWER_LIMIT:
                raise GoneError(f"the answer is larger than {ANSWER_LIMIT} bytes")
        return b"".join(parts)

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await receive(self.stream)
            if not data and not self._heard:
                raise _NoAnswerError("the connection was closed")
            self._heard = True
            self._http.receive_data(data)
        return event

    def renew(self) -> bool:
        """Make ready for the next request; False: this connection takes no more."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self.stream)


class Channel:
    """Asks one server. Any number of tasks of one event loop may use it at once."""

    def __init__(self, address: Address, token: str, tls: ssl.SSLContext | None = None, timeout: float = 2.0) -> None:
        self.address = address
        self._tls = tls
        self._timeout = timeout
        self._headers: Headers = (("host", str(address)), ("authorization", f"Bearer {parse_token(token)}"))
        self._idle: list[_Link] = []
        self._closed = False

    async def call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[T],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - one limit over a used connection and a new one
    ) -> T:
        """Ask, and decode what comes back. `path` may have a query; its values must be percent-encoded already.

        A request that got no byte of an answer on a used connection is sent once more on a new one, so the server may
        see it twice. Raises WireError (unreachable, late, not in the protocol), AccessDeniedError, RefusedError (any
        other answer that is not 2xx).
        """
        limit = self._timeout if timeout is None else timeout
        what = f"{method} {path}"
        try:
            with anyio.fail_after(limit):
                status, data = await self._ask(method, path, b"" if body is None else msgspec.json.encode(body))
        except TimeoutError:
            raise WireError(f"{self.address} did not answer {what} within {limit:g} s") from None
        except (_NoAnswerError, GoneError) as exc:
            raise WireError(f"{self.address} broke off during {what}: {exc}") from exc
        except h11.RemoteProtocolError as exc:
            raise WireError(f"{self.address} answered {what} with something that is not HTTP: {exc}") from exc
        self._check(what, status, data)
        return self._decode(what, data, answer)

    @asynccontextmanager
    async def stream(self, path: str, item: type[T]) -> AsyncGenerator[AsyncIterator[T], None]:
        """The lines of a stream, as they come. Waiting for a line has no limit: that is the caller's.

        Raises as `call` does; and the iteration raises WireError when the stream ends, however that comes.
        """
        link = await self._open(path)
        try:
            async with aclosing(self._items(link, path, item)) as items:
                yield items
        finally:
            await link.aclose()

    async def aclose(self) -> None:
        """Close the idle connections; one that is in use is closed by its call."""
        self._closed = True
        with anyio.CancelScope(shield=True):  # else a cancelled caller would leave at the first one
            while self._idle:
                await self._idle.pop().aclose()

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._idle:
            try:
                return await self._exchange(self._idle.pop(), method, path, body)
            except _NoAnswerError:
                pass  # The server has closed it, or is a new one: the other idle ones are no better.
        link = _Link(await connect(self.address, self._tls))
        return await self._exchange(link, method, path, body)

    async def _exchange(self, link: _Link, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        keep = False
        try:
            status = await link.ask(method, path, self._headers, body)
            data = await link.whole_body()
            keep = link.renew() and not self._closed and len(self._idle) < IDLE_LINKS
            return status, data
        finally:
            if keep:
                self._idle.append(link)
            else:
                await link.aclose()

    async def _open(self, path: str) -> _Link:
        link: _Link | None = None
        try:
            with anyio.fail_after(self._timeout):
                link = _Link(await connect(self.address, self._tls))
                status = await link.ask("GET", path, self._headers, b"")
                if not 200 <= status < 300:
                    self._check(f"GET {path}", status, await link.whole_body())
            return link
        except BaseException as exc:
            if link is not None:
                await link.aclose()
            match exc:
                case TimeoutError():
                    raise WireError(f"{self.address} did not answer GET {path} within {self._timeout:g} s") from None
                case _NoAnswerError() | GoneError() | h11.RemoteProtocolError():
                    raise WireError(f"{self.address} broke off at GET {path}: {exc}") from exc
            raise

    async def _items(self, link: _Link, path: str, item: type[T]) -> AsyncGenerator[T, None]:
        rest = b""
        try:
            async with aclosing(link.body()) as parts:
                async for part in parts:
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield self._decode(f"GET {path}", line, item)
                    if len(rest) > LINE_LIMIT:
                        raise GoneError(f"a line is longer than {LINE_LIMIT} bytes")
        except (_NoAnswerError, GoneError, h11.RemoteProtocolError) as exc:
            raise WireError(f"the stream {path} of {self.address} broke off: {exc}") from exc
        raise WireError(f"{self.address} ended the stream {path}")

    def _decode(self, what: str, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as exc:
            raise WireError(f"{self.address} answered {what} with something else than {name_of(kind)}: {exc}") from exc

    def _check(self, what: str, status: int, data: bytes) -> None:
        if 200 <= status < 300:
            return
        if status == 401:
            raise AccessDeniedError(f"{self.address} refused our token; give this node the token of the job's control")
        try:
            text = msgspec.json.decode(data, type=Problem).error
        except msgspec.DecodeError:
            text = f"{self.address} answered {what} with status {status} and no reason"
        raise RefusedError(status, text)
