"""The states of all random number generators of this process, taken and put back.

Python's, NumPy's (if it is imported), torch's, and CUDA's (if it is in use). Generators that a script made for itself
are its own business: it gives them to `run.checkpoint` as objects with `state_dict`.
"""

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def take() -> dict[str, Any]:
    """Values that a tail can hold."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state["numpy"] = numpy_random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()  # of this process's device
    return state


def put(state: Mapping[str, Any]) -> None:
    """Go on as if nothing had happened in between."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators anew, for a rank that has no state of its own: the world has another size now."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1
    random.seed(derived)
    torch.manual_seed(derived)  # CUDA's too
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(derived & 0xFFFFFFFF)
