"""`JobView`: the frozen snapshot of a job that policy reads instead of the live cluster."""

import msgspec

from perdure.vocab.generation import Assignment
from perdure.vocab.ids import GenerationNumber, NodeId, Rank
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Instant


class PastFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was answered before: the ladder's memory."""

    fault: str
    fingerprint: str
    at: Instant
    rank: Rank | None
    step: int | None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery decision may know."""

    spec: JobSpec
    assignment: Assignment | None
    """Of the current generation."""
    next_number: GenerationNumber
    present: frozenset[NodeId]
    """Nodes that are in touch and fit for work, members and others."""
    spares: tuple[NodeId, ...]
    """Those of `present` that are no members, the best first."""
    restarts: tuple[Instant, ...]
    """When workers caused a restart."""
    past: tuple[PastFault, ...]
    """Newest last."""
    finished: frozenset[Rank]
    """Ranks of the current generation that ended well."""
