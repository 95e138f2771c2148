"""The pages are true: links lead somewhere, the map names the rooms that exist, generated pages are current."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "news").glob("*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_decision_record_is_short_and_has_its_three_parts(record: Path) -> None:
    lines = record.read_text().splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
    assert lines[0].startswith(f"# {record.name[:4]} ")


def test_architecture_tree_names_exactly_the_rooms_that_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    tree = page[page.index("\nsrc/perdure/\n") : page.index("\ntests/   unit/")]
    rooms = re.findall(r"^  (\w+)/ +(\(planned\))?", tree, re.MULTILINE)
    built = {path.parent.name for path in (ROOT / "src" / "perdure").glob("*/*.py")}
    assert {room for room, planned in rooms if not planned} == built


def test_generation_page_as_rendered_from_the_table_is_current() -> None:
    render = ROOT / "docs" / "states" / "render.py"
    code = f"import runpy; print(runpy.run_path({str(render)!r})['render'](), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert (render.parent / "generation.md").read_text() == done.stdout, "run docs/states/render.py"


def test_news_fragments_build_into_a_changelog() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    fragments = {path.name for path in (ROOT / "news").glob("*.*.md")}
    assert all(f"#{fragment.split('.')[0]}" in done.stdout for fragment in fragments)
