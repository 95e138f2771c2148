"""A stored checkpoint that was restored and found to be bad gets a mark in its folder; an operator may take it away.

The mark outlives the job and all memory. Knows nothing of tensors; the checkpoint itself is not touched.
"""

import msgspec

from perdure.errors import ConfigError
from perdure.store.address import open_medium
from perdure.store.checkpoints import Found, survey, write_whole
from perdure.store.manifest import BAD
from perdure.vocab.checkpoint import Aside


def mark(url: str, name: str, aside: Aside) -> None:
    """Twice is harmless: the first reason stays. Raises ConfigError where there is no such checkpoint, HostError."""
    if _named(url, name).aside is None:
        write_whole(open_medium(url), f"{name}/{BAD}", msgspec.json.encode(aside))


def unmark(url: str, name: str) -> None:
    """It may be restored again; harmless where it had no mark. Raises ConfigError, HostError."""
    if _named(url, name).aside is not None:
        open_medium(url).remove(f"{name}/{BAD}")


def by_hand(url: str, name: str, reason: str) -> Aside:
    """An operator's word on this one alone: what was saved after it is not in doubt. Raises ConfigError."""
    return Aside(checkpoint=_named(url, name).checkpoint, line=(-1, -1, -1), reason=reason)


def _named(url: str, name: str) -> Found:
    found = next((one for one in survey(url) if one.name == name and one.committed), None)
    if found is None:
        raise ConfigError(f"there is no checkpoint {name[:80]!r} in {url}; see `perdure checkpoint ls {url}`")
    return found
