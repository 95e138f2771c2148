"""The real threads of users that checkpoints answer to: each is the case of a test that names it."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
THREADS = range(1, 47)
"""As CHECKPOINT.md's reference numbers them."""
NAME = re.compile(r"Thread (\d+) \(([^)]+)\)")
"""`Thread 22 (SimpleTuner 2989): …` in the docstring of a test."""


def named(folder: Path = TESTS) -> dict[int, set[str]]:
    """Thread → names of the tests whose docstrings name it."""
    found: dict[int, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for number, _ in NAME.findall(ast.get_docstring(node) or ""):
                    found.setdefault(int(number), set()).add(node.name)
    return found


def test_every_thread_is_the_case_of_a_test() -> None:
    assert sorted(set(THREADS) - named().keys()) == []


def test_no_test_names_a_thread_that_there_is_not() -> None:
    assert sorted(named().keys() - set(THREADS)) == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ('def test_a():\n    """Thread 7 (x 1): a. Thread 8 (y 2, 3)."""', {7, 8}),
        ('def helper():\n    """Thread 7 (x 1)."""', set()),
        ('def test_a():\n    # Thread 7 (x 1)\n    assert "Thread 8 (y 2)"', set()),
    ],
)
def test_only_docstrings_of_tests_count(tmp_path: Path, text: str, numbers: set[int]) -> None:
    (tmp_path / "test_some.py").write_text(text)
    assert named(tmp_path).keys() == numbers
