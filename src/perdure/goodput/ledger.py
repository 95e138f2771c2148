"""`account`: from an event log to a `Ledger`, every node-second in exactly one phase, every restart with its cost.

It sums what `fold` made of the records; it reads no clock and no file. All times are the log's, on control's clock.
"""

from collections.abc import Iterable

import msgspec

from perdure.goodput.fold import Fold
from perdure.goodput.phases import Interval, Phase, to_seconds, to_us
from perdure.goodput.restarts import Restart
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.ids import NodeId
from perdure.vocab.job import JobSpec
from perdure.vocab.units import Instant, Seconds


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Every node-second of a job, in exactly one `Phase`.

    A node is present from NodeJoined to NodeLost, NodeLeft or JobEnded. The phases add up to the presence of all nodes,
    exactly in microseconds (`interval.end - interval.begin`, rounded to them).
    """

    job: JobSpec | None
    begin: Instant
    end: Instant
    """Of the job, or the moment up to which a running job is accounted."""
    ended: bool
    exit_code: int | None
    wall: Seconds
    node_seconds: Seconds
    """Presence of all nodes; what the phases add up to."""
    by_phase: dict[Phase, Seconds]
    """Node-seconds; every phase is there."""
    by_node: dict[NodeId, dict[Phase, Seconds]]
    effective: float
    """Effective training time: training / (all node-seconds - idle spare), 0 … 1. Redone steps are not training."""
    intervals: tuple[Interval, ...]
    """By node in the order of joining, then by time; neighbours differ."""
    restarts: tuple[Restart, ...]
    restarts_by_cause: dict[str, int]


def account(records: Iterable[LogRecord], now: Instant | None = None) -> Ledger:
    """Where the time of a job went.

    `now` (control's clock) is the end of a job that still runs; without it the last record is. Takes any sequence of
    records: time that goes backwards stands still, what does not fit is passed over. Where no generation ever tells a
    step, GenerationRunning stands for the first step. Steps are compared by the numbers that the script tells.
    """
    known = tuple(records)
    fold = Fold(tells=any(isinstance(record, e.StepsBegun) for record in known))
    for record in known:
        fold.take(record)
        if fold.ended:
            break
    if now is not None and not fold.ended:
        fold.clock = max(fold.clock, to_us(now))
    return _close(fold)


def _close(fold: Fold) -> Ledger:
    restarts = fold.book.close(fold.clock)
    intervals = fold.roster.intervals(fold.clock)
    by_node = _sums(fold.roster.order, intervals)
    total = {phase: sum(sums[phase] for sums in by_node.values()) for phase in Phase}
    busy = sum(total.values()) - total[Phase.IDLE_SPARE]
    begin = fold.clock if fold.first is None else fold.first
    return Ledger(
        job=fold.job,
        begin=to_seconds(begin),
        end=to_seconds(fold.clock),
        ended=fold.ended,
        exit_code=fold.exit_code,
        wall=to_seconds(fold.clock - begin),
        node_seconds=to_seconds(sum(total.values())),
        by_phase={phase: to_seconds(us) for phase, us in total.items()},
        by_node={node: {p: to_seconds(us) for p, us in sums.items()} for node, sums in by_node.items()},
        effective=total[Phase.TRAINING] / busy if busy else 0.0,
        intervals=intervals,
        restarts=restarts,
        restarts_by_cause=_count(restarts),
    )


def _sums(order: Iterable[NodeId], intervals: tuple[Interval, ...]) -> dict[NodeId, dict[Phase, int]]:
    sums = {node: dict.fromkeys(Phase, 0) for node in order}
    for interval in intervals:
        sums[interval.node][interval.phase] += to_us(interval.end) - to_us(interval.begin)
    return sums


def _count(restarts: tuple[Restart, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for restart in restarts:
        counts[restart.cause] = counts.get(restart.cause, 0) + 1
    return counts
