"""`perdure checkpoint`: what is in storage, whether it is still what was written, and how to get it out or rid of it.

It does not know what a tensor is: a child imports torch where that is needed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from perdure.cli.goodput import draw
from perdure.errors import ConfigError, CorruptCheckpointError, HostError
from perdure.store.address import open_medium
from perdure.store.checkpoints import Found, survey, verify
from perdure.store.manifest import MANIFEST
from perdure.store.marks import by_hand, mark, unmark
from perdure.store.reading import copy_out
from perdure.store.retention import drop
from perdure.vocab.units import Bytes, Instant, show_bytes, show_duration

EXIT_BAD = 1
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")

app = typer.Typer(help="Checkpoints in storage: list, verify, export, drop.", no_args_is_help=True)

Store = Annotated[str, typer.Argument(help="Folder or URL of the store, or of one checkpoint in it.")]
Names = Annotated[list[str] | None, typer.Argument(help="Names as `perdure checkpoint ls` gives them; default: all.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in a listing."""

    name: str
    job: str
    step: int
    generation: int
    attempt: int
    world_size: int
    nbytes: Bytes
    age: float | None
    """Seconds since its newest file was written; None: the store does not tell."""
    complete: bool
    problem: str
    """Why it cannot be restored."""
    aside: str
    """Why it is not restored though it could be: it was found to be bad."""
    verified: str
    """How far it was looked at: `sizes`, or `hashes` with --verify."""


@app.command("ls")
def ls(
    store: Store,
    json: AsJson = False,
    hashes: Annotated[bool, typer.Option("--verify", help="Read every byte and compare its hash.")] = False,
) -> None:
    """List the checkpoints of a store, the newest first, and what is wrong with those that cannot be restored."""
    url, only = _split(store)
    rows = [_row(url, found, hashes, time.time()) for found in survey(url) if only in ("", found.name)]
    print(msgspec.json.encode(rows).decode() if json else render_checkpoints(rows))


def _row(url: str, found: Found, hashes: bool, now: Instant) -> Row:
    problem = found.problem
    if hashes and not problem:
        problem = "; ".join(map(str, verify(url, found.name)))
    return Row(
        name=found.name,
        job=found.job,
        step=found.checkpoint.step,
        generation=found.checkpoint.generation,
        attempt=found.checkpoint.attempt,
        world_size=found.world_size,
        nbytes=found.nbytes,
        age=None if found.changed is None else max(now - found.changed, 0.0),
        complete=not problem,
        problem=problem,
        aside="" if found.aside is None else found.aside.reason,
        verified="hashes" if hashes and not found.problem else "sizes",
    )


def render_checkpoints(rows: Sequence[Row]) -> str:
    """A table. No name and no reason is cut."""
    if not rows:
        return "no checkpoints"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("checkpoint", "job", "step", "generation", "ranks", "size", "age", "verified", "state"):
        right = name in ("step", "generation", "ranks", "size", "age")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        state = _state_of(row)
        age = "–" if row.age is None else show_duration(row.age)
        numbers = (str(row.step), str(row.generation), str(row.world_size or "–"), show_bytes(row.nbytes))
        table.add_row(row.name, row.job or "–", *numbers, age, row.verified, state)
    width = 100 + max(len(row.name) + len(row.job) + len(row.problem) + len(row.aside) for row in rows)
    return draw(table, width=width, colour=False)


def _state_of(row: Row) -> Text:
    if not row.complete:
        return Text(row.problem, style="yellow")
    return Text(f"set aside as bad: {row.aside}", style="yellow") if row.aside else Text("complete", style="green")


