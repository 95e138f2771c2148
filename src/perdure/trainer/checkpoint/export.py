"""`python -m perdure.trainer.checkpoint.export STORE NAME FILE`: a stored checkpoint as one file for `torch.load`.

A child of `perdure checkpoint export`, which imports no torch. Every byte is checked; no pickle is read.
"""

import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from perdure.errors import PerdureError
from perdure.store.medium import reason_of
from perdure.store.reading import open_committed, read_parts
from perdure.trainer.checkpoint.catalogue import dtype_of
from perdure.trainer.checkpoint.distcp import Path, paths_of, tied_of
from perdure.trainer.checkpoint.reader import load
from perdure.vocab.checkpoint import Chosen, Stored
from perdure.wire.memory import RestorePlan

ANOTHER_WORLD = 0
"""We are no rank of the world that wrote it, and want all of it."""


def main(argv: list[str]) -> int:
    url, name, target = argv
    try:
        export(url, name, target)
    except PerdureError as problem:
        print(f"perdure: {problem}", file=sys.stderr)  # noqa: T201  this is a program of the command line
        return 1
    except Exception as problem:
        text = f"{name} in {url} cannot be exported to {target}: {type(problem).__name__}: {reason_of(problem)}"
        print(f"perdure: {text}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def export(url: str, name: str, target: str) -> None:
    """{"model": …, "optimizer": …} as `torch.load(target)` gives it. Raises PerdureError, OSError."""
    whole = load_whole(url, name)
    scratch = f"{target}.{os.getpid()}.new"
    try:
        with open(scratch, "xb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise


def load_whole(url: str, name: str) -> dict[str, Any]:
    """Everything that all ranks share, in this process's memory."""
    _, manifest = open_committed(url, name)
    checkpoint, world = manifest.checkpoint, manifest.world_size
    stored = Stored(checkpoint=checkpoint, path=name, world_size=world, nbytes=manifest.nbytes)
    chosen = Chosen(checkpoint=checkpoint, world_size=world, stored=stored)
    flat: dict[str, Any] = {}

    def make(wholes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
        flat.update({key: torch.empty(shape, dtype=dtype_of(dtype)) for key, (shape, dtype) in wholes.items()})
        return dict(flat)

    found = load(RestorePlan(id=0, chosen=chosen), None, make, rank=0, world_size=ANOTHER_WORLD, store=url)
    tied = tied_of(read_parts(url, name))
    flat.update({key: flat[first] for key, first in tied.items() if key not in flat and first in flat})
    for key, value in found.shared.items():
        flat.setdefault(key, value)
    paths = paths_of(flat)
    whole: dict[str, Any] = {}
    for key in sorted(flat, key=lambda key: [(isinstance(step, str), step) for step in paths[key]]):
        _put(whole, paths[key], flat[key])
    return whole


def _put(into: Any, path: Path, value: object) -> None:
    """Numbers in a path are places in a list, which come in their order."""
    for step, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            if step == len(into):
                into.append(empty)
            into = into[step]
        else:
            into = into.setdefault(step, empty)
    into[path[-1]] = value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
