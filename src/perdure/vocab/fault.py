"""`Fault`: a catalogue entry, what can break. `Diagnosis`: that it did, where, and by which events we know."""

from enum import StrEnum

import msgspec

from perdure.vocab.ids import EventId, GenerationNumber, NodeId, Rank


class Scope(StrEnum):
    """How much is unfit when the fault occurs; it bounds the rungs that can help."""

    RANK = "rank"
    NODE = "node"
    JOB = "job"


class Blame(StrEnum):
    """Who has to act in the end."""

    USER = "user"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "unknown"


class Remedy(StrEnum):
    """The lowest rung that can help."""

    RESTART_WORKERS = "restart workers"
    REPLACE_NODE = "replace node"
    RETRY_ONCE = "retry once"
    """Restart workers; when it comes again, stop."""
    STOP = "stop"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What can break, how it shows, what it means and what helps."""

    id: str
    """Dotted, as in `worker.out-of-memory`."""
    title: str
    meaning: str
    """One sentence for the person at the terminal."""
    scope: Scope
    blame: Blame
    remedy: Remedy
    action: str
    """What a person does about it."""
    source: str
    """Document or measurement, with its date."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that occurred: where, why we think so, how sure we are. Not what to do."""

    fault: Fault
    node: NodeId
    rank: Rank | None
    generation: GenerationNumber | None
    step: int | None
    evidence: tuple[EventId, ...]
    """The first is the event that is answered."""
    confidence: float
    """0 … 1."""
    what: str
    """One sentence with the figures: what happened and where."""
    fingerprint: str
    """Equal for two occurrences that are the same thing again (type, line, step); see the ladder's memory."""
    counts_as_restart: bool
    """A worker caused it, so it takes from the restart budget."""
    exit_code: int = 1
    """What the job returns if it ends by this."""
    detail: str = ""
    """Traceback or last lines, shown when the job ends by it."""
