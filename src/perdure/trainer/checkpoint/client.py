"""The trainer's line to its node's memory server: questions with deadlines, notices that never block.

Knows the socket and its packets; does not know what is in a slot. A server that has died is noticed, and attached to
again without waiting: training goes on.
"""

import array
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from perdure.errors import ConfigError, NoCheckpointError, WireError
from perdure.vocab.checkpoint import Aside, CheckpointId
from perdure.vocab.ids import Rank
from perdure.vocab.units import Bytes, Seconds
from perdure.wire.memory import (
    Attach,
    Attached,
    Close,
    Discard,
    Discarded,
    Fetch,
    Fetched,
    Flush,
    Flushed,
    HasRestored,
    Refused,
    Restore,
    RestorePlan,
    Skipped,
    TrainerIn,
    TrainerOut,
    Troubled,
    Trusted,
    Written,
)

PACKET_LIMIT = 4 << 20
"""A plan names every rank."""
_MOST_FDS = 17
ATTACH_WITHIN: Seconds = 300.0
"""Allocating a slot costs about a second per GiB, and the ranks of a node take turns."""
FETCH_WITHIN: Seconds = 600.0
SEND_WITHIN: Seconds = 1.0
"""A notice that does not go through for so long: the server hangs, and is as good as dead."""
_OUT = msgspec.json.Decoder(TrainerOut)

Answer = TypeVar("Answer", Attached, RestorePlan, Discarded, Fetched, Flushed)


class Granted(msgspec.Struct, frozen=True):
    """What an Attached has brought. The descriptors are the caller's."""

    answer: Attached
    page: int
    slots: tuple[int, ...]


