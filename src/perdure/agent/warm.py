"""Has a warm fork server at all times, where that is possible, and says how it stands.

It knows when a fork server is started again; what one does is `standby`'s.
"""

import sys
import time
from collections.abc import Callable

import anyio

from perdure.agent.config import AgentConfig
from perdure.agent.ranks import Ranks
from perdure.agent.standby import ForkServer
from perdure.agent.state import UNSENT
from perdure.errors import HostError
from perdure.vocab.event import AnyEvent, ForkServerLost, NodeReady
from perdure.wire.messages import Entry

RETRY = 5.0


async def keep_warm(
    config: AgentConfig, ranks: Ranks, tell: Callable[[AnyEvent], None], ready: Callable[[], None]
) -> None:
    """Run until cancelled, or until workers must be spawned for good. `ready` is called when workers can be started."""
    keeper = _Keeper(config, ranks, tell, ready)
    if not config.fork_server or config.launch.entry is Entry.PROGRAM:
        keeper.say_ready(warm=False, note="workers are spawned, as asked")
        return
    while (server := await keeper.start()) is not None:
        await server.closed.wait()
        ranks.fork_server = None
        event = ForkServerLost(
            id=UNSENT, at=time.monotonic(), node=config.node, exit_code=server.exit_code, signal=server.signal
        )
        tell(event)


class _Keeper:
    def __init__(
        self, config: AgentConfig, ranks: Ranks, tell: Callable[[AnyEvent], None], ready: Callable[[], None]
    ) -> None:
        self._config, self._ranks, self._tell, self._ready = config, ranks, tell, ready
        self._began = time.monotonic()

    async def start(self) -> ForkServer | None:
        """A warm server, or None when workers must be spawned for good."""
        while True:
            try:
                server = await self._ranks.start_fork_server()
                ready = await server.wait_ready()
            except HostError as problem:
                self.say_ready(warm=False, note=str(problem))
                await anyio.sleep(RETRY)
                continue
            if not ready.warm:
                await server.close()
                say(f"{self._config.node}: {ready.note}; workers are spawned")
                self.say_ready(warm=False, note=ready.note)
                return None
            self._ranks.fork_server = server
            self.say_ready(warm=True, note=ready.note)
            return server

    def say_ready(self, *, warm: bool, note: str) -> None:
        now = time.monotonic()
        event = NodeReady(id=UNSENT, at=now, node=self._config.node, warm=warm, seconds=now - self._began, note=note)
        self._ready()
        self._tell(event)


def say(text: str) -> None:
    """One line of Perdure's own on the terminal."""
    try:
        sys.stderr.write(f"perdure: {text}\n")
        sys.stderr.flush()
    except OSError:
        return  # the terminal has gone, with the launcher perhaps: nobody is left to be told