@app.command("verify")
def verify_them(
    store: Store,
    names: Names = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="Do not read the files: compare their sizes only.")] = False,
) -> None:
    """Compare every byte with what was written. Exits with 1, and a list of the bad chunks, where one is another."""
    url, only = _split(store)
    chosen = names or [only] * bool(only) or [found.name for found in survey(url) if found.committed]
    if not chosen:
        raise ConfigError(f"there is no committed checkpoint in {url}")
    bad = False
    for name in chosen:
        findings = verify(url, name, hashes=not sizes)
        bad = bad or bool(findings)
        print(f"{name}: {'not what was written' if findings else 'good'}")
        for finding in findings:
            print(f"  {finding}")
    if bad:
        raise typer.Exit(EXIT_BAD)


@app.command("export")
def export(
    store: Store,
    target: Annotated[str, typer.Argument(help="FILE.pt for torch.load, or a new folder for a checked copy.")],
    name: Annotated[str | None, typer.Option(help="Which one; default: the newest that is complete.")] = None,
) -> None:
    """Copy one checkpoint out of a store, checking every byte, as one file for torch.load or as a DCP folder."""
    url, only = _split(store)
    chosen = name or only or next((found.name for found in survey(url) if found.is_good), None)
    if chosen is None:
        raise ConfigError(f"there is no complete checkpoint in {url}; see `perdure checkpoint ls {url}`")
    full = os.path.abspath(target)
    if not full.endswith(_TORCH_FILES):
        copied = copy_out(url, chosen, full)
        print(f"{chosen}: {show_bytes(copied)} copied to {full}, and checked")
        return
    if findings := verify(url, chosen):
        raise CorruptCheckpointError(f"{chosen} is not what was written: {findings[0]}; nothing was exported")
    done = subprocess.run([sys.executable, "-m", "perdure.trainer.checkpoint.export", url, chosen, full])
    if done.returncode == EXIT_BAD:
        raise typer.Exit(EXIT_BAD)  # it has said why
    if done.returncode:
        raise HostError(f"the export of {chosen} ended with {done.returncode}; is torch installed, is there memory?")
    print(f"{chosen}: exported to {full}")


@app.command("drop")
def drop_one(
    store: Store,
    names: Names = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last good one of a job, and what may be being written.")
    ] = False,
) -> None:
    """Delete checkpoints. Never the last good one of a job without --force."""
    url, only = _split(store)
    chosen = names or [only] * bool(only)
    if not chosen:
        raise ConfigError(f"name the checkpoints to drop; `perdure checkpoint ls {url}` lists them")
    for name in chosen:
        if not yes and not _is_agreed(f"Delete {name} in {url}?"):
            raise typer.Exit(EXIT_BAD)
        drop(url, name, force=force)
        print(f"{name}: dropped")


@app.command("mark")
def mark_one(
    store: Store,
    name: Annotated[str, typer.Argument(help="As `perdure checkpoint ls` gives it.")],
    bad: Annotated[str | None, typer.Option(help="Why it is not to be restored.")] = None,
    good: Annotated[bool, typer.Option("--good", help="It may be restored again.")] = False,
) -> None:
    """Set a checkpoint aside as bad, or take that back. A job that runs keeps its own word: mark between two jobs."""
    if (bad is None) != good or bad == "":
        raise ConfigError("give either --bad with the reason, or --good")
    url, _ = _split(store)
    if bad is None:
        unmark(url, name)
    else:
        mark(url, name, by_hand(url, name, bad))
    print(f"{name}: {'may be restored' if bad is None else 'set aside as bad'}")


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to be asked; add --yes")
    return typer.confirm(question)


def _split(store: str) -> tuple[str, str]:
    """(address of the store, name of the one checkpoint that was given or "")."""
    is_url = "://" in store
    url = store.rstrip("/") if is_url else os.path.abspath(os.path.expanduser(store))
    above, _, name = url.rpartition("/")
    files = open_medium(url).entries()
    if any(entry.name == MANIFEST and not entry.is_folder for entry in files):
        return above or "/", name
    if not is_url and not os.path.isdir(url):
        raise ConfigError(f"there is no folder {url}")
    return url, ""
