"""Which checkpoints in storage may go: older ones after a commit, and what a dead run has left half written.

Never the newest that can be restored, never another job's, never a copy that someone made, never one in flight.
"""

import time
from collections.abc import Collection

from perdure.errors import ConfigError
from perdure.store.address import open_medium
from perdure.store.checkpoints import Found, survey
from perdure.store.manifest import TRASH, UNFINISHED, is_plain_name, parse_name
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.ids import JobId
from perdure.vocab.units import Instant, Seconds

GRACE: Seconds = 3600.0
"""Nothing has been written to an abandoned folder for so long; a slow drain writes every second."""
AT_ONCE = 3
"""Checkpoints that go after one commit: should `keep` have been lowered by mistake, there is time to see it."""


def retain(url: str, keep: int, job: JobId, spare: Collection[CheckpointId] = ()) -> tuple[str, ...]:
    """Delete what has `keep` (at least one) newer good checkpoints of `job` beside it; gives the names of the deleted.

    One that is marked as bad does not count, and goes like the others. Call it after a commit only. `spare`: in
    flight, being restored, or the newest that was verified. What cannot be restored does not count, and stays. At most
    AT_ONCE go, the oldest ones. Another one may delete at the same time. Raises ConfigError, HostError.
    """
    mine = [found for found in survey(url) if not found.problem and found.job == job and not found.is_copy]
    newer = [sum(one.is_good for one in mine[:number]) for number in range(len(mine))]
    gone = [
        found.name
        for found, good in zip(mine, newer, strict=True)
        if good >= max(keep, 1) and found.checkpoint not in spare
    ]
    gone = gone[-AT_ONCE:]
    medium = open_medium(url)
    for name in gone:
        medium.remove(name)
    return tuple(gone)


def clean(
    url: str, spare: Collection[CheckpointId] = (), grace: Seconds = GRACE, now: Instant | None = None
) -> tuple[str, ...]:
    """Delete what was never finished and has not changed for `grace`, and trash; gives the names of the deleted.

    `spare`: what is being written now, however slowly. Raises ConfigError, HostError.
    """
    medium = open_medium(url)
    at = time.time() if now is None else now
    gone = [
        entry.name
        for entry in medium.entries()
        if entry.is_folder and entry.name.startswith(TRASH) and parse_name(entry.name[len(TRASH) :].rpartition(".")[0])
    ]
    for found in survey(url):
        is_left = not found.committed and not found.is_copy and found.checkpoint not in spare
        if is_left and _last_change(found, url) <= at - grace:
            gone.append(found.name)
    for name in gone:
        medium.remove(name)
    return tuple(gone)


def _last_change(found: Found, url: str) -> Instant:
    """For ever young, where the store does not tell."""
    if found.changed is not None:
        return found.changed
    folder = next((entry for entry in open_medium(url).entries() if entry.name == found.name), None)
    return float("inf") if folder is None or folder.changed is None else folder.changed


def drop(url: str, name: str, *, force: bool = False) -> None:
    """Delete one checkpoint. Raises ConfigError: there is none of that name, or it is the last good one of its job."""
    found = {one.name: one for one in survey(url)}
    if not is_plain_name(name) or name not in found:
        raise ConfigError(f"there is no checkpoint {name[:80]!r} in {url}; see `perdure checkpoint ls {url}`")
    good = [one.name for one in found.values() if one.is_good and one.job == found[name].job]
    if good == [name] and not force:
        raise ConfigError(
            f"{name} is the last good checkpoint of job {found[name].job} in {url}; add --force to drop it"
        )
    if name.endswith(UNFINISHED) and not force:
        raise ConfigError(f"{name} may be being written; add --force to drop it")
    open_medium(url).remove(name)
