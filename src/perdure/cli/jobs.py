"""`perdure jobs`: one row per job, told from its records and from whether its control lives. It reads no folder."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
from rich.table import Table
from rich.text import Text

from perdure.cli.goodput import draw
from perdure.cli.words import act, describe, minute
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.decision import Begin, Decision, Hold
from perdure.vocab.generation import Assignment
from perdure.vocab.ids import JobId, NodeId
from perdure.vocab.units import Instant, Seconds, show_duration

EXIT_INCOMPLETE = 3
"""Of all of Perdure: stopped before it was done."""


class JobState(StrEnum):
    STARTING = "starting"
    """No generation has run yet."""
    RUNNING = "running"
    HELD = "held"
    DONE = "done"
    STOPPED = "stopped"
    """Someone asked it to end."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    """It has not ended, and its control does not answer."""


class JobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One job in a listing."""

    job: JobId
    state: JobState
    started: Instant | None
    wall: Seconds
    """To its end; to the last record, or now, of a job that has not ended."""
    nodes: int
    """In the newest generation."""
    spares: int
    """Present and not in it."""
    restarts: int
    """Generations after the first."""
    last_event: str
    exit_code: int | None


_QUIET = (
    *(e.NodeGathered, e.WorkersStarted, e.NodeReady, e.DrainAcked, e.SavePassed, e.CaughtUp, e.NodeDisconnected),
    *(e.CheckpointCommitted, e.CheckpointSkipped),
)
"""Too many, or too small, to be the last event for a reader."""


def summarize(
    job: JobId, records: Iterable[LogRecord], *, control_alive: bool, now: Instant | None = None
) -> JobSummary:
    """The row of `job`; `now` (control's clock) is the end of the wall time while it runs."""
    first: Instant | None = None
    last = 0.0
    last_event = ""
    present: set[NodeId] = set()
    assignment: Assignment | None = None
    generations = 0
    state = JobState.STARTING
    end: e.JobEnded | None = None
    for record in records:
        first = record.at if first is None else first
        last = max(last, record.at)
        last_event = _words(record) or last_event
        state = _next_state(state, record)
        match record:
            case e.NodeJoined():
                present.add(record.node.id)
            case e.NodeLost() | e.NodeLeft():
                present.discard(record.node)
            case e.GenerationBegan():
                assignment, generations = record.assignment, generations + 1
            case e.JobEnded():
                end = record
                break  # its nodes' good-byes are no news
            case _:
                pass
    if end is None:
        state = state if control_alive else JobState.UNKNOWN
        last = last if now is None or not control_alive else max(last, now)
    members = set() if assignment is None else set(assignment.nodes)
    return JobSummary(
        job=job,
        state=state,
        started=first,
        wall=0.0 if first is None else max(last - first, 0.0),
        nodes=len(members),
        spares=len(present - members),
        restarts=max(generations - 1, 0),
        last_event=last_event,
        exit_code=None if end is None else end.exit_code,
    )


def _next_state(state: JobState, record: LogRecord) -> JobState:
    match record:
        case e.JobEnded(exit_code=0):
            return JobState.DONE
        case e.JobEnded():
            return JobState.STOPPED if record.exit_code == EXIT_INCOMPLETE else JobState.FAILED
        case e.GenerationRunning():
            return JobState.RUNNING
        case e.GenerationBegan():
            return JobState.RUNNING if state is JobState.HELD else state
        case Decision() if any(isinstance(action, Hold) for action in record.actions):
            return JobState.HELD
        case _:
            return state


def _words(record: LogRecord) -> str:
    if isinstance(record, _QUIET):
        return ""
    if not isinstance(record, Decision):
        return describe(record)
    # The generation that begins says as much.
    return "" if any(isinstance(a, Begin) for a in record.actions) else "; ".join(act(a) for a in record.actions)


_STYLES: dict[str, str] = {
    JobState.RUNNING: "green",
    JobState.HELD: "magenta",
    JobState.FAILED: "red",
    JobState.UNKNOWN: "yellow",
    JobState.DONE: "dim",
}


_COLUMNS = ("job", "state", "started (UTC)", "wall", "nodes", "restarts", "exit", "last event")
_NUMBERS = ("nodes", "restarts", "exit")
_LEAST_EVENT = 16
"""Letters of the last event that are shown in the narrowest window; then the terminal folds the line."""


def jobs_table(jobs: Sequence[JobSummary], width: int) -> tuple[Table, int]:
    """For a rich console, newest first, and the width that it needs. Only the last event is cut, never an id."""
    rows = [_cells(job) for job in sorted(jobs, key=lambda job: -(job.started or 0.0))]
    # rich, short of room, takes it from every column that may not wrap, so the cut is made here.
    taken = sum(
        max(len(cell) for cell in (name, *cells)) + 1 for name, *cells in zip(_COLUMNS[:-1], *rows, strict=False)
    )
    room = max(width - taken - len(_COLUMNS), _LEAST_EVENT)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        event = row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"
        table.add_row(row[0], Text(row[1], style=_STYLES.get(row[1], "")), *row[2:-1], event)
    return table, taken + len(_COLUMNS) + room


def _cells(job: JobSummary) -> tuple[str, ...]:
    return (
        job.job,
        job.state.value,
        "–" if job.started is None else minute(job.started),
        show_duration(job.wall),
        f"{job.nodes}+{job.spares}" if job.spares else str(job.nodes),
        str(job.restarts),
        "" if job.exit_code is None else str(job.exit_code),
        job.last_event,
    )


def render_jobs(jobs: Sequence[JobSummary], json: bool, *, width: int = 120, colour: bool = False) -> str:
    """`perdure jobs`: a table, or one JSON array of `JobSummary`."""
    if json:
        return msgspec.json.encode(jobs).decode()
    if not jobs:
        return "no jobs"
    table, needed = jobs_table(jobs, width)
    return draw(table, width=needed, colour=colour)
