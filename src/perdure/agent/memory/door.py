"""The trainers' door: a Unix SEQPACKET socket, one JSON message per packet, descriptors beside it.

It carries messages; what they mean is said elsewhere. Whoever sends what is no message is put out.
"""

import array
import errno
import os
import socket
import struct
import sys

import anyio
import msgspec

from perdure.errors import ConfigError, HostError, WireError
from perdure.vocab.units import Seconds
from perdure.wire.memory import TrainerIn, TrainerOut

PACKET_LIMIT = 1 << 20
"""Longest message. A layout is longer, and comes as a file."""
SEND_BUFFER = 4 << 20
"""A packet must fit into it; a plan names every rank (2 MB for 16 000)."""
MOST_FDS = 8
"""Of one message to us; only Attach carries one."""
ANSWER_WITHIN: Seconds = 10.0
"""A trainer that does not take its answer for so long (stopped, say) is put out, and attaches again."""
PATH_LIMIT = 107
"""sun_path of unix(7), less the end."""
_PEER = struct.Struct("iII")
_IN = msgspec.json.Decoder(TrainerIn)


class EndedError(WireError):
    """The trainer has closed its end, or died."""


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, in place of one that a dead server has left. Raises ConfigError, HostError."""
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise ConfigError(f"the socket {path} has a path of more than {PATH_LIMIT} bytes; give a shorter one")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            os.unlink(path)  # the folder's lock is ours, so whoever made it is dead
        except FileNotFoundError:
            pass
        door.bind(path)
        os.chmod(path, 0o600)
        door.listen(128)
    except OSError as exc:
        door.close()
        raise HostError(f"cannot listen at {path}: {os.strerror(exc.errno or 0).lower()}") from exc
    return door


def inherited(fd: int) -> socket.socket:
    """The listening socket that whoever started us has made. Raises ConfigError where it is none."""
    try:
        door = socket.socket(fileno=fd)
        right = (door.family, door.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
        right = right and bool(door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as exc:
        raise ConfigError(f"descriptor {fd} is no socket: {os.strerror(exc.errno or 0).lower()}") from exc
    if not right:
        raise ConfigError(f"descriptor {fd} is no listening SEQPACKET socket")
    return door


async def accept(door: socket.socket) -> "Connection":
    """The next trainer of this user."""
    door.setblocking(False)
    while True:
        await anyio.wait_readable(door)
        try:
            made, _ = door.accept()
        except BlockingIOError:
            continue
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
            await anyio.sleep(0.1)  # too many descriptors: whoever waits goes on waiting
            continue
        pid, uid, _ = _PEER.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid in (os.getuid(), 0):
            return Connection(made, pid)
        made.close()


class Connection:
    """One trainer's line. One task receives; sends are whole packets."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link, self.pid = link, pid
        self.closed = False
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    async def receive(self) -> tuple[TrainerIn, tuple[int, ...]]:
        """The next message and its descriptors, which are the caller's. Raises EndedError, WireError."""
        while True:
            try:
                await anyio.wait_readable(self._link)
                data, fds, flags = self._receive()
                break
            except BlockingIOError:
                continue
            except (OSError, ValueError, anyio.ClosedResourceError) as exc:
                raise EndedError(f"the connection of process {self.pid} broke: {exc}") from exc
        try:
            if not data:
                raise EndedError(f"process {self.pid} has closed its connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError(f"process {self.pid} sent a message of more than {PACKET_LIMIT} bytes")
            return _IN.decode(data), fds
        except msgspec.DecodeError as exc:
            _close_all(fds)
            raise WireError(f"process {self.pid} sent what is no message: {exc}") from exc
        except WireError:
            _close_all(fds)
            raise

    async def send(self, message: TrainerOut, fds: tuple[int, ...] = ()) -> None:
        """Raises WireError where the trainer is gone or does not read."""
        data = msgspec.json.encode(message)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with anyio.fail_after(ANSWER_WITHIN):
                while not self._send(data, ancillary):
                    await anyio.wait_writable(self._link)
        except TimeoutError:
            raise WireError(f"process {self.pid} did not take an answer within {ANSWER_WITHIN:g} s") from None
        except (OSError, ValueError, anyio.ClosedResourceError) as exc:
            raise EndedError(f"the connection of process {self.pid} broke: {exc}") from exc

    def close(self) -> None:
        """Ends a `receive` that waits, too."""
        if not self.closed:
            self.closed = True
            try:
                self._link.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended from the other side

    def free(self) -> None:
        """Only when no task waits on it any more."""
        self.closed = True
        self._link.close()

    def _receive(self) -> tuple[bytes, tuple[int, ...], int]:
        data, ancillary, flags, _ = self._link.recvmsg(
            PACKET_LIMIT, socket.CMSG_SPACE(4 * MOST_FDS), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) // 4 * 4])
        return data, tuple(fds), flags

    def _send(self, data: bytes, ancillary: "list[tuple[int, int, array.array[int]]]") -> bool:
        try:
            self._link.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True


def complain(text: str) -> None:
    """One line for people; nobody may be there to read it."""
    try:
        sys.stderr.write(f"perdure: checkpoints: {text}\n")
        sys.stderr.flush()
    except OSError:
        return


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
