"""Connections that carry a line of JSON and then gigabytes: blocking, for threads, with a deadline on every wait.

Knows sockets, lines and pace; does not know what is sent.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import SocketAttribute, TaskGroup

from perdure.errors import WireError
from perdure.vocab.generation import Address
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.tcp import Listener, why

_PART = 64 << 10
Result = TypeVar("Result")
Message = TypeVar("Message")


class Pace:
    """A token bucket that several transfers of a node may share: they have `bytes_per_second` together."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a pace of {bytes_per_second} bytes per second never ends")
        self._rate = bytes_per_second
        self._spent_until = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: Bytes, now: float) -> Seconds:
        """How long to wait before `nbytes` are sent; `now` is the monotonic clock's. What is not used is not saved."""
        with self._lock:
            start = max(now, self._spent_until)
            self._spent_until = start + nbytes / self._rate
        return start - now


class Line:
    """One connection, used by one thread at a time and cut by any. A wait longer than `patience` raises WireError.

    So does everything else that goes wrong with the other side. A wait is for a whole line, or a whole buffer: a peer
    that sends a byte now and then is as good as a stopped one.
    """

    def __init__(self, patience: Seconds, connected: socket.socket | None = None) -> None:
        self.patience = patience
        self._socket = connected
        self._peer = "the peer"
        self._ahead = bytearray()
        """Came with a line, and belongs to what follows it."""
        self._is_cut = threading.Event()
        if connected is not None:
            _tune(connected)

    def connect(self, address: Address) -> None:
        """In place of the present connection."""
        self.close()
        self._ahead.clear()
        self._peer = str(address)
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=self.patience)
            _tune(self._socket)
        except OSError as exc:
            raise WireError(f"cannot reach {address}: {why(exc)}") from exc
        self.pause(0.0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def cut(self) -> None:
        """End every wait of the thread that uses it, now and later. Closes nothing: a number could be used anew."""
        self._is_cut.set()
        connected = self._socket
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is over already

    def pause(self, seconds: Seconds) -> None:
        """Wait, for the sake of a pace."""
        if self._is_cut.wait(seconds) if seconds > 0 else self._is_cut.is_set():
            raise WireError(f"the transfer with {self._peer} was given up")

    # --- lines -------------------------------------------------------------------------------------------------------

    def say(self, message: msgspec.Struct) -> None:
        data = memoryview(msgspec.json.encode(message) + b"\n")
        self._move(len(data), select.POLLOUT, lambda connected, done: connected.send(data[done:]))

    def hear(self, kind: type[Message], limit: Bytes, patience: Seconds | None = None) -> Message:
        """The next line, decoded; it has at most `limit` bytes. `patience`: another one than usual."""
        deadline = self._deadline(patience)
        while (text := self.take_line(limit)) is None:
            self._wait(select.POLLIN, deadline)
        return decode(text, kind)

    async def overhear(self, limit: Bytes) -> bytes:
        """The next line, without a thread. Raises TimeoutError after `patience`."""
        with anyio.fail_after(self.patience):
            while (text := self.take_line(limit)) is None:
                await anyio.wait_readable(self._connected)
        return text

    def take_line(self, limit: Bytes) -> bytes | None:
        """The next line, or None where it is not all here yet; each call reads once."""
        if b"\n" not in self._ahead:
            part = self._now(lambda connected, _: connected.recv(_PART))
            if part is None:
                return None
            if not part:
                raise WireError(f"{self._peer} has closed the connection")
            self._ahead += part
        end = self._ahead.find(b"\n")
        if max(end, len(self._ahead) if end < 0 else 0) > limit:
            raise WireError(f"{self._peer} sent a line of more than {limit} bytes")
        if end < 0:
            return None
        text = bytes(self._ahead[:end])
        del self._ahead[: end + 1]
        return text

    # --- bytes -------------------------------------------------------------------------------------------------------

    def receive(self, view: memoryview) -> None:
        """Fill `view`."""
        ahead = min(len(self._ahead), len(view))
        view[:ahead] = self._ahead[:ahead]
        del self._ahead[:ahead]
        rest = view[ahead:]
        self._move(len(rest), select.POLLIN, lambda connected, done: connected.recv_into(rest[done:]))

    def send_file(self, fd: int, start: Bytes, end: Bytes) -> None:
        """Bytes [start, end) of a file, not copied here. Raises WireError also where the file is shorter."""
        self._move(
            end - start,
            select.POLLOUT,
            lambda connected, done: os.sendfile(connected.fileno(), fd, start + done, end - start - done),
            f"the file ends before byte {end}",
        )

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise WireError(f"there is no connection with {self._peer}")
        return self._socket

    def _deadline(self, patience: Seconds | None = None) -> float:
        return time.monotonic() + (self.patience if patience is None else patience)

    def _move(self, count: Bytes, event: int, act: Callable[[socket.socket, Bytes], Bytes], at_end: str = "") -> None:
        """`act(connection, bytes moved so far)` until `count` bytes are moved; `event`: when it can move more."""
        done, deadline = 0, self._deadline()
        while done < count:
            moved = self._now(act, done)
            if moved is None:
                self._wait(event, deadline)
            elif moved == 0:
                raise WireError(at_end or f"{self._peer} has closed the connection")
            else:
                done += moved

    def _now(self, act: Callable[[socket.socket, Bytes], Result], done: Bytes = 0) -> Result | None:
        """What `act` gives, None where it would have to wait."""
        try:
            return act(self._connected, done)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise WireError(f"the connection with {self._peer} broke off: {why(exc)}") from exc

    def _wait(self, event: int, deadline: float) -> None:
        self.pause(0.0)
        left = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._connected, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise WireError(f"{self._peer} kept us waiting for too long ({self.patience:g} s)")


def decode(text: bytes, kind: type[Message]) -> Message:
    """Raises WireError where `text` is not a `kind`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise WireError(f"a line is not in the protocol: {str(exc)[:200]}") from exc


async def in_thread(line: Line, work: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None) -> Result:
    """`work()`, which uses `line`, in a thread; then the line is closed. Who is cancelled leaves at once: the line is
    cut, so that the thread ends by itself within moments."""
    started = False

    def run() -> Result:
        nonlocal started
        started = True
        try:
            return work()
        finally:
            line.close()

    try:
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=limiter)
    except BaseException:
        line.cut()
        raise
    finally:
        if not started:
            line.close()


async def accept(listener: Listener, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Give every connection to `serve`, in a task of its own, until cancelled."""
    async with anyio.create_task_group() as group:
        for door in listener.doors:
            group.start_soon(_accept_at, door.extra(SocketAttribute.raw_socket), serve, group)


async def _accept_at(
    door: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]], group: TaskGroup
) -> None:
    while True:
        await anyio.wait_readable(door)
        try:
            connected, _ = door.accept()
        except (BlockingIOError, ConnectionError):
            continue  # it was gone before we came
        except OSError:
            await anyio.sleep(0.1)  # no descriptor is left: one will be, when a transfer has ended
            continue
        group.start_soon(serve, connected)


def _tune(connected: socket.socket) -> None:
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
