"""Which torch is installed, for tests that compare with what belongs to one release of it."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def torch_release() -> tuple[int, int]:
    """(major, minor); (0, 0) without torch."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


like_torchrun = pytest.mark.skipif(
    torch_release() < (2, 13),
    reason=f"the torchrun beside it is of torch {'.'.join(map(str, torch_release()))}; ours is like 2.13's",
)
"""Our flags and environment are those of torchrun in torch 2.13; older ones lack some."""
