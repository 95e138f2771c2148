"""Finds the fenced examples of a page and compares what a command printed with what the page says it prints."""

import re
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(?P<language>\w*)[ \t]*(?P<rest>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    language: str
    title: str | None
    body: str
    line: int


class Command(NamedTuple):
    line: str
    expected: str
    """What the page shows under it; empty: anything."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["rest"])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], title[1] if title else None, match["body"], line))
    return found


def commands(block: Block) -> list[Command]:
    """The `$ ` lines of a console block, each with the lines up to the next one."""
    found: list[Command] = []
    for line in block.body.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:].split("  #")[0].rstrip(), ""))
        elif found:
            found[-1] = Command(found[-1].line, f"{found[-1].expected}{line}\n")
    return found


def is_as_shown(printed: str, expected: str) -> bool:
    """Whether `printed` is `expected`, in which `...` stands for anything."""
    if not expected.strip():
        return True
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
