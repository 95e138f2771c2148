"""What a handler gets and gives: values of one request. Does not know sockets or HTTP's bytes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from perdure.errors import WireError

T = TypeVar("T")


class RefusedError(WireError):
    """A request that was answered with a `Problem`: raised by a handler, and again by the client that asked."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: dict[str, str]
    body: bytes
    peer: str
    """Address of the client, for people."""

    def read(self, kind: type[T]) -> T:
        """The body as a message. Raises RefusedError (400), which `serve` answers."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.DecodeError as exc:
            raise RefusedError(400, f"the body of {self.method} {self.path} is no {name_of(kind)}: {exc}") from exc


class Response(msgspec.Struct, frozen=True):
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"

    @classmethod
    def of(cls, message: msgspec.Struct, status: int = 200) -> "Response":
        return cls(status, msgspec.json.encode(message))


class Streamed(msgspec.Struct, frozen=True):
    """An answer without an end: every item is one JSON line and is sent at once.

    `lines` is closed within milliseconds when the client goes, also while it waits for its next item.
    """

    lines: AsyncIterator[bytes]


Handler = Callable[[Request], Awaitable[Response | Streamed]]


def name_of(kind: object) -> str:
    """A message type's name, for people."""
    return getattr(kind, "__name__", str(kind))
