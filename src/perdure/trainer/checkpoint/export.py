"""`python -m perdure.trainer.checkpoint.export STORE NAME FILE`: a stored checkpoint as one file for `torch.load`.

A child of `perdure checkpoint export`, which imports no torch. Every byte is checked; no pickle is read.
"""

import os
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from perdure.errors import PerdureError
from perdure.store.medium import reason_of
from perdure.store.reading import read_tail
from perdure.trainer.checkpoint.distcp import Path, StoredReader, paths_of
from perdure.trainer.checkpoint.tail import decode_tail


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
    reader = StoredReader(url, name)
    flat: dict[str, Any] = {
        key: torch.empty(known.size, dtype=known.properties.dtype)
        for key, known in reader.read_metadata().state_dict_metadata.items()
    }
    if flat:
        dcp.load(flat, storage_reader=reader)
    for key, value in decode_tail(read_tail(url, name, reader.manifest.ranks[0])).shared.items():
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
