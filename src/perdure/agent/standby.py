"""The fork server, from the agent's side: start it, ask it for workers and stores, notice its end.

Also starts stores without it. Knows the packets (`wire.messages`) and that replies may come in any order; it does
not know what a worker does.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence

import anyio
import msgspec

from perdure.agent.config import AgentConfig
from perdure.errors import ConfigError, HostError
from perdure.host.processes import kill_process, start_process, wait_for
from perdure.wire.messages import (
    Entry,
    ForkReply,
    ForkRequest,
    ForkServerIn,
    ForkServerOut,
    ForkServerParked,
    ForkServerReady,
    StoreRequest,
)

_STDERR = 2
_PACKET = 1 << 20
"""Largest packet that we take, and what we ask the socket to hold."""
_REPLY_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 1.0
_STORE_TIMEOUT = 120.0  # importing torch takes 2 s from memory, 30 s from a busy network file system


class StoreLine(msgspec.Struct, frozen=True):
    """The one line that a store process prints: its port once it listens, or why it does not."""

    port: int = 0
    error: str = ""


class ForkServer:
    """One fork server. After `closed`, make a new one."""

    def __init__(self) -> None:
        self.pid = 0
        self.ready: ForkServerReady | None = None
        self.parked: frozenset[int] = frozenset()
        """Forked ahead, waiting: children of this process that belong to the server."""
        self.closed = anyio.Event()
        self.exit_code: int | None = None
        self.signal: int | None = None
        """How it ended, once `closed` is set."""
        self._known = anyio.Event()  # ready, or dead
        self._dead = False
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[ForkReply]] = {}
        self._sending = anyio.Lock()
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[ForkServerOut] = msgspec.json.Decoder(ForkServerOut)

    async def start(self, config: AgentConfig, env: Mapping[str, str]) -> None:
        """Start its process. Raises HostError when it cannot be started; `wait_ready` tells how the imports went."""
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET)
            try:
                argv = fork_server_argv(config, theirs.fileno())
                # Its stdout too: what libraries print at import is no worker's output.
                self.pid = start_process(argv, env, None, _STDERR, _STDERR, (theirs.fileno(),))
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._pidfd, self._ended)

    def is_alive(self) -> bool:
        """Whether it can be asked for anything."""
        return self.pid != 0 and not self._dead

    async def wait_ready(self) -> ForkServerReady:
        """Wait until the imports are done. Raises HostError when it ends before."""
        await self._known.wait()
        if self.ready is None:
            raise self._gone()
        return self.ready

    async def fork(self, request: ForkRequest, fds: Sequence[int]) -> int:
        """The pid of a new worker, a child of this process. `fds`: stdout, stderr, heartbeat page. `id` is set here.

        Raises HostError. A worker that is forked after the caller has given up is killed.
        """
        reply = await self._ask(request, fds)
        return reply.pid

    async def start_store(self, host: str, port: int) -> tuple[int, int]:
        """(pid, port) of a store that listens. Raises HostError."""
        reply = await self._ask(StoreRequest(id=0, host=host, port=port), ())
        return reply.pid, reply.port

    async def close(self) -> None:
        """End it: it leaves by itself when its socket closes, else it is killed. Its workers live on."""
        if self.pid == 0 or self.closed.is_set():
            return
        self._hang_up()
        with anyio.move_on_after(_CLOSE_TIMEOUT):
            await self.closed.wait()
            return
        kill_process(self.pid)
        await self.closed.wait()

    async def _ask(self, request: ForkServerIn, fds: Sequence[int]) -> ForkReply:
        if self._dead or self.pid == 0:
            raise self._gone()
        number, self._next_id = self._next_id, self._next_id + 1
        packet = self._encoder.encode(msgspec.structs.replace(request, id=number))
        future: asyncio.Future[ForkReply] = self._loop.create_future()
        self._waiting[number] = future
        try:
            with anyio.fail_after(_REPLY_TIMEOUT):
                await self._send(packet, fds)
                reply = await future
        except TimeoutError:
            raise HostError(f"the fork server (process {self.pid}) has not answered for {_REPLY_TIMEOUT:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if reply.error:
            raise HostError(reply.error)
        return reply

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        async with self._sending:
            while not self._dead:
                try:
                    socket.send_fds(self._socket, [packet], fds)
                    return
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                except (BrokenPipeError, ConnectionResetError):
                    break
                except OSError as error:  # EMSGSIZE: arguments beyond what a packet holds
                    raise HostError(f"asking the fork server failed: {error.strerror} ({len(packet)} bytes)") from error
        raise self._gone()

    def _receive(self) -> None:
        while not self._dead:
            try:
                packet = self._socket.recv(_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._hang_up()
                return
            try:
                self._take(self._decoder.decode(packet))
            except msgspec.DecodeError:  # it is not what we take it for: workers are spawned instead
                self._hang_up()
                kill_process(self.pid)

    def _take(self, message: ForkServerOut) -> None:
        if isinstance(message, ForkServerReady):
            self.ready = message
            self._known.set()
            return
        if isinstance(message, ForkServerParked):
            self.parked = frozenset(message.pids)
            return
        future = self._waiting.get(message.id)
        if future is not None and not future.done():
            future.set_result(message)
        elif message.pid:
            kill_process(message.pid)  # nobody waits for it any more

    def _hang_up(self) -> None:
        """Nothing more comes: everyone who waits is told."""
        if self._dead:
            return
        self._dead = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._known.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone())

    def _ended(self) -> None:
        self._receive()  # what it said before it died counts
        self._hang_up()
        self._loop.remove_reader(self._pidfd)
        self.exit_code, self.signal = wait_for(self._pidfd) or (None, None)
        os.close(self._pidfd)
        self.closed.set()

    def _gone(self) -> HostError:
        return HostError(f"the fork server (process {self.pid}) has ended; workers are spawned meanwhile")


def fork_server_argv(config: AgentConfig, fd: int) -> list[str]:
    """Its command line. Raises ConfigError for a program that is not Python: it cannot be forked."""
    launch = config.launch
    if launch.entry is Entry.PROGRAM:
        raise ConfigError(f"{launch.target} is run as it is (--no-python), so no fork server can be used for it")
    return [
        *(config.python, "-u", "-m", "perdure.trainer.forkserver", "--fd", str(fd), "--nproc", str(config.slots)),
        *(("--preload", ",".join(config.preload)) if config.preload else ()),
        *("--script-kind", launch.entry.value, "--target", launch.target),
    ]


async def spawn_store(config: AgentConfig, env: Mapping[str, str], host: str, port: int) -> tuple[int, int]:
    """(pid, port) of a store that is started without a fork server and listens. Raises HostError."""
    argv = [config.python, "-u", "-m", "perdure.trainer.store", "--host", host, "--port", str(port)]
    read_fd, write_fd = os.pipe()
    try:
        try:
            pid = start_process(argv, env, None, write_fd, _STDERR)
        finally:
            os.close(write_fd)
        try:
            with anyio.fail_after(_STORE_TIMEOUT):
                line = msgspec.json.decode(await _read_line(read_fd) or b"{}", type=StoreLine)
            if not line.port:
                raise HostError(
                    line.error or f"the store for {host} ended before it listened; its own message is above"
                )
            return pid, line.port
        except BaseException as error:
            kill_process(pid)
            if isinstance(error, TimeoutError | msgspec.DecodeError):
                raise HostError(
                    f"the store for {host} has not told its port: {str(error) or 'it took too long'}"
                ) from error
            raise
    finally:
        os.close(read_fd)


async def _read_line(fd: int) -> bytes:
    os.set_blocking(fd, False)
    line = b""
    while not line.endswith(b"\n"):
        await anyio.wait_readable(fd)
        part = os.read(fd, 4096)
        if not part:
            break
        line += part
    return line
