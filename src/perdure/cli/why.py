"""Why a job did what it did: each decision with the event it answers, the diagnosis, and what came of it.

Works on records alone; it reads no log and prints nothing. `story` tells faults while they happen.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from perdure.cli.words import act, date, describe, nodes, ranks, since, time_of_day
from perdure.goodput import Restart, account
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import Begin, Decision, Drain, Finish, GiveUp, Grow
from perdure.vocab.fault import Diagnosis
from perdure.vocab.ids import JobId
from perdure.vocab.units import Instant, show_duration

_OF_A_GENERATION = (
    e.WorkerExited,
    e.WorkerStopped,
    e.WorkerStalled,
    e.WorkerUnkillable,
    e.NodeFenced,
    e.StoreLost,
    e.StartFailed,
)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, from its cause to its outcome."""

    at: Instant
    """Of the event; of the decision where the event is not in the log."""
    event: e.AnyEvent | None
    others: tuple[e.AnyEvent, ...]
    """Faults that the decision covers too: they came just before it, or late, from the generation that it ended."""
    decision: Decision
    """With the diagnosis."""
    outcome: Restart | None
    """None: no generation was to come of it."""


class WhyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `perdure why` knows, before it is put in words."""

    job: JobId | None
    started: Instant | None
    chains: tuple[Chain, ...]
    end: e.JobEnded | None


def why(records: Iterable[LogRecord]) -> WhyReport:
    """The chains of a log, in order."""
    known = tuple(records)
    spec = next((r.spec for r in known if isinstance(r, e.JobSubmitted)), None)
    return WhyReport(
        job=None if spec is None else spec.id,
        started=known[0].at if known else None,
        chains=tuple(_chains(known)),
        end=next((r for r in reversed(known) if isinstance(r, e.JobEnded)), None),
    )


def _chains(records: tuple[LogRecord, ...]) -> Iterator[Chain]:
    outcomes = {restart.answers: restart for restart in account(records).restarts}
    events = {record.id: record for record in records if not isinstance(record, Decision)}
    others = _others_of(records)
    for index, decision in enumerate(record for record in records if isinstance(record, Decision)):
        event = events.get(decision.answers)
        yield Chain(
            at=decision.at if event is None else event.at,
            event=event,
            others=tuple(other for other in others.get(index, ()) if other.id != decision.answers),
            decision=decision,
            outcome=outcomes.get(decision.answers),
        )


def _others_of(records: tuple[LogRecord, ...]) -> dict[int, list[e.AnyEvent]]:
    """The faults that each decision covers, by its number: those before it, and late ones of what it ended."""
    covered: dict[int, list[e.AnyEvent]] = {}
    answered, number = -1, 0
    coming = 0
    for record in records:
        if isinstance(record, Decision):
            answered = coming if record.diagnosis is not None else answered
            coming += 1
        elif isinstance(record, e.GenerationBegan):
            number = record.assignment.number
        elif _is_fault(record):
            is_late = answered >= 0 and isinstance(record, _OF_A_GENERATION) and record.generation < number
            covered.setdefault(answered if is_late else coming, []).append(record)
    return covered


def _is_fault(event: e.AnyEvent) -> bool:
    well = isinstance(event, e.WorkerExited) and event.exit_code == 0
    return isinstance(event, (*_OF_A_GENERATION, e.NodeLost, e.NodeLeft)) and not well


def explain(records: Iterable[LogRecord]) -> list[str]:
    """The chains in plain words, one line each; times in the job, and of the day in UTC."""
    known = tuple(records)
    report = why(known)
    if report.started is None:
        return ["nothing is known of this job: its log is empty"]
    lines = [_head(known, report.started)]
    last = None if report.end is not None else next((c for c in reversed(report.chains) if c.outcome), None)
    for chain in report.chains:
        lines += ["", *_chain(chain, report.started, is_open=chain is last)]
    return [*lines, "", _end(report, known[-1])]


def _head(records: Sequence[LogRecord], start: Instant) -> str:
    spec = next((r.spec for r in records if isinstance(r, e.JobSubmitted)), None)
    return f"started {date(start)}" if spec is None else f"job {spec.id}, started {date(start)}: {spec.world}"


def _chain(chain: Chain, start: Instant, *, is_open: bool) -> list[str]:
    decision, diagnosis = chain.decision, chain.decision.diagnosis
    result = [] if chain.outcome is None else [f"  outcome    {outcome(chain.outcome, is_open=is_open)}"]
    if diagnosis is None:
        when, title = _when(start, decision.at), _plain_title(decision)
        return [f"{when}  {title}", f"  decision   {_done(decision)}", *result]
    return [
        f"{_when(start, chain.at)}  {diagnosis.fault.title}",
        f"  event      {diagnosis.what}{_others(chain.others)}",
        f"  diagnosis  {_diagnosis(diagnosis)}",
        f"  decision   {_done(decision)}",
        *result,
    ]


def _when(start: Instant, at: Instant) -> str:
    return f"{since(start, at)} ({time_of_day(at)})"


def _plain_title(decision: Decision) -> str:
    first = decision.actions[0] if decision.actions else None
    match first:
        case Begin():
            return f"generation {first.assignment.number}: {ranks(first.assignment)}"
        case Drain():
            return "stop"
        case Finish():
            return "all ranks have finished"
        case GiveUp():
            return "given up"
        case Grow():
            return f"{nodes(first.joined)} can take part"
        case _:
            return "no fault"


def _others(others: tuple[e.AnyEvent, ...]) -> str:
    if not others:
        return ""
    return f" (and {len(others)} more that came with it, first: {describe(others[0])})"


def _diagnosis(diagnosis: Diagnosis) -> str:
    sure = "" if diagnosis.confidence >= 1 else f", {diagnosis.confidence:.0%} sure"
    return f"{diagnosis.fault.id}{sure}: {diagnosis.fault.meaning}"


def _done(decision: Decision) -> str:
    done = "; ".join(act(action) for action in decision.actions)
    return f"{done}, because {decision.because}" if done else f"nothing, because {decision.because}"


def outcome(restart: Restart, *, is_open: bool = False) -> str:
    """What came of a decision, with the times. `is_open`: it is the last one of a job that runs."""
    parts = []
    if restart.detection_s:
        parts.append(f"noticed after {show_duration(restart.detection_s)}")
    if restart.generation is not None and restart.running_s is not None:
        parts.append(f"generation {restart.generation} ran after {show_duration(restart.running_s)}")
    if restart.recovered:
        parts.append(f"every rank had its first step after {show_duration(restart.recovery_s)}")
    else:
        parts.append("the first step is awaited" if is_open else "no first step came of it")
    if restart.held_s:
        parts.append(f"besides {show_duration(restart.held_s)} on hold")
    if restart.redone_s:
        parts.append(f"{show_duration(restart.redone_s)} of steps were done again")
    return ", ".join(parts)


def _end(report: WhyReport, last: LogRecord) -> str:
    start = last.at if report.started is None else report.started
    if report.end is None:
        return f"not ended: the last record is of {_when(start, last.at)}"
    return f"{_when(start, report.end.at)}  {describe(report.end)}"


def render_why(records: Iterable[LogRecord], json: bool) -> str:
    """`perdure why`: text, or one JSON object of the form `WhyReport`."""
    if json:
        return msgspec.json.encode(why(records)).decode()
    return "\n".join(explain(records))
