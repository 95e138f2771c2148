"""Units, as types and as text.

An `Instant` is seconds since the epoch on the clock of the process that wrote it; in the log it is control's.
"""

import re
from typing import Annotated

from msgspec import Meta

from perdure.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0)]
Instant = float
Bytes = Annotated[int, Meta(ge=0)]

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?\s*")
_UNIT_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds in `text`: a number, or numbers with units as in `90`, `1.5h`, `1h30m`, `250ms`.

    Raises ConfigError for anything else.
    """
    position, total = 0, 0.0
    while position < len(text) or position == 0:
        match = _DURATION.match(text, position)
        if match is None or match.end() == position:
            raise ConfigError(f"{text!r} is not a duration; write seconds or units, as in 90, 30s, 10m, 1h30m")
        total += float(match[1]) * _UNIT_SECONDS[match[2]]
        position = match.end()
    return total


def show_duration(seconds: float) -> str:
    """`seconds` for a reader: 0.28 s, 41 s, 12 min 5 s, 3 h 4 min, 2 d 5 h."""
    if seconds < 0:
        return f"-{show_duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def show_bytes(count: float) -> str:
    """`count` bytes for a reader, in binary units: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
