"""Lines, carriage returns and prefixes, whatever pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.config import OutputConfig
from perdure.agent.console import prefixed, split_shown
from perdure.agent.output import is_shown, last_lines

P = b"[r0]:"


@pytest.mark.parametrize(
    ("held", "data", "shown", "rest"),
    [
        (b"", b"whole\npart", b"whole\n", b"part"),
        (b"part", b"ner\n", b"partner\n", b""),
        (b"", b"\r 10%", b"\r 10%", b""),  # tqdm: shown although its line has not ended
        (b"", b"10%\r", b"10%", b"\r"),  # may become \r\n
        (b"\r", b"\nnext", b"\r\n", b"next"),
        (b"", b"\xff\xfe\n", b"\xff\xfe\n", b""),
    ],
)
def test_split_shown_holds_what_may_be_half_a_line(held: bytes, data: bytes, shown: bytes, rest: bytes) -> None:
    assert split_shown(held, data) == (shown, rest)


def test_split_shown_lets_an_endless_line_go_on() -> None:
    line = b"x" * (1 << 21)
    assert split_shown(line[:100], line[100:]) == (line, b"")


@pytest.mark.parametrize(
    ("data", "continues", "shown"),
    [
        (b"a\nb\n", False, b"[r0]:a\n[r0]:b\n"),
        (b"a\n\nb\n", False, b"[r0]:a\n[r0]:\n[r0]:b\n"),
        (b"tail\nb\n", True, b"tail\n[r0]:b\n"),
        (b"\r 10%\r 20%", False, b"\r[r0]: 10%\r[r0]: 20%"),
        (b"x\n\r 10%", False, b"[r0]:x\n\r[r0]: 10%"),
        (b"a\r\nb\r\n", False, b"[r0]:a\r\n[r0]:b\r\n"),
        (b"\n", True, b"\n"),
        (b"", False, b""),
    ],
)
def test_prefixed_marks_every_line_and_every_rewrite(data: bytes, continues: bool, shown: bytes) -> None:
    assert prefixed(data, P, continues) == shown


def test_prefixed_takes_the_prefix_literally() -> None:
    assert prefixed(b"a\nb\n", rb"\1\n:", False) == rb"\1\n:a" + b"\n" + rb"\1\n:b" + b"\n"


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\r", b"\n", b"\r\n", b"50%"]), max_size=20))
def test_no_byte_is_lost_however_it_is_cut(chunks: list[bytes]) -> None:
    held, shown = b"", []
    for chunk in chunks:
        part, held = split_shown(held, chunk)
        shown.append(part)
    assert b"".join([*shown, held]) == b"".join(chunks)
    assert b"\n" not in held


@given(st.binary(max_size=60))
def test_prefixed_adds_nothing_but_prefixes(data: bytes) -> None:
    mark = b"<\xf0\x9f\x94\xa5>"
    if mark not in data:
        assert prefixed(data, mark, False).replace(mark, b"") == data


@pytest.mark.parametrize(
    ("redirects", "tee", "ranks", "shown"),
    [
        (0, 0, None, True),
        (3, 0, None, False),
        (3, 3, None, True),
        (1, 0, None, False),
        (2, 0, None, True),
        ({0: 3}, 0, None, True),  # rank 1 is not named, so it is not redirected
        (0, 0, (0,), False),
        (0, 3, (1,), True),
    ],
)
def test_is_shown_follows_torchrun(
    redirects: dict[int, int] | int, tee: int, ranks: tuple[int, ...] | None, shown: bool
) -> None:
    config = OutputConfig(log_dir="/dev/null", redirects=redirects, tee=tee, ranks_filter=ranks)
    assert is_shown(config, local_rank=1, bit=1) is shown


def test_last_lines_drops_what_a_progress_bar_overwrote() -> None:
    data = b"old\n" * 30 + b"Traceback:\n\r 10%\r 20%\r 30%\nValueError: \xff\r\n"
    lines = last_lines(data).split("\n")
    assert len(lines) == 20
    assert lines[-3:] == ["Traceback:", " 30%", "ValueError: �"]
