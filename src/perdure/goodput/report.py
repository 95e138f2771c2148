"""The ledger as rows for a reader: which phases, how long, which share. It draws no table and prints nothing."""

import msgspec

from perdure.goodput.ledger import Ledger
from perdure.goodput.phases import Phase
from perdure.goodput.restarts import Restart
from perdure.vocab.units import Seconds

DEFINITION = "effective training time = training / (all node-seconds - idle spare); redone steps are not training"
"""Printed with every report, because the word is used for several things elsewhere."""

MEANING: dict[Phase, str] = {
    Phase.TRAINING: "steps that were new",
    Phase.REDONE: "steps done before, and not saved",
    Phase.DETECTION: "a fault that nobody knew of yet",
    Phase.RECOVERY: "fault known, to the next first step",
    Phase.HELD: "waiting for a node",
    Phase.START_UP: "joining, to the first step",
    Phase.SHUTDOWN: "stop or last worker's end, to job's end",
    Phase.IDLE_SPARE: "present, not in the generation",
}


class GoodputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One phase."""

    phase: Phase
    meaning: str
    node_seconds: Seconds
    share: float
    """Of all node-seconds, 0 … 1."""


class CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    """All restarts of one cause. Medians over those that recovered; None: none did."""

    cause: str
    count: int
    recovered: int
    detection_s: Seconds | None
    recovery_s: Seconds | None
    redone_s: Seconds | None


class GoodputReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a goodput report says, before it is drawn."""

    job: str
    is_running: bool
    wall: Seconds
    nodes: int
    """That ever were there."""
    node_seconds: Seconds
    """What the rows add up to."""
    effective: float
    definition: str
    rows: tuple[GoodputRow, ...]
    """Every phase, in the order of `Phase`."""
    causes: tuple[CauseRow, ...]
    """Most frequent first."""


def tabulate(ledger: Ledger) -> GoodputReport:
    """The rows of `ledger`. The shares add up to 1 where there is any time at all."""
    total = ledger.node_seconds
    rows = tuple(
        GoodputRow(phase=phase, meaning=MEANING[phase], node_seconds=seconds, share=seconds / total if total else 0.0)
        for phase, seconds in ((phase, ledger.by_phase[phase]) for phase in Phase)
    )
    causes = sorted(ledger.restarts_by_cause, key=lambda cause: -ledger.restarts_by_cause[cause])
    return GoodputReport(
        job="" if ledger.job is None else ledger.job.id,
        is_running=not ledger.ended,
        wall=ledger.wall,
        nodes=len(ledger.by_node),
        node_seconds=total,
        effective=ledger.effective,
        definition=DEFINITION,
        rows=rows,
        causes=tuple(_cause(cause, [r for r in ledger.restarts if r.cause == cause]) for cause in causes),
    )


def _cause(cause: str, restarts: list[Restart]) -> CauseRow:
    recovered = [r for r in restarts if r.recovered]
    return CauseRow(
        cause=cause,
        count=len(restarts),
        recovered=len(recovered),
        detection_s=_median([r.detection_s for r in recovered]),
        recovery_s=_median([r.recovery_s for r in recovered]),
        redone_s=_median([r.redone_s for r in recovered]),
    )


def _median(values: list[Seconds]) -> Seconds | None:
    """The upper median: a value that did occur."""
    return sorted(values)[len(values) // 2] if values else None
