"""From trials to rows: medians, ratios and spread, and the table for a reader. Nothing about processes."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

MEMCPY = "memcpy"
Row = dict[str, object]

CASES = {
    "first stall": "first_s",
    "warm stall": "warm_s",
    "total": "total_s",
    "total while training": "busy_s",
    "drag": "drag_s",
    "restore": "restore_s",
}
"""Name of a case → what a trial calls it."""
LIMIT_OF = {"first stall": "memcpy_s", "warm stall": "memcpy_s", "restore": "memcpy_back_s"}
"""Cases that the bare memcpy bounds, and the copy that each is paired with."""


@dataclass
class Record:
    """All trials of one method in one world."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    """By what a trial calls them; pairs have equal places."""
    version: str = ""
    errors: list[str] = field(default_factory=list)
    wrong: bool = False
    """It gave back other values than those at the time of `save`."""

    def add(self, result: dict[str, object]) -> None:
        if "error" in result:
            self.errors.append(str(result["error"]))
            return
        self.version = str(result["version"])
        self.wrong = self.wrong or result.get("correct") is False
        for key, value in result.items():
            if isinstance(value, list):
                self.numbers.setdefault(key, []).extend(value)
            elif isinstance(value, float):
                self.numbers.setdefault(key, []).append(value)

    def all(self, key: str) -> list[float]:
        return self.numbers.get(key, [])

    def median(self, key: str) -> float | None:
        values = self.all(key)
        return statistics.median(values) if values else None

    def of_memcpy(self, case: str) -> list[float]:
        """Each time of `case`, over the bare memcpy that was done just before it (a first stall: over their median)."""
        times, limits = self.all(CASES[case]), self.all(LIMIT_OF[case])
        if not limits or not times:
            return []
        if len(times) != len(limits):
            limits = [statistics.median(limits)] * len(times)
        return [mine / limit for mine, limit in zip(times, limits, strict=True)]


def rows_of(world: int, mib: int, tiers: dict[str, tuple[str, ...]], records: dict[str, Record]) -> Iterable[Row]:
    """`tiers`: our method → the peers that do the same, none of which need have run."""
    for ours, peers in tiers.items():
        for case in CASES:
            if case in LIMIT_OF and (records[ours].numbers or records[ours].errors):
                yield _limit_row(case, world, mib, ours, records[ours])
            for peer in peers:
                yield _row(case, world, mib, (ours, records[ours]), (peer, records[peer]))


def _start(case: str, world: int, mib: int, ours: str, record: Record) -> Row:
    row: Row = {"case": f"{case}, {ours.removeprefix('perdure ')}", "world": world, "mib": mib}
    row |= {"ours_s": record.median(CASES[case]), "ours_all_s": record.all(CASES[case])}
    if record.errors:
        row["ours_error"] = record.errors[0]
    if record.wrong:
        row["ours_wrong"] = True
    return row


def _limit_row(case: str, world: int, mib: int, ours: str, record: Record) -> Row:
    """Ours beside the bare memcpy of the same trials: the ratio is of pairs, not of medians."""
    row = _start(case, world, mib, ours, record)
    row |= {"peer": MEMCPY, "peer_s": record.median(LIMIT_OF[case]), "peer_all_s": record.all(LIMIT_OF[case])}
    pairs = [1 / ratio for ratio in record.of_memcpy(case)]
    row |= _ratios(statistics.median(pairs) if pairs else None, min(pairs, default=None), max(pairs, default=None))
    if pairs:
        row["ours_of_memcpy"] = 1 / statistics.median(pairs)
    return row


def _row(case: str, world: int, mib: int, ours: tuple[str, Record], peer: tuple[str, Record]) -> Row:
    (our_name, our_record), (peer_name, peer_record) = ours, peer
    key = CASES[case]
    row = _start(case, world, mib, our_name, our_record)
    mine, theirs = our_record.all(key), peer_record.all(key)
    row |= {"peer": peer_name, "peer_version": peer_record.version}
    row |= {"peer_s": peer_record.median(key), "peer_all_s": theirs}
    # A ratio of drags near zero says nothing: the difference is in the two columns.
    both = bool(mine and theirs) and min(*mine, *theirs) > 0
    middle = statistics.median(theirs) / statistics.median(mine) if both else None
    row |= _ratios(middle, min(theirs) / max(mine) if both else None, max(theirs) / min(mine) if both else None)
    if case in LIMIT_OF and peer_record.of_memcpy(case):
        row["peer_of_memcpy"] = statistics.median(peer_record.of_memcpy(case))
    if peer_record.errors:
        row["error"] = peer_record.errors[0]
    if peer_record.wrong:
        row["peer_wrong"] = True
    return row


def _ratios(middle: float | None, least: float | None, most: float | None) -> Row:
    return {"ratio": middle, "ratio_least": least, "ratio_most": most}


# --- for a reader ----------------------------------------------------------------------------------------------------

HEADS = ("method", "set-up", "first", "warm stall (range)", "/memcpy", "total", "…training", "drag (range)", "restore")


def line_of(name: str, record: Record) -> tuple[str, ...]:
    """One method's line of the table."""
    if not record.numbers:
        return (name, record.errors[0] if record.errors else "not run")
    pairs = record.of_memcpy("warm stall")
    note = " WRONG" if record.wrong else ""
    return (
        name + note + (f" ({len(record.errors)} failed)" if record.errors else ""),
        _figure(record.all("open_s")),
        _figure(record.all("first_s")),
        _spread(record.all("warm_s")),
        f"{statistics.median(pairs):.2f}" if pairs else "",
        _figure(record.all("total_s")),
        _figure(record.all("busy_s")),
        _spread(record.all("drag_s")),
        _figure(record.all("restore_s")),
    )


def memcpy_line(records: Iterable[Record]) -> tuple[str, ...]:
    """The bare copies of all trials together."""
    records = list(records)
    out = [seconds for record in records for seconds in record.all("memcpy_s")]
    back = [seconds for record in records for seconds in record.all("memcpy_back_s")]
    return (MEMCPY, "", "", _spread(out), "1.00" if out else "", "", "", "", _figure(back))


def table(lines: list[tuple[str, ...]]) -> str:
    full = [line for line in lines if len(line) == len(HEADS)]
    widths = [max(len(line[column]) for line in [HEADS, *full]) for column in range(len(HEADS))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip()
        for line in [HEADS, *lines]
    )


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})" if values else ""
