"""What the parser finds in programs' texts."""

import sys
from pathlib import Path

import pytest

from perdure.trainer.preload import Import, bring_in, is_library, libraries, top_imports
from perdure.trainer.process import judge_threads


def test_imports_at_the_top_are_found_also_inside_if_try_and_with() -> None:
    text = """
import a, b.c as d
from e.f import g, h
if x:
    import i
elif y:
    import j
else:
    import k
try:
    import l
except ImportError:
    import m
else:
    import n
finally:
    import o
with s:
    import p
def f():
    import hidden
class C:
    import hidden2
for _ in ():
    import hidden3
"""
    found = list(top_imports(text))
    assert [i.module for i in found] == ["a", "b.c", "e.f", *"ijklmnop"]
    assert found[2] == Import("e.f", ("g", "h"))


def test_imports_for_type_checkers_are_left_out() -> None:
    text = (
        "from __future__ import annotations\nif TYPE_CHECKING:\n    import a\nif typing.TYPE_CHECKING:\n    import b\n"
    )
    assert list(top_imports(text + "else:\n    import c\n")) == [Import("c", ())]


def test_relative_imports_are_resolved_against_the_package() -> None:
    text = "from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e import f\nfrom .... import g\n"
    assert [i.module for i in top_imports(text, "p.q")] == ["p.q", "p.q.b", "p", "p.e"]


def test_libraries_are_what_is_installed_or_standard() -> None:
    assert is_library("msgspec.json")
    assert is_library("json")
    assert is_library("sys")
    assert not is_library("nowhere_to_be_found")


def test_own_modules_are_followed_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "main.py").write_text("import own.deep.model\nimport json\n")
    (tmp_path / "own" / "__init__.py").write_text("import csv\nraise SystemExit('never run')\n")
    (tmp_path / "own" / "deep" / "model.py").write_text("from ..more import X\nimport msgspec\n")
    (tmp_path / "own" / "more.py").write_text("import own.deep.model\nimport bisect\n")
    found = [i.module for i in libraries("script", str(tmp_path / "main.py"))]
    assert sorted(found) == ["bisect", "csv", "json", "msgspec"]
    assert not any(name.partition(".")[0] == "own" for name in sys.modules)


def test_library_s_name_in_the_script_s_folder_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "csv.py").write_text("import bisect\n")
    (tmp_path / "main.py").write_text("import csv\n")
    assert libraries("script", str(tmp_path / "main.py")) == [Import("bisect", ())]


def test_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "project" / "__main__.py").write_text("from .train import main\nimport csv\n")
    (tmp_path / "project" / "train.py").write_text("import bisect\n")
    assert {i.module for i in libraries("module", "project")} == {"csv", "bisect"}
    assert [i.module for i in libraries("module", "project.train")] == ["bisect"]


@pytest.mark.parametrize("text", ["x = = 1", "\0", "# coding: no-such"])
def test_program_that_does_not_parse_gives_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "main.py").write_text(text)
    assert libraries("script", str(tmp_path / "main.py")) == []
    assert libraries("script", str(tmp_path / "missing.py")) == []


def test_failing_import_is_a_note_unless_it_may_be_absent() -> None:
    wanted = [Import("json", ("loads",)), Import("nowhere_to_be_found", ())]
    assert bring_in(wanted, optional=True) == (["json"], [])
    done, notes = bring_in(wanted, optional=False)
    assert done == ["json"]
    assert len(notes) == 1
    assert notes[0].startswith(
        "importing nowhere_to_be_found failed in the fork server: ModuleNotFoundError: No module"
    )


@pytest.mark.parametrize(
    ("python", "tasks", "openblas", "cpus", "unsafe"),
    [
        ((), 1, 0, 8, ""),
        ((), 8, 1, 8, ""),
        ((), 15, 2, 8, ""),
        ((), 9, 1, 8, "native threads"),
        ((), 2, 0, 8, "native threads"),
        (("Thread-1",), 2, 0, 8, "Python threads (Thread-1)"),
    ],
)
def test_only_openblas_may_have_threads(
    python: tuple[str, ...], tasks: int, openblas: int, cpus: int, unsafe: str
) -> None:
    judged = judge_threads(python, tasks, openblas, cpus)
    assert unsafe in judged
    assert bool(judged) == bool(unsafe)
