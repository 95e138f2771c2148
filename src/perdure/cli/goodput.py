"""`perdure goodput` on a terminal: the report of where a job's time went, as tables or as JSON. It computes nothing."""

from io import StringIO

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from perdure.goodput import GoodputReport, GoodputRow, Ledger, Phase, tabulate
from perdure.vocab.units import Seconds, show_duration

COLOURS: dict[Phase, str] = {
    Phase.TRAINING: "#2f9e6e",
    Phase.REDONE: "#e3b23c",
    Phase.DETECTION: "#c8324b",
    Phase.RECOVERY: "#ee7733",
    Phase.HELD: "#8a5fbf",
    Phase.START_UP: "#6fa8dc",
    Phase.SHUTDOWN: "#5d6d7e",
    Phase.IDLE_SPARE: "#d5dade",
}
"""Of a phase, in tables and pictures alike. Chosen to differ in brightness too."""
BAR_WIDTH = 20


def render_goodput(ledger: Ledger, json: bool, *, width: int = 100, colour: bool = False) -> str:
    """`perdure goodput`: text, or one JSON object of the form `GoodputReport` plus `restarts` and `by_node`."""
    if json:
        body = msgspec.to_builtins(tabulate(ledger))
        extra = msgspec.to_builtins({"restarts": ledger.restarts, "by_node": ledger.by_node})
        return msgspec.json.encode(body | extra).decode()
    return draw(goodput_tables(ledger), width=width, colour=colour)


def draw(renderable: object, *, width: int, colour: bool) -> str:
    """What rich would print, as text without trailing blanks."""
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def goodput_tables(ledger: Ledger) -> Group:
    """The report for a rich console."""
    report = tabulate(ledger)
    parts: list[object] = [_title(report), _phases(report)]
    if report.causes:
        parts += [Text(), _causes(report)]
    parts += [Text(), Text(report.definition[0].upper() + report.definition[1:] + ".", style="dim")]
    return Group(*parts)  # type: ignore[arg-type]


def _title(report: GoodputReport) -> Text:
    text = Text()
    text.append(f"{report.effective:.1%}", style="bold")
    text.append(" effective training time")
    ended = "so far" if report.is_running else "wall time"
    name = f"job {report.job}: " if report.job else ""
    text.append(f"   {name}{show_duration(report.wall)} {ended}, {_count(report.nodes, 'node')}", style="dim")
    return text


def _phases(report: GoodputReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=True)
    table.add_column("phase", footer="total")
    table.add_column("node-seconds", justify="right", footer=f"{report.node_seconds:,.2f}")
    table.add_column("share", justify="right", footer="100.0 %" if report.node_seconds else "–")
    table.add_column("", min_width=BAR_WIDTH, no_wrap=True)
    table.add_column("what it is", footer="all nodes, from joining to going", overflow="fold")
    for row in report.rows:
        if row.node_seconds:
            table.add_row(*_row(row))
    return table


def _row(row: GoodputRow) -> tuple[str | Text, ...]:
    return (
        row.phase.value,
        f"{row.node_seconds:,.2f}",
        f"{100 * row.share:.1f} %",
        _bar(row.share, COLOURS[row.phase]),
        row.meaning,
    )


def _bar(share: float, colour: str) -> Text:
    """Eighths of a cell, so that one per cent of 20 cells still shows."""
    eighths = max(1, round(share * BAR_WIDTH * 8))
    partial = "" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8]
    return Text("█" * (eighths // 8) + partial, style=colour)


def _causes(report: GoodputReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("restarts by cause")
    table.add_column("count", justify="right")
    table.add_column("back", justify="right")
    for name in ("detection", "recovery", "redone"):
        table.add_column(f"{name}, median", justify="right")
    for cause in report.causes:
        times = (cause.detection_s, cause.recovery_s, cause.redone_s)
        table.add_row(cause.cause, str(cause.count), str(cause.recovered), *(_seconds(t) for t in times))
    return table


def _seconds(seconds: Seconds | None) -> str:
    return "–" if seconds is None else show_duration(seconds)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