class MemoryClient:
    """One connection at a time; a new one after each loss. Not for several threads, but for notices."""

    def __init__(self, path: str, on_trouble: Callable[[str], None] = lambda text: None) -> None:
        """`on_trouble` hears what the server wants to be told to the user."""
        self.path, self._on_trouble = path, on_trouble
        self._link: socket.socket | None = None
        self._sending = threading.Lock()
        self._asked = 0
        self._pid = os.getpid()
        itself = weakref.ref(self)
        # A data loader's process must not hold the line open: its end tells the server that the trainer has died.
        os.register_at_fork(after_in_child=lambda: _forget(itself()))

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    # --- attach ------------------------------------------------------------------------------------------------------

    def call(self, attach: Attach, layout: bytes) -> None:
        """Connect anew and send the first packet; the answer comes by `granted`. Raises WireError."""
        self.drop()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("perdure-layout", os.MFD_CLOEXEC)
        try:
            link.settimeout(SEND_WITHIN)
            # An agent's door has no file: ss(8) and /proc/net/unix show such a name with an @.
            link.connect(f"\0{self.path[1:]}" if self.path.startswith("@") else self.path)
            with open(text, "wb", closefd=False) as file:
                file.write(layout)
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [text]))]
            link.sendmsg([msgspec.json.encode(attach)], passed, socket.MSG_NOSIGNAL)
        except OSError as problem:
            link.close()
            raise WireError(f"the memory server at {self.path} cannot be reached: {problem}") from problem
        finally:
            os.close(text)
        self._link = link

    def granted(self, within: Seconds) -> Granted | None:
        """The answer to the first packet; None: not yet. Raises ConfigError where it is a refusal, WireError."""
        found = self._receive(time.monotonic() + within)
        if found is None:
            return None
        message, fds = found
        if isinstance(message, Attached) and len(fds) == message.slots + 1:
            return Granted(message, fds[0], tuple(fds[1:]))
        _close_all(fds)
        self.drop()
        if isinstance(message, Refused):
            raise ConfigError(message.reason)
        raise WireError(f"the memory server at {self.path} answered an attach by {type(message).__name__}")

    def attach(self, attach: Attach, layout: bytes, within: Seconds = ATTACH_WITHIN) -> Granted:
        """Both, waiting. A server that is not there yet is tried again. Raises ConfigError, WireError."""
        until, pause = time.monotonic() + within, 0.02
        while True:
            try:
                self.call(attach, layout)
                found = self.granted(max(until - time.monotonic(), 0.0))
            except WireError:
                if time.monotonic() + pause >= until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
                continue
            if found is None:
                self.drop()
                raise WireError(f"the memory server at {self.path} made no slots within {within:g} s")
            return found

    # --- notices -----------------------------------------------------------------------------------------------------

    def written(self, slot: int, checkpoint: CheckpointId, stall: Seconds) -> None:
        """Raises WireError where the server is gone: it finds the slot when it is back."""
        self._send(Written(slot=slot, checkpoint=checkpoint, stall=stall))

    def skipped(self, checkpoint: CheckpointId) -> None:
        self._send(Skipped(checkpoint=checkpoint))

    def restored(self, checkpoint: CheckpointId, seconds: Seconds, sources: Mapping[str, Bytes]) -> None:
        self._send(HasRestored(checkpoint=checkpoint, seconds=seconds, sources=sources))

    def trusted(self) -> None:
        self._send(Trusted())

    def close(self) -> None:
        """Say that this trainer has ended well."""
        if self._link is not None:
            with contextlib.suppress(WireError):
                self._send(Close())
        self.drop()

    def look(self) -> bool:
        """Whether the line still stands, as far as one can see without waiting. Late answers are dropped."""
        try:
            while (found := self._receive(time.monotonic())) is not None:
                _close_all(found[1])
        except WireError:
            return False
        return self._link is not None

    # --- questions ---------------------------------------------------------------------------------------------------

    def restore(self, wanted: Restore, within: Seconds) -> RestorePlan:
        """Waits for all ranks. Raises NoCheckpointError, ConfigError, WireError."""
        return self._ask(msgspec.structs.replace(wanted, id=self._next()), RestorePlan, within)

    def discard(self, aside: Aside, within: Seconds) -> None:
        """Returns when the node will remember it. Raises ConfigError, WireError."""
        self._ask(Discard(id=self._next(), aside=aside), Discarded, within)

    def fetch(self, rank: int, chunks: Sequence[int]) -> str:
        """Path of a sparse slot file with these chunks of that rank's slot. Raises WireError where nobody has them."""
        wanted = Fetch(id=self._next(), rank=Rank(rank), chunks=tuple(chunks))
        fetched = self._ask(wanted, Fetched, FETCH_WITHIN)
        if fetched.error:
            raise WireError(fetched.error)
        return fetched.path

    def flush(self, within: Seconds) -> Flushed:
        """Waits for storage. Raises WireError."""
        return self._ask(Flush(id=self._next(), deadline=within), Flushed, within + 30.0)

    def drop(self) -> None:
        """Close the connection, or forget that of the process that forked this one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- packets -----------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._asked += 1
        return self._asked

    def _ask(self, question: Restore | Discard | Fetch | Flush, kind: type[Answer], within: Seconds) -> Answer:
        until = time.monotonic() + within
        self._send(question)
        while (found := self._receive(until)) is not None:
            message, fds = found
            _close_all(fds)
            if getattr(message, "id", 0) != question.id:
                continue  # the late answer to a question that was given up
            if isinstance(message, Refused):
                raise NoCheckpointError(message.reason) if message.corrupt else ConfigError(message.reason)
            if isinstance(message, kind):
                return message
        raise WireError(f"the memory server did not answer a {type(question).__name__.lower()} within {within:g} s")

    def _send(self, message: TrainerIn) -> None:
        data = msgspec.json.encode(message)
        with self._sending:
            link = self._link
            if link is None or self._pid != os.getpid():
                raise WireError("there is no connection to the memory server")
            try:
                link.send(data, socket.MSG_NOSIGNAL)  # the socket's own timeout is SEND_WITHIN
            except OSError as problem:
                self.drop()
                raise WireError(f"the memory server is gone: {problem}") from problem

    def _receive(self, until: float) -> tuple[TrainerOut, list[int]] | None:
        """The next packet and its descriptors; None at the deadline. Raises WireError where the line has ended."""
        link = self._link
        if link is None:
            raise WireError("there is no connection to the memory server")
        poll = select.poll()
        poll.register(link, select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return None
        try:
            data, ancillary, flags, _ = link.recvmsg(PACKET_LIMIT, socket.CMSG_SPACE(4 * _MOST_FDS), _CLOEXEC)
        except OSError as problem:
            self.drop()
            raise WireError(f"the memory server is gone: {problem}") from problem
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) // 4 * 4])
        try:
            if not data:
                raise WireError("the memory server is gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("the memory server sent more than fits into a packet")
            message = _OUT.decode(data)
        except (WireError, msgspec.DecodeError) as problem:
            _close_all(fds)
            self.drop()
            raise WireError(str(problem)) from problem
        if isinstance(message, Troubled):
            self._on_trouble(message.text)
            return self._receive(until)
        return message, list(fds)


_CLOEXEC = socket.MSG_CMSG_CLOEXEC


def _forget(client: MemoryClient | None) -> None:
    if client is not None:
        client.drop()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
