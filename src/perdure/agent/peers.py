"""Nodes ask each other when control is silent: who vouches for whom, and has anyone been replaced?

It carries questions and answers; what they mean is said by `state.vouch` and `state.peers_answered`.
"""

import time
from collections.abc import Callable
from urllib.parse import quote

import anyio

from perdure.agent import state as facts
from perdure.agent.config import AgentConfig
from perdure.agent.state import AgentState
from perdure.errors import WireError
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId
from perdure.wire.channel import Channel, RefusedError, Request, Response, Streamed
from perdure.wire.messages import Pong

PEER_TIMEOUT = 1.0
AT_ONCE = 8
"""Questions under way at a time: a control that is only slow must not be answered by a storm of them."""


class Peers:
    """One agent's door to the others, both ways."""

    def __init__(
        self, config: AgentConfig, token: str, read: Callable[[], AgentState], write: Callable[[AgentState], None]
    ) -> None:
        self._config, self._token, self._read, self._write = config, token, read, write

    async def answer(self, request: Request) -> Response | Streamed:
        """GET /v1/ping?node=N: what we know of the generation, when that tells N that it has been replaced, or that
        it may go on without control for a lease; else a refusal."""
        orders = self._read().orders
        if (request.method, request.path) != ("GET", "/v1/ping") or orders is None:
            raise RefusedError(404, f"an agent answers GET /v1/ping only, not {request.method} {request.path}")
        asker = NodeId(request.query.get("node", ""))
        members = orders.assignment.nodes if orders.assignment is not None else ()
        state, vouched = facts.vouch(self._read(), asker, time.monotonic())
        self._write(state)
        if not vouched and (not members or asker in members):
            raise RefusedError(409, f"{self._config.node} does not vouch for {asker}: control answers here")
        return Response.of(
            Pong(node=self._config.node, job=self._config.job, generation=orders.generation, members=members)
        )

    async def ask(self) -> str | None:
        """Ask all; why this node is over if one of them knows that it has been replaced, else None."""
        asked_at, orders = time.monotonic(), self._read().orders
        if orders is None or not (orders.peers or _is_loopback(self._config.control.host)):
            return None  # alone, and control is on another machine, where the network may be to blame
        peers = [peer.address for peer in orders.peers if peer.address.port]
        turn = sum(peer.node < self._config.node for peer in orders.peers)  # not everyone asks the same ones first
        peers = peers[turn:] + peers[:turn]
        vouching = 0
        for first in range(0, len(peers), AT_ONCE):
            answers: list[Pong] = []
            async with anyio.create_task_group() as group:
                for address in peers[first : first + AT_ONCE]:
                    group.start_soon(self._ask_one, address, answers)
            for pong in answers:
                if pong.generation > orders.generation and pong.members and self._config.node not in pong.members:
                    return f"{pong.node} says that generation {pong.generation} goes on without this node"
            vouching += sum(not pong.members or self._config.node in pong.members for pong in answers)
            if 2 * vouching > len(orders.peers):
                break
        self._write(facts.peers_answered(self._read(), vouching, len(orders.peers) + 1, asked_at))
        return None

    async def _ask_one(self, address: Address, answers: list[Pong]) -> None:
        channel = Channel(address, self._token, timeout=PEER_TIMEOUT)
        try:
            path = f"/v1/ping?node={quote(self._config.node)}"
            answers.append(await channel.call("GET", path, None, Pong))
        except WireError:
            return
        finally:
            await channel.aclose()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
