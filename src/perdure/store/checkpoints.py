"""Checkpoints in storage: which there are, how one comes to be, and whether it is still what was written.

A committed one is a folder with a manifest that its files agree with. Knows nothing of tensors, and reads no pickle.
"""

import secrets
from collections.abc import Iterable

import msgspec
import xxhash

from perdure.errors import ConfigError, CorruptCheckpointError, HostError, PerdureError
from perdure.store.address import open_medium
from perdure.store.manifest import (
    BAD,
    CHUNK,
    COMMIT,
    FINISHED,
    MANIFEST,
    METADATA,
    UNFINISHED,
    FileRecord,
    Manifest,
    Part,
    check_parts,
    is_plain_name,
    name_of,
    parse_name,
    part_name,
    seal,
)
from perdure.store.medium import Entry, Medium, reason_of
from perdure.store.reading import (
    finished_in,
    manifest_in,
    mark_in,
    part_in,
    read_checked,
    read_chunk,
    read_text,
    where_is,
)
from perdure.store.sink import SCRATCH, Pace
from perdure.vocab.checkpoint import Aside, CheckpointId, Stored
from perdure.vocab.ids import JobId, Rank
from perdure.vocab.units import Bytes, Instant, show_bytes

PROBE = ".probe-"
"""How the name of a file begins that only shows whether the store can be written to."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is a checkpoint, or wants to be one."""

    name: str
    checkpoint: CheckpointId
    job: str = ""
    world_size: int = 0
    nbytes: Bytes = 0
    changed: Instant | None = None
    """Of its newest file."""
    committed: bool = False
    """It has its final name, or its COMMIT. It may be damaged since."""
    problem: str = ""
    """Why it cannot be restored; empty: it can, as far as sizes tell."""
    aside: Aside | None = None
    """It is marked: somebody has restored it and found it to be bad."""

    @property
    def is_good(self) -> bool:
        return not self.problem and self.aside is None

    @property
    def is_copy(self) -> bool:
        """Someone has copied it under a name of their own: restorable, and never ours to delete."""
        return self.name.removesuffix(UNFINISHED) != name_of(self.checkpoint)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a checkpoint that is not as it was written."""

    file: str
    what: str
    where: str = ""
    """Which chunk; empty: the whole file."""

    def __str__(self) -> str:
        return f"{self.file}{f', {self.where}' if self.where else ''}: {self.what}"


# --- which there are -------------------------------------------------------------------------------------------------


def list_stored(url: str) -> tuple[Stored, ...]:
    """The committed ones whose files are all there in their sizes, the newest first. Raises ConfigError, HostError."""
    return tuple(
        Stored(
            checkpoint=found.checkpoint,
            path=found.name,
            world_size=found.world_size,
            nbytes=found.nbytes,
            aside=found.aside,
        )
        for found in survey(url)
        if not found.problem
    )


def survey(url: str) -> tuple[Found, ...]:
    """All that could be one, with what is wrong with it; the newest first, and before its copies."""
    medium = open_medium(url)
    found = [
        one
        for entry in medium.entries()
        if entry.is_folder and not entry.name.startswith(".")
        if (one := _look_at_any(medium, entry.name)) is not None
    ]
    return tuple(sorted(found, key=lambda one: (one.checkpoint, not one.is_copy, one.name), reverse=True))


def _look_at_any(medium: Medium, name: str) -> Found | None:
    """As `_look_at`. What others keep to themselves hides nothing else; any other failure may, and is raised."""
    try:
        return _look_at(medium, name)
    except HostError as problem:
        checkpoint = parse_name(name)
        if not isinstance(problem.__cause__, PermissionError):
            raise
        if checkpoint is None:
            return None
        return Found(name=name, checkpoint=checkpoint, committed=True, problem=str(problem))


def _look_at(medium: Medium, name: str) -> Found | None:
    """None: no checkpoint, and never meant to be one."""
    checkpoint = parse_name(name)
    files = medium.files(name)
    if not files and not name.endswith(UNFINISHED):
        return None
    changed = max((entry.changed for entry in files.values() if entry.changed is not None), default=None)
    nbytes = sum(entry.nbytes for entry in files.values())
    is_final = not name.endswith(UNFINISHED) and (medium.can_rename or COMMIT in files)
    if not is_final or (MANIFEST not in files and checkpoint is not None):
        if checkpoint is None:
            return None
        problem = f"{MANIFEST} is missing" if is_final else "it was never finished, or is being written"
        return Found(
            name=name, checkpoint=checkpoint, nbytes=nbytes, changed=changed, committed=is_final, problem=problem
        )
    if MANIFEST not in files:
        return None
    try:
        manifest = manifest_in(medium, name)
    except CorruptCheckpointError as problem:
        if checkpoint is None:
            return None
        return Found(
            name=name, checkpoint=checkpoint, nbytes=nbytes, changed=changed, committed=True, problem=str(problem)
        )
    wrong = _wrong_sizes(manifest.files, files)
    return Found(
        name=name,
        checkpoint=manifest.checkpoint,
        job=manifest.job,
        world_size=manifest.world_size,
        nbytes=manifest.nbytes,
        changed=changed,
        committed=True,
        problem="; ".join(map(str, wrong[:3])) + ("; …" if len(wrong) > 3 else ""),
        aside=mark_in(medium, name, manifest.checkpoint) if BAD in files else None,
    )


def _wrong_sizes(records: tuple[FileRecord, ...], files: dict[str, Entry]) -> list[Finding]:
    wrong = []
    for record in records:
        entry = files.get(record.name)
        if entry is None:
            wrong.append(Finding(file=record.name, what="is missing"))
        elif entry.nbytes != record.nbytes:
            wrong.append(Finding(file=record.name, what=f"has {entry.nbytes} of {record.nbytes} bytes"))
    return wrong


def free_in(url: str) -> Bytes | None:
    """Bytes that can still be written to the store; None: it does not tell. Raises ConfigError, HostError."""
    return open_medium(url).free()


def probe(url: str, least: Bytes = 0) -> None:
    """List the store, write a small file, remove it, and look for `least` bytes of room: can it be used?

    Raises ConfigError or HostError (`medium.is_lasting` says whether for good); ConfigError where there is no room.
    """
    medium = open_medium(url)
    if medium.can_rename:
        medium.make("")
    medium.entries()
    name = f"{PROBE}{secrets.token_hex(8)}"
    write_whole(medium, name, b"perdure looks whether it may write here\n")
    medium.remove(name)
    free = medium.free()
    if free is not None and free < least:
        raise ConfigError(
            f"the store {url} has {show_bytes(free)} free, and this rank's state alone has {show_bytes(least)}: free"
            " some space on it, or give another store"
        )


# --- how one comes to be ---------------------------------------------------------------------------------------------


def begin(url: str, checkpoint: CheckpointId) -> str:
    """Make room for it; gives the name for its `DrainRequest`s and for `commit`. Twice is harmless.

    Raises ConfigError or HostError where the store cannot be written to.
    """
    medium = open_medium(url)
    name = name_of(checkpoint) + (UNFINISHED if medium.can_rename else "")
    medium.make(f"{name}/parts")
    return name


def commit(url: str, name: str, job: JobId, by_rank: tuple[str, ...], ranks: tuple[int, ...] = ()) -> Stored:
    """Make the uncommitted `name` count, when the drain has finished it (`DrainRequest.finish`). Twice is harmless.

    `by_rank` and `ranks` are those of the requests. Every part and every file's size is read back first; then the
    manifest is written, then the folder gets its name (or its COMMIT). Raises CorruptCheckpointError where something
    is missing: nothing has changed then, and the next try may do.
    """
    checkpoint = parse_name(name)
    if checkpoint is None or not is_plain_name(name):
        raise ConfigError(f"{name[:80]!r} is no name that begin() has given")
    medium = open_medium(url)
    final = name.removesuffix(UNFINISHED)
    done = _look_at(medium, final)
    if done is not None and done.committed:
        return _as_stored(done)
    try:
        return _commit(medium, name, _gather(medium, name, job, checkpoint, by_rank, ranks or range(len(by_rank))))
    except (OSError, PerdureError) as exc:
        done = _look_at(medium, final)
        if done is not None and done.committed:  # another node was faster, and took away what we looked at
            return _as_stored(done)
        if isinstance(exc, PerdureError):
            raise
        raise HostError(f"{name} in {url} cannot become {final}: {reason_of(exc)}") from exc


def _commit(medium: Medium, name: str, manifest: Manifest) -> Stored:
    files = medium.files(name)
    if wrong := _wrong_sizes(manifest.files, files):
        raise CorruptCheckpointError(f"{name} in {medium.address} cannot be committed: {wrong[0]}")
    for left in files:
        if left.endswith(SCRATCH):  # its writer was killed
            medium.remove(f"{name}/{left}")
    final = name.removesuffix(UNFINISHED)
    write_whole(medium, f"{name}/{MANIFEST}", seal(manifest))
    write_whole(medium, f"{name}/{COMMIT}", b"")
    if medium.can_rename:
        medium.settle(f"{name}/parts")
        medium.settle(name)
        medium.move(name, final)
    return Stored(checkpoint=manifest.checkpoint, path=final, world_size=manifest.world_size, nbytes=manifest.nbytes)


def _as_stored(found: Found) -> Stored:
    if found.problem:
        raise CorruptCheckpointError(f"{found.name} was committed before, and cannot be restored: {found.problem}")
    return Stored(checkpoint=found.checkpoint, path=found.name, world_size=found.world_size, nbytes=found.nbytes)


def _gather(
    medium: Medium, name: str, job: JobId, checkpoint: CheckpointId, by_rank: tuple[str, ...], ranks: Iterable[int]
) -> Manifest:
    """The manifest of all that is there, checked against what should be."""
    texts = {Rank(rank): read_text(medium, name, part_name(rank)) for rank in sorted(ranks)}
    parts = [part_in(medium, name, rank) for rank in texts]
    check_parts(parts, checkpoint, by_rank)
    finished = finished_in(medium, name)
    if finished.checkpoint != checkpoint or finished.parts != digest_of(parts):
        raise CorruptCheckpointError(
            f"{FINISHED} of {name} in {medium.address} was made from other parts; finish it anew"
        )
    read_checked(medium, name, finished.metadata)
    files = [record for part in parts for record in part.files]
    files += [record_of(part_name(rank), text) for rank, text in texts.items()]
    files += [finished.metadata, record_of(FINISHED, seal(finished))]
    return Manifest(
        job=job,
        checkpoint=checkpoint,
        world_size=len(by_rank),
        by_rank=by_rank,
        ranks=tuple(texts),
        files=tuple(sorted(files, key=lambda record: record.name)),
    )


def digest_of(parts: list[Part]) -> str:
    """Of what all of them say."""
    whole = xxhash.xxh3_128()
    for part in sorted(parts, key=lambda part: part.rank):
        whole.update(seal(part))
    return whole.hexdigest()


def record_of(name: str, data: bytes) -> FileRecord:
    """Of a file with these bytes."""
    chunks = (xxhash.xxh3_128_hexdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
    return FileRecord(name=name, nbytes=len(data), chunks="".join(chunks))


def write_whole(medium: Medium, path: str, data: bytes, pace: Pace | None = None) -> FileRecord:
    """A file with these bytes, durable when this returns. Raises HostError."""
    sink = medium.create(path, pace or Pace(None))
    try:
        sink.write(data)
        return sink.finish()
    except BaseException:
        sink.discard()
        raise


# --- is it still what was written? -----------------------------------------------------------------------------------


def verify(url: str, name: str, hashes: bool = True) -> tuple[Finding, ...]:
    """What is wrong with the checkpoint in folder `name`; nothing: it is what was written.

    With `hashes` every byte is read. Runs nothing of it, and reads nothing outside of the folder.
    """
    medium = open_medium(url)
    if not is_plain_name(name):
        raise ConfigError(f"{name[:80]!r} is no name of a checkpoint in {url}; see `perdure checkpoint ls {url}`")
    files = medium.files(name)
    if not files:
        return (Finding(file=name, what=f"is not in {url}"),)
    findings = _verify_commit(medium, name, files)
    try:
        manifest = manifest_in(medium, name)
    except CorruptCheckpointError as problem:
        return (*findings, Finding(file=MANIFEST, what=str(problem)))
    wrong = _wrong_sizes(manifest.files, files)
    findings += wrong
    if hashes:
        for record in manifest.files:
            if record.name in files:
                findings += _verify_file(medium, name, record, files[record.name].nbytes)
    if METADATA not in {record.name for record in manifest.files}:
        findings.append(Finding(file=MANIFEST, what=f"names no {METADATA}"))
    return tuple(findings)


def _verify_commit(medium: Medium, name: str, files: dict[str, Entry]) -> list[Finding]:
    if name.endswith(UNFINISHED):
        return [Finding(file=name, what="was never finished, or is being written")]
    if COMMIT not in files:
        return [] if medium.can_rename else [Finding(file=COMMIT, what="is missing: it was never finished")]
    if files[COMMIT].nbytes:
        return [Finding(file=COMMIT, what=f"has {files[COMMIT].nbytes} of 0 bytes")]
    return []


def _verify_file(medium: Medium, name: str, record: FileRecord, there: Bytes) -> list[Finding]:
    wrong = []
    try:
        with medium.open(f"{name}/{record.name}") as file:
            for number in range(record.count):
                if number * CHUNK >= there:
                    break  # its size has been said
                data = read_chunk(file, record, number)
                if xxhash.xxh3_128_hexdigest(data) != record.digest(number):
                    where = where_is(record, number)
                    wrong.append(Finding(file=record.name, what="is not what was written", where=where))
    except FileNotFoundError:
        wrong.append(Finding(file=record.name, what="is missing"))
    except PerdureError as problem:
        wrong.append(Finding(file=record.name, what=str(problem)))
    except OSError as problem:  # a bad sector
        wrong.append(Finding(file=record.name, what=f"cannot be read: {reason_of(problem)}"))
    return wrong
