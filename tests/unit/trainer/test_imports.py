"""What importing costs: measured in processes of their own, the best of some, because machines are busy."""

import subprocess
import sys
from pathlib import Path

import pytest

import perdure

MEASURE = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, *(set(sys.modules) - before))
"""


def cost(module: str) -> tuple[float, set[str]]:
    """Seconds beyond Python itself, and the modules that came in."""
    runs = []
    for _ in range(4):
        argv = [sys.executable, "-c", MEASURE.format(module=module)]
        environment = {"PYTHONPATH": str(Path(perdure.__file__).parents[1])}
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
        seconds, *modules = done.stdout.split()
        runs.append((float(seconds), set(modules)))
    return min(runs, key=lambda run: run[0])


@pytest.mark.parametrize(
    ("module", "most", "without"),
    [
        ("perdure", 0.1, {"torch", "msgspec", "typing", "perdure.trainer.session"}),
        ("perdure.trainer", 0.1, {"torch", "msgspec", "typing"}),
        ("perdure.trainer.session", 0.1, {"torch", "msgspec"}),
        ("perdure.trainer.worker", 0.1, {"torch", "msgspec", "typing", "asyncio", "subprocess"}),
    ],
)
def test_import_is_light(module: str, most: float, without: set[str]) -> None:
    seconds, modules = cost(module)
    assert not modules & without
    assert seconds < most


def test_public_names_are_all_there() -> None:
    assert {name for name in perdure.__all__ if getattr(perdure, name) is not None} == set(perdure.__all__)
    assert perdure.current_run() is perdure.current_run()
    assert perdure.train(lambda run: run) is perdure.current_run()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        perdure.nothing  # noqa: B018
