"""Durations and sizes as text."""

import pytest

from perdure.errors import ConfigError
from perdure.vocab.units import parse_duration, show_bytes, show_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5h", 5400.0), ("1h30m", 5400.0), ("250ms", 0.25), (" 2 d ", 172800.0)]
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "1x", "-3s", "1h-3m"])
def test_duration_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.284, "0.28 s"),
        (41.2, "41 s"),
        (725, "12 min 5 s"),
        (11040, "3 h 4 min"),
        (190800, "2 d 5 h"),
        (-3, "-3.00 s"),
    ],
)
def test_duration_is_shown(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_duration_just_below_a_unit_is_not_shown_as_60() -> None:
    assert show_duration(59.9) == "1 min 0 s"


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB")])
def test_bytes_are_shown(count: float, text: str) -> None:
    assert show_bytes(count) == text
