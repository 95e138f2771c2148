"""`python -m perdure.control.desk --config-fd N`: the commit desk of a job that has no `perdure run`.

It hosts what control does for checkpoints (`control.saves`) and nothing else; members are whoever has attached. It
writes one line of JSON (`DeskFile`) to stdout when it listens, and keeps nothing: a desk that begins anew learns
everything from the servers' reports.
"""

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable

import anyio
import msgspec

from perdure.control.memory_door import MemoryDoor
from perdure.control.storing import is_urgent
from perdure.errors import ConfigError, HostError, PerdureError
from perdure.host.clock import SteadyClock
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId
from perdure.vocab.units import Seconds
from perdure.wire.channel import Request, Response, Streamed, listen, serve, server_tls
from perdure.wire.tokens import parse_token

LOSE_AFTER: Seconds = 20.0
"""Beyond the time at which a memory server's next report was due."""
LOOK_EVERY: Seconds = 0.5
END_WITHIN: Seconds = 25.0
"""After SIGTERM: a memory server's own grace is shorter."""
HEARD_WITHIN: Seconds = 1.0
"""A server that was sent the signal too has said within it whether it still has something to store."""
DONE_LINGER: Seconds = 10.0
"""After a script that has ended well: for the last words of its servers."""
PUBLISH_WITHIN: Seconds = 5.0
"""A desk that holds the lock has written its file within this time."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class DeskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a desk is started with: JSON, read from the descriptor that `--config-fd` names; nothing else."""

    job: JobId
    token: str
    host: str = "127.0.0.1"
    """Interface to listen on; empty: all."""
    port: int = 0
    """0: any free one."""
    advertise: str = ""
    """Name or address by which other nodes reach it; empty: `host`."""
    linger: Seconds = 60.0
    """It ends when no memory server has reported for so long."""
    with_parent: bool = False
    """It dies with its parent. Else it is to outlive the trainer that started it."""
    file: str = ""
    """Where to publish the `DeskFile` (mode 0600). While a desk holds this file a second one prints the first one's
    line and ends with 0, so that a restarted trainer finds the desk that the memory servers know."""
    tls_cert: str | None = None
    tls_key: str | None = None


class DeskFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where a desk is to be found, and what it takes to be let in."""

    job: JobId
    address: Address
    token: str
    pid: int


class Desk:
    """One life of a desk."""

    def __init__(self, config: DeskConfig, say: Callable[[DeskFile], None]) -> None:
        self._config, self._say = config, say
        self._door = MemoryDoor(SteadyClock(), lose_after=LOSE_AFTER)
        self._heard_at = time.monotonic()

    async def run(self) -> None:
        """Serve until nobody has reported for `linger` seconds, or until SIGTERM or SIGINT."""
        config = self._config
        tls = server_tls(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
        listener = await listen(config.host, config.port, tls)
        address = Address(config.advertise or config.host or "127.0.0.1", listener.address.port)
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_on_signal, group.cancel_scope)
            group.start_soon(lambda: serve(self._handle, listener, token=config.token))
            group.start_soon(self._door.run)
            self._say(DeskFile(job=config.job, address=address, token=config.token, pid=os.getpid()))
            while self._door.is_busy or time.monotonic() - self._heard_at < self._linger:  # noqa: ASYNC110 - for time
                await anyio.sleep(min(LOOK_EVERY, config.linger))
            group.cancel_scope.cancel()

    @property
    def _linger(self) -> Seconds:
        """A script that has ended well is not waited for as one that has died."""
        return min(DONE_LINGER, self._config.linger) if self._door.state.finished else self._config.linger

    async def _handle(self, request: Request) -> Response | Streamed:
        try:
            return await self._door.handle(request)
        finally:
            self._heard_at = time.monotonic()

    async def _end_on_signal(self, scope: anyio.CancelScope) -> None:
        """SIGTERM may have been sent to the memory servers too: while they have something to store, we are needed."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                with anyio.move_on_after(END_WITHIN):
                    if self._door.is_busy:
                        await anyio.sleep(HEARD_WITHIN)
                    while self._door.is_busy and is_urgent(self._door.state):  # noqa: ASYNC110 - for time
                        await anyio.sleep(LOOK_EVERY)
                scope.cancel()
                return


# --- how it starts ---------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    try:
        config = read_config(argv)
        if config.with_parent:
            _die_with_parent()
        lock = _hold(config.file) if config.file else None
        if config.file and lock is None:
            _print(_published(config.file))
            return 0
        anyio.run(Desk(config, lambda found: _publish(config, lock, found)).run)
    except PerdureError as problem:
        return _fail(str(problem), 2 if isinstance(problem, ConfigError) else 1)
    except BaseExceptionGroup as group:
        known = group.subgroup(PerdureError)
        if known is None:
            raise
        return _fail(str(_first(known)), 1)
    return 0


def read_config(argv: list[str]) -> DeskConfig:
    """The configuration from its descriptor. Raises ConfigError."""
    if len(argv) != 2 or argv[0] != "--config-fd" or not argv[1].isdigit():
        raise ConfigError("the desk is started by Perdure: python -m perdure.control.desk --config-fd N")
    try:
        with open(int(argv[1]), "rb") as file:
            config = msgspec.json.decode(file.read(), type=DeskConfig)
    except (OSError, msgspec.DecodeError) as problem:
        raise ConfigError(f"descriptor {argv[1]} holds no configuration of a desk: {problem}") from None
    if config.linger <= 0 or not 0 <= config.port < 65536:
        raise ConfigError(
            f"a desk needs a linger above 0 s and a port below 65536, not {config.linger:g}, {config.port}"
        )
    return msgspec.structs.replace(config, token=parse_token(config.token))


def _die_with_parent() -> None:
    """As `host.processes` does for children of an agent; this one's parent may be any trainer."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        raise HostError("the process that started this desk has gone already")


def _hold(path: str) -> int | None:
    """The descriptor that holds the desk's file, for life; None: another desk holds it. Raises HostError."""
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise HostError(f"cannot make {path}.lock: {(problem.strerror or str(problem)).lower()}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(config: DeskConfig, lock: int | None, found: DeskFile) -> None:
    if lock is not None:
        new = f"{config.file}.{os.getpid()}.new"
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(found))
            os.replace(new, config.file)
        except OSError as problem:
            raise HostError(f"cannot write {config.file}: {(problem.strerror or str(problem)).lower()}") from None
    _print(found)


def _published(path: str) -> DeskFile:
    """What the desk that holds the lock has published. Raises HostError when it does not within PUBLISH_WITHIN."""
    until = time.monotonic() + PUBLISH_WITHIN
    while True:
        try:
            with open(path, "rb") as file:
                found = msgspec.json.decode(file.read(), type=DeskFile)
            os.kill(found.pid, 0)  # else it is an earlier desk's, which the new one has not replaced yet
            return found
        except (OSError, msgspec.DecodeError) as problem:
            if time.monotonic() > until:
                raise HostError(f"another desk holds {path} and has not said where it is: {problem}") from None
        time.sleep(0.02)


def _print(found: DeskFile) -> None:
    """The one line. Whoever started us may have gone: then nobody needs it."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()
    except (BrokenPipeError, AttributeError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - else Python complains at exit


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"perdure: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
