"""One picture of a run: a row per node coloured by phase, generations, faults, and the loss below. Needs matplotlib.

It draws what the ledger says; it accounts for nothing itself. Times are of the run, from its first record.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from perdure.cli.goodput import COLOURS
from perdure.errors import ConfigError
from perdure.goodput import Interval, Ledger, Phase, Restart
from perdure.ports import LogRecord
from perdure.vocab import event as e
from perdure.vocab.units import Instant, show_duration

LossPoint = tuple[float, int, float]
"""Instant, step, loss."""

INK, FAINT, GRID, STEPS = "#22303c", "#7b8794", "#e6eaee", "#b9c2cb"
MAX_LABELS = 12
"""Restarts with a number and a line of text; the others have a mark."""
ROOM_FOR_MARK, ROOM_FOR_NUMBER, ROOM_FOR_WORD = 0.018, 0.05, 0.13
"""Of the picture's width."""
MIN_WIDTH = 0.0015
"""Of the picture: what lasted less is drawn as wide, or a recovery of 0.2 s in an hour would not be seen."""
_ON_TOP = (Phase.DETECTION, Phase.RECOVERY)
"""Drawn last: a short bar, drawn wider than it is, must not be covered by its neighbour."""


def draw_timeline(
    ledger: Ledger, records: Iterable[LogRecord], path: Path, *, losses: Sequence[LossPoint] = ()
) -> None:
    """Write the picture to `path`, as SVG or PNG by its suffix.

    Raises ConfigError where matplotlib is missing, the suffix is another one, or the file cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: a timeline is drawn as .svg or .png; give the file one of these suffixes")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib ({error}): pip install 'perdure[demo]'") from None
    style: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 9.5, "text.color": INK}
    style["svg.hashsalt"] = "perdure"  # the same log gives the same file
    with matplotlib.rc_context(style):
        picture = _Picture(ledger, tuple(records), tuple(losses))
        picture.draw(Figure(figsize=picture.size, facecolor="white"))
        try:
            picture.figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"{path}: the picture cannot be written ({error.strerror or error})") from None


class _Picture:
    """Sizes are inches, so that rows and texts keep their height whatever there is to draw."""

    def __init__(self, ledger: Ledger, records: tuple[LogRecord, ...], losses: tuple[LossPoint, ...]) -> None:
        self.ledger, self.losses = ledger, losses
        self.begans = [r for r in records if isinstance(r, e.GenerationBegan)]
        self.scale, self.unit = _unit(ledger.wall)
        self.nodes = list(ledger.by_node)
        self.labelled = ledger.restarts[:MAX_LABELS]
        row = 0.34 if len(self.nodes) <= 16 else max(0.08, 5.5 / len(self.nodes))
        self.rows_height = max(row * len(self.nodes), 0.34)
        self.loss_height = 1.9 if losses else 0.0
        self.text_height = 0.24 * len(self.labelled) + (0.2 if self.labelled else 0.0)
        gap = 0.3 if losses else 0.0
        self.size = (11.0, 1.35 + self.rows_height + gap + self.loss_height + 0.62 + self.text_height)
        self.figure: Any = None

    def draw(self, figure: Any) -> None:
        self.figure = figure
        top = self.size[1] - 1.35
        rows = self._axes(top - self.rows_height, self.rows_height)
        self._title()
        self._rows(rows)
        self._generations(rows)
        lowest = rows
        if self.losses:
            lowest = self._axes(top - self.rows_height - 0.3 - self.loss_height, self.loss_height)
            self._loss(lowest)
            rows.tick_params(labelbottom=False)
        lowest.set_xlabel(f"time since the start, {self.unit}", color=FAINT)
        self._marks([rows] if lowest is rows else [rows, lowest], rows)
        self._labels()

    # --- places -------------------------------------------------------------------------------------------------------

    def _axes(self, bottom: float, height: float) -> Any:
        width, tall = self.size
        axes = self.figure.add_axes((0.95 / width, bottom / tall, (width - 1.6) / width, height / tall))
        axes.set_xlim(0, max(self._x(self.ledger.end), 1e-6))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(colors=FAINT, length=0, pad=5)
        return axes

    def _x(self, at: Instant) -> float:
        return (at - self.ledger.begin) / self.scale

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        """`x`, `y` in inches from the left and from the top."""
        self.figure.text(x / self.size[0], 1 - y / self.size[1], text, va="center", **style)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _title(self) -> None:
        ledger = self.ledger
        name = "Run" if ledger.job is None else ledger.job.id
        self._text(0.95, 0.32, name, fontsize=14, fontweight="bold")
        restarts = f"{len(ledger.restarts)} restart{'' if len(ledger.restarts) == 1 else 's'}"
        facts = f"{show_duration(ledger.wall)}  ·  {restarts}  ·  {ledger.effective:.1%} effective training time"
        self._text(self.size[0] - 0.65, 0.32, facts, fontsize=10.5, color=FAINT, ha="right")
        shown = [phase for phase in Phase if ledger.by_phase[phase] > 0]
        x = 0.95
        for phase in shown:
            self._text(x, 0.66, "■", color=COLOURS[phase], fontsize=12, ha="left")
            self._text(x + 0.17, 0.66, phase.value, color=INK, fontsize=9, ha="left")
            x += 0.36 + 0.068 * len(phase.value)

    def _rows(self, axes: Any) -> None:
        least = MIN_WIDTH * axes.get_xlim()[1]
        row_of = {node: row for row, node in enumerate(self.nodes)}
        bars: dict[tuple[int, Phase], list[tuple[float, float]]] = defaultdict(list)
        for interval in self.ledger.intervals:
            wide = 0.0 if interval.phase is Phase.IDLE_SPARE else least
            bars[row_of[interval.node], interval.phase].append(self._bar(interval, wide))
        for (row, phase), pieces in sorted(bars.items(), key=lambda item: item[0][1] in _ON_TOP):
            axes.broken_barh(pieces, (row - 0.36, 0.72), color=COLOURS[phase], linewidth=0)
        axes.set_ylim(max(len(self.nodes), 1) - 0.5, -0.5)
        if len(self.nodes) <= 32:
            axes.set_yticks(range(len(self.nodes)), self.nodes, color=INK)
        else:
            axes.set_yticks([])
            axes.set_ylabel(f"{len(self.nodes)} nodes", color=FAINT)

    def _bar(self, interval: Interval, least: float) -> tuple[float, float]:
        begin = self._x(interval.begin)
        return begin, max(self._x(interval.end) - begin, least)

    def _generations(self, axes: Any) -> None:
        """Their numbers, between the marks of the faults, where there is room."""
        begins = [self._x(began.at) for began in self.begans]
        ends = [*begins[1:], self._x(self.ledger.end)]
        whole = axes.get_xlim()[1]
        for began, begin, end in zip(self.begans, begins, ends, strict=False):
            number, share = began.assignment.number, (end - begin) / whole
            if share >= ROOM_FOR_NUMBER:
                text = f"generation {number}" if share >= ROOM_FOR_WORD else f"g{number}"
                self._above(axes, (begin + end) / 2, 10, text, fontsize=8.5, color=FAINT)

    def _marks(self, panels: list[Any], rows: Any) -> None:
        """A line for each restart, and a number for those that have a text; close ones one above the other."""
        before, level = -1.0, 0
        badge = {"boxstyle": "circle,pad=0.25", "facecolor": COLOURS[Phase.DETECTION], "linewidth": 0}
        for number, restart in enumerate(self.ledger.restarts, start=1):
            x = self._x(restart.at - restart.detection_s)
            for axes in panels:
                axes.axvline(x, color=COLOURS[Phase.DETECTION], linewidth=0.9, linestyle=(0, (3, 2)), zorder=3)
            if number > MAX_LABELS:
                self._above(rows, x, 4, "▾", fontsize=8, color=COLOURS[Phase.DETECTION])
                continue
            level = (level + 1) % 3 if (x - before) / rows.get_xlim()[1] < ROOM_FOR_MARK else 0
            before = x
            self._above(rows, x, 10 + 13 * level, str(number), fontsize=8, color="white", weight="bold", bbox=badge)

    def _above(self, axes: Any, x: float, points: float, text: str, **style: Any) -> None:
        """`text` at the time `x`, so many points above the rows."""
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center", "va": "center"}
        axes.annotate(text, (x, 1.0), xytext=(0, points), **place, **style)

    def _loss(self, axes: Any) -> None:
        """The loss as it was seen: a generation that goes back to the last save begins a new stroke."""
        for stroke in _strokes(self.losses):
            x = [self._x(at) for at, _, _ in stroke]
            axes.plot(x, [loss for _, _, loss in stroke], color=COLOURS[Phase.TRAINING], linewidth=1.4)
        axes.set_ylabel("loss", color=COLOURS[Phase.TRAINING])
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        steps = axes.twinx()
        for stroke in _strokes(self.losses):
            steps.plot([self._x(at) for at, _, _ in stroke], [s for _, s, _ in stroke], color=STEPS, linewidth=1.2)
        steps.set_ylim(bottom=0)
        steps.set_ylabel("step", color=FAINT)
        steps.tick_params(colors=FAINT, length=0, pad=5)
        for side in ("top", "right", "left", "bottom"):
            steps.spines[side].set_visible(False)

    def _labels(self) -> None:
        y = self.size[1] - self.text_height + 0.02
        for number, restart in enumerate(self.labelled, start=1):
            self._text(0.95, y, str(number), color=COLOURS[Phase.DETECTION], fontweight="bold", ha="left")
            self._text(1.2, y, _label(restart), ha="left", fontsize=9)
            y += 0.24
        more = len(self.ledger.restarts) - len(self.labelled)
        if more > 0:
            self._text(1.2, y - 0.02, f"and {more} more", ha="left", fontsize=8.5, color=FAINT)


def _label(restart: Restart) -> str:
    what = restart.what if len(restart.what) <= 96 else restart.what[:95].rstrip() + "…"
    if not restart.recovered:
        return f"{what}: no first step came of it"
    total = restart.detection_s + restart.recovery_s + restart.held_s
    return f"{what}: training again {show_duration(total)} after it began"


def _strokes(losses: Sequence[LossPoint]) -> list[list[LossPoint]]:
    """Cut where the step goes back."""
    strokes: list[list[LossPoint]] = []
    for point in losses:
        if not strokes or point[1] <= strokes[-1][-1][1]:
            strokes.append([])
        strokes[-1].append(point)
    return strokes


def _unit(wall: float) -> tuple[float, str]:
    """Seconds per unit of the time axis, and its name."""
    if wall <= 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if wall <= 3 * 3600 else (3600.0, "hours") if wall <= 3 * 86400 else (86400.0, "days")
