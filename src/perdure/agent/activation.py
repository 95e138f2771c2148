"""This node's memory server: started when a trainer first knocks at its door, and again where it has died.

The door (a Unix socket) is the agent's, so trainers may connect before the server runs, and a job without checkpoints
pays for a socket only. Knows nothing of slots.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping

import anyio
import msgspec

from perdure.agent.config import LEAVE_SIGNAL, AgentConfig
from perdure.agent.memory.config import MemoryConfig
from perdure.agent.warm import say
from perdure.errors import HostError
from perdure.host.proc import incarnation
from perdure.host.processes import Children, start_process

AGAIN_AFTER = 1.0
"""Seconds between the death of a server and the start of the next."""
_STDERR = 2


class MemoryTag(msgspec.Struct, frozen=True):
    """What `Children` says with the end of the server."""


class Activation:
    """The door and whoever stands behind it. `attempt` is asked when a server is started."""

    def __init__(
        self,
        config: AgentConfig,
        token: str,
        environ: Mapping[str, str],
        children: Children,
        attempt: Callable[[], int],
    ) -> None:
        self._config, self._token, self._environ = config, token, environ
        self._children, self._attempt = children, attempt
        self._pid = 0
        self._gone = anyio.Event()
        self._closing = False
        # An abstract name: nothing is left of it, however this process ends. The server asks the kernel who knocks.
        self.name = f"@perdure-{os.getuid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open(self) -> None:
        """Listen. Raises HostError."""
        try:
            self._socket.bind(f"\0{self.name[1:]}")
            self._socket.listen(self._config.slots + 8)
        except OSError as error:
            raise HostError(f"trainers cannot reach the checkpoint memory: {error.strerror or error}") from error
        folder = self._config.memory
        if os.path.isdir(folder) and any(name.endswith(".slot") for name in os.listdir(folder)):
            self._start()  # an earlier life has left checkpoints, which others may need
        else:
            self._wait_for_a_knock()

    def ended(self) -> None:
        """The server's process has ended."""
        self._pid = 0
        self._gone.set()
        if not self._closing:
            asyncio.get_running_loop().call_later(AGAIN_AFTER, self._start)

    async def close(self, grace: float) -> None:
        """End the server: it finishes its work within `grace` and removes the slots. With 0: at once, slots stay."""
        self._closing = True
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._pid:
            self._children.signal(self._pid, LEAVE_SIGNAL if grace else signal.SIGKILL)
            with anyio.move_on_after(grace):
                await self._gone.wait()
            if self._pid:
                self._children.signal(self._pid, signal.SIGKILL)
        self._socket.close()

    def _wait_for_a_knock(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._start)

    def _start(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._pid or self._closing:
            return
        config = self._config
        told = MemoryConfig(
            job=config.job,
            attempt=self._attempt(),
            node=config.node,
            domain=config.domain,
            folder=config.memory,
            socket_fd=self._socket.fileno(),
            control=config.control,
            token=self._token,
            tls_ca=config.tls_ca,
            address=config.address,
            end_signal=LEAVE_SIGNAL,
            owners=(incarnation(os.getpid()), incarnation(os.getppid())),
        )
        file = os.memfd_create("perdure-memory-config")
        try:
            os.write(file, msgspec.json.encode(told))
            os.lseek(file, 0, os.SEEK_SET)
            argv = [sys.executable, "-m", "perdure.agent.memory", "--config-fd", str(file)]
            self._gone = anyio.Event()
            fds = (file, self._socket.fileno())
            self._pid = start_process(argv, self._environ, None, _STDERR, _STDERR, fds)
        except HostError as problem:
            say(f"{config.node}: checkpoints have no memory: {problem}")
            asyncio.get_running_loop().call_later(AGAIN_AFTER, self._start)
            return
        finally:
            os.close(file)
        self._children.adopt(self._pid, MemoryTag())
