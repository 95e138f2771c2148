import importlib.util
from pathlib import Path

import pytest

from perdure.cli.timeline import draw_timeline
from perdure.errors import ConfigError
from perdure.goodput import account
from tests.unit.goodput.a_log import START, LogBuilder, a_run

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (pip install 'perdure[demo]')"
)


def a_job() -> LogBuilder:
    log = a_run().after(10.0).exited(2, signal=9, step=60).diagnosed("worker.signal", "rank 2 was killed", 1)
    log.restart().running(0.1, last_step=60).stepped(51, after=0.1).caught_up(61, after=1.5).after(5.0)
    return log.finished().finish().after(0.1).ended()


@needs_matplotlib
def test_timeline_svg_names_job_nodes_and_faults(tmp_path: Path) -> None:
    log, path = a_job(), tmp_path / "run.svg"
    losses = [(START + 3.0 + i / 10, i, 5.0 / (1 + i)) for i in range(100)]
    draw_timeline(account(log.records), log.records, path, losses=losses)
    text = path.read_text()
    for words in ("run-7f3a2c", "node-2", "rank 2 was killed: training again 0.20 s after it began", "generation 2"):
        assert words in text


@needs_matplotlib
@pytest.mark.parametrize("records", [(), tuple(a_run().records)], ids=["nothing", "running"])
def test_timeline_png_of_any_log_is_drawn(tmp_path: Path, records: tuple[object, ...]) -> None:
    draw_timeline(account(records), records, tmp_path / "run.png")  # type: ignore[arg-type]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_timeline_into_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_timeline(account(()), (), tmp_path / "none" / "run.svg")


def test_timeline_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        draw_timeline(account(()), (), tmp_path / "run.pdf")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_timeline_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'perdure\[demo\]'"):
        draw_timeline(account(()), (), tmp_path / "run.svg")
