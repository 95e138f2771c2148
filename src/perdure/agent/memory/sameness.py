"""Notices a rank whose steps go on while no byte of its tensors changes: what it saves is not what it trains.

Knows hashes of data; does not know slots. Thread NVIDIA-NeMo/RL 3312: checkpoints of a model that nobody trained.
"""

from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import Rank


class Sameness:
    """Of one node's ranks."""

    def __init__(self) -> None:
        self._last: dict[Rank, tuple[CheckpointId, str]] = {}
        self.trouble = ""
        """One sentence, about the first rank that it was seen of; it stays, so that it is told once."""

    def note(self, rank: Rank, checkpoint: CheckpointId, data: str) -> None:
        """A checkpoint of `rank` was sealed, and this is the hash of its tensors' bytes; empty: it has none."""
        before, self._last[rank] = self._last.get(rank), (checkpoint, data)
        if before is None or self.trouble or not data or before[1] != data:
            return
        earlier = before[0]
        if earlier.line == checkpoint.line and earlier.step < checkpoint.step:
            self.trouble = (
                f"rank {rank}: the step moved from {earlier.step} to {checkpoint.step}, but no byte of its state has "
                "changed; is the model that is trained really given to run.checkpoint()?"
            )
