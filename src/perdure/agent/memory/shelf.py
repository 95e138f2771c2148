"""Other nodes' replicas in this node's memory: two files per rank, the older one whole until the newer one is.

It believes nothing that a peer says of sizes, names or bytes before it has checked it.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perdure.agent.memory.pieces import opened, receive_chunks, receive_digests, write
from perdure.agent.memory.room import room_in
from perdure.errors import CorruptCheckpointError, HostError, WireError
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.vocab.ids import JobId, NodeId, Rank
from perdure.vocab.units import Bytes, show_bytes
from perdure.wire import slotfile
from perdure.wire.bulk import Line
from perdure.wire.slots import SlotHeader
from perdure.wire.tcp import why
from perdure.wire.transfer import REPLICAS_PER_RANK, Answer, Put, flaw, replica_name


class Shelf:
    """Other nodes' replicas."""

    def __init__(self, folder: Path, job: JobId, spent: Callable[[CheckpointId], bool] | None) -> None:
        self._folder, self._job, self._spent = folder, job, spent
        self._busy: set[tuple[NodeId, Rank]] = set()
        self._lock = threading.Lock()
        self._allocating = threading.Lock()
        """One at a time, so that each sees what the ones before have left."""

    def take(self, line: Line, put: Put) -> tuple[Path, SlotHeader] | None:
        """The file of a replica and its header, once it is sealed; None where it was here already.

        Raises WireError, HostError.
        """
        problem, whose = flaw(put.header), (put.node, put.header.rank)
        if not problem and put.header.job != self._job:
            problem = f"it is of job {put.header.job}, not {self._job}"
        if problem:
            raise WireError(f"no replica is taken of this slot: {problem}")
        with self._lock:
            if whose in self._busy:
                raise WireError(f"another replica of rank {put.header.rank} of {put.node} is on its way")
            self._busy.add(whose)
        try:
            taken = self._take(line, put)
        finally:
            with self._lock:
                self._busy.discard(whose)
        try:  # now, not earlier: whoever hears it may offer the next one at once
            line.say(Answer(held=True) if taken is None else Answer(sealed=True))
        except WireError:
            return taken  # its sender will hear it when it offers this again
        return taken

    def _take(self, line: Line, put: Put) -> tuple[Path, SlotHeader] | None:
        found = [self._present(path) for path in self._paths(put)]
        if any(one is not None and _is_same(one, put.header) for one in found):
            return None
        k = _which(found, put, self._spent)
        path = self._paths(put)[k]
        with self._allocating:
            fd = allocated(path, put.header.file_bytes, "a replica")
        try:
            return path, _fill(line, fd, put, found[k])
        finally:
            os.close(fd)

    def _paths(self, put: Put) -> list[Path]:
        try:
            return [self._folder / replica_name(put.node, put.header.rank, k) for k in range(REPLICAS_PER_RANK)]
        except ValueError as exc:
            raise WireError(str(exc)) from exc

    def _present(self, path: Path) -> SlotHeader | None:
        """What the file has, in whatever state; None where it has nothing that can be read."""
        try:
            with opened(path) as fd:
                return slotfile.read_header(fd)
        except (HostError, CorruptCheckpointError):
            return None


def allocated(path: Path, nbytes: Bytes, what: str) -> int:
    """A descriptor of a file of that size which has all its memory. Raises WireError where there is no room."""
    try:
        if os.path.lexists(path):
            if path.lstat().st_size == nbytes:
                return slotfile.open_slot(os.fspath(path), writable=True)
            path.unlink()
        left = room_in(os.fspath(path.parent)).least
        if nbytes > left:
            raise WireError(f"no room for {what}: it needs {show_bytes(nbytes)}, and {show_bytes(left)} are left")
        return slotfile.create(os.fspath(path), nbytes)
    except OSError as exc:
        raise WireError(f"cannot keep {what} of {show_bytes(nbytes)}: {why(exc)}") from exc


def _fill(line: Line, fd: int, put: Put, before: SlotHeader | None) -> SlotHeader:
    """Receive a replica into its file; WRITING is stored before the first byte, SEALED after the last."""
    coming = put.header
    header = slotfile.write_header(
        fd,
        msgspec.structs.replace(
            coming, sequence=0 if before is None else before.sequence, state=SlotState.WRITING, root=""
        ),
    )
    line.say(Answer())
    digests = receive_digests(line, coming, f"the slot of rank {coming.rank} of {put.node}")
    write(fd, digests, coming.hashes_start)
    bad = receive_chunks(line, fd, coming, digests, range(coming.chunks))
    if bad:
        line.say(Answer(again=bad))
        bad = receive_chunks(line, fd, coming, digests, bad)
    if bad:
        raise WireError(f"chunk {bad[0]} of the slot of rank {coming.rank} of {put.node} is not what was written")
    return slotfile.write_header(fd, msgspec.structs.replace(header, state=SlotState.SEALED, root=coming.root))


def _is_same(present: SlotHeader, coming: SlotHeader) -> bool:
    return present.state is SlotState.SEALED and (present.checkpoint, present.root) == (coming.checkpoint, coming.root)


def _which(found: Sequence[SlotHeader | None], put: Put, spent: Callable[[CheckpointId], bool] | None) -> int:
    """The file to overwrite: one with nothing whole in it, else the older one of those that may be lost."""
    held: list[tuple[CheckpointId, int]] = []
    for k, header in enumerate(found):
        if header is None or header.state is not SlotState.SEALED or header.checkpoint is None:
            return k
        held.append((header.checkpoint, k))
    lost = [one for one in held if spent is None or spent(one[0])]
    if not lost:
        raise WireError(f"both replicas of rank {put.header.rank} of {put.node} are still needed")
    oldest, k = min(lost)
    if put.header.checkpoint is None or put.header.checkpoint < oldest:
        raise WireError(f"newer replicas of rank {put.header.rank} of {put.node} are here")
    return k
