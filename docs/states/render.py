"""Writes docs/states/generation.md from the table in perdure.vocab.generation.

Run it after a change of the table; tests/docs/test_pages.py fails while the page is not what this prints.
"""

from pathlib import Path

from perdure.vocab import generation

PAGE = Path(__file__).with_name("generation.md")


def meanings(kind: type[generation.Phase] | type[generation.Move]) -> dict[str, str]:
    """The docstring under each member of `kind`, read from the source: Python keeps none at run time."""
    lines = Path(generation.__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    found = {member.value: "" for member in kind}
    current = ""
    for line in (raw.strip() for raw in lines[start + 1 :]):
        if line.startswith(("class ", "TABLE")):
            break
        name = line.split(" = ")[0]
        if name in kind.__members__:
            current = kind[name].value
        elif current and line.startswith('"""'):
            found[current] = line.strip('"')
    return found


def render() -> str:
    """The whole page."""
    first = next(iter(generation.Phase))
    arrows = [f"    {before} --> {after}: {by}" for (before, by), after in generation.TABLE.items()]
    ends = [phase for phase in generation.Phase if not any(before is phase for before, _ in generation.TABLE)]
    return "\n".join(
        [
            "# The states of a generation",
            "",
            "<!-- Made by docs/states/render.py from perdure.vocab.generation.TABLE; do not edit. -->",
            "",
            "A generation is one agreement inside an attempt on who is which rank. Every recovery, spare, shrink or",
            "growth makes a new one. Control, agents and trainers play the same table; a move that is not in it raises",
            "`IllegalMove` and changes nothing.",
            "",
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {first}",
            *arrows,
            *(f"    {phase} --> [*]" for phase in ends),
            "```",
            "",
            "| phase | meaning |",
            "|---|---|",
            *(f"| `{name}` | {text or name.capitalize() + '.'} |" for name, text in meanings(generation.Phase).items()),
            "",
            "| move | meaning |",
            "|---|---|",
            *(f"| `{name}` | {text} |" for name, text in meanings(generation.Move).items()),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
