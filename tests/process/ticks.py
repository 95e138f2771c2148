"""Reads what scripts/tick.py writes: who did which step, and when."""

from pathlib import Path

import msgspec


class Tick(msgspec.Struct, frozen=True):
    """A line of scripts/tick.py."""

    node: str
    generation: int
    rank: int
    pid: int
    restarts: int
    master: str
    step: int
    at: float
    """CLOCK_MONOTONIC, which all these machines share."""


def ticks(out: Path) -> list[Tick]:
    """What scripts/tick.py has written, in the order of time."""
    lines = [line for file in out.glob("*.jsonl") for line in file.read_bytes().splitlines(keepends=True)]
    return sorted((msgspec.json.decode(line, type=Tick) for line in lines if line.endswith(b"\n")), key=lambda t: t.at)
