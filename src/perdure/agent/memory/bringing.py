"""How a slot that is not on this node gets here, as far as its trainers' side is concerned. It knows no sockets."""

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from perdure.vocab.checkpoint import CheckpointId, Chosen, Group
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId, Rank
from perdure.wire.memory import Fetch


class Brings(Protocol):
    """Fetches chunks of a slot from other nodes' memory servers (`transfer.fetch`). Raises PerdureError."""

    def __call__(
        self, addresses: Sequence[Address], checkpoint: CheckpointId, rank: Rank, chunks: Sequence[int], folder: str
    ) -> Awaitable[Path]: ...


class Rebuilds(Protocol):
    """Makes chunks of a lost slot again from its group (`rebuild`). Raises PerdureError."""

    def __call__(
        self, chosen: Chosen, group: Group, addresses: Mapping[NodeId, Address], wanted: Fetch, folder: str
    ) -> Awaitable[Path]: ...
