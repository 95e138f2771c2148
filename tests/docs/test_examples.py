"""Every example of the pages is run as it stands: Python blocks, commands, and what they are said to print."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.examples import Block, Command, blocks, commands, is_as_shown

ROOT = Path(__file__).parents[2]
PAGES = [
    p
    for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
    if any(b.language in ("python", "console") for b in blocks(p))
]


def environment(home: Path) -> dict[str, str]:
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PERDURE_HOME": str(home / ".perdure"),
    }


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )


def check_command(command: Command, folder: Path, where: str) -> None:
    if command.line.startswith("pip install "):
        name = re.split(r"[\[\s]", command.line.removeprefix("pip install "))[0]
        assert name == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"], where
        return
    done = run(["bash", "-c", command.line], folder)
    printed = f"{where}: $ {command.line}\n--- printed\n{done.stdout}\n--- on stderr\n{done.stderr}"
    assert done.returncode == 0, printed
    assert is_as_shown(done.stdout, command.expected), f"{printed}\n--- the page says\n{command.expected}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_of_a_page_as_written_do_what_it_says(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        match block:
            case Block(language="python", title=str(title), body=body):
                (tmp_path / title).write_text(body)
            case Block(language="python", body=body):
                done = run([sys.executable, "-c", body], tmp_path)
                assert done.returncode == 0, f"{where}\n{done.stderr}"
            case Block(language="console"):
                for command in commands(block):
                    check_command(command, tmp_path, where)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda p: p.name)
def test_make_commands_of_a_page_are_targets_of_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_output_that_is_not_as_shown_is_noticed() -> None:
    assert is_as_shown("step 3\n4 ranks\ndone\n", "...4 ranks...\n")
    assert is_as_shown("anything", "")
    assert not is_as_shown("exit code 1\n", "exit code 2\n")
    assert not is_as_shown("exit code 12\n", "exit code 1\n")
