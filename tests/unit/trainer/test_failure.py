"""How errors are described; the files themselves are tested with real workers."""

import pytest

from perdure import ConfigError
from perdure.trainer import failure
from perdure.trainer.heartbeat import Heartbeat
from perdure.trainer.session import Run, train


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def test_place_is_the_innermost_line_of_the_user() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        __import__("json").loads("[1]", parse_int=lambda text: int(text + "x"))
    described = failure.describe(caught.value, failure.program_traceback(caught.value))
    assert described["type"] == "ValueError"
    file, _, line = described["where"].rpartition(":")
    assert file == __file__
    assert int(line) > 0


def test_error_without_a_text_is_described_all_the_same() -> None:
    described = failure.describe(UnprintableError(), None)
    assert described["message"] == "<no text: its __str__ raised ValueError>"
    assert described["where"] == ""
    assert "UnprintableError" in described["traceback"]


def fails(run: Run) -> None:
    raise KeyError("mine")


def test_frame_that_only_calls_the_user_is_hidden() -> None:
    with pytest.raises(KeyError) as caught:
        train(fails)
    trace = failure.describe(caught.value, failure.program_traceback(caught.value))["traceback"]
    assert "session.py" not in trace
    assert "in fails" in trace


def test_frame_in_which_perdure_itself_raised_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        next(Run(Heartbeat(), {}).steps(start=-1))
    assert "session.py" in failure.describe(caught.value, failure.program_traceback(caught.value))["traceback"]


def test_long_texts_are_cut() -> None:
    described = failure.describe(ValueError("x" * 1_000_000), None)
    assert len(described["message"]) == len(described["traceback"]) == 1 << 16
