"""Slots from memory to memory: replicas to a partner, parts of slots to whoever restores. Plain TCP, chunk by chunk.

What arrives is believed by its hashes alone (`wire.transfer` has what is said). Bytes are moved by threads; the event
loop only accepts and reads requests. Who the partners are, and what a checkpoint is worth, it does not know.
"""

import hmac
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from perdure.agent.memory.asking import NotNowError, ask, heard, last_words
from perdure.agent.memory.parity import give_parity
from perdure.agent.memory.pieces import (
    missing_chunks,
    opened,
    receive_chunks,
    receive_digests,
    sealed_header,
    send_chunks,
    send_digests,
    write,
)
from perdure.agent.memory.shelf import Shelf
from perdure.errors import AccessDeniedError, CorruptCheckpointError, HostError, PerdureError, WireError
from perdure.vocab.checkpoint import CheckpointId
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId, NodeId, Rank
from perdure.vocab.units import Seconds
from perdure.wire import slotfile
from perdure.wire.bulk import Line, Pace, Result, accept, decode, in_thread
from perdure.wire.slots import SlotHeader
from perdure.wire.tcp import Listener, why
from perdure.wire.transfer import (
    LINE_LIMIT,
    Answer,
    Get,
    GetParity,
    Put,
    borrowed_name,
    chunks_in,
    flaw,
    head_chunks,
    ranges_of,
    shown,
)

__all__ = ["Lookup", "Pace", "fetch", "offer", "serve"]

PATIENCE: Seconds = 10.0
"""For a connection, a line or a chunk of 4 MiB; as long as `wire.tcp` gives a network that is cut."""
ALLOCATES = 256 << 20
"""Bytes per second at which a replica's file surely gets its memory (measured: 1.4 GB/s); its sender waits for it."""
AT_ONCE = 64
"""Transfers that a node serves; others wait."""

_BEGINNING = threading.Lock()  # of borrowed files: two fetches at once share one

Lookup = Callable[[CheckpointId, Rank], "str | os.PathLike[str] | None"]
"""Path of the sealed slot with that rank's part of that checkpoint, the node's own or a replica."""


# --- asking ----------------------------------------------------------------------------------------------------------


async def offer(
    address: Address,
    token: str,
    node: NodeId,
    path: str | os.PathLike[str],
    header: SlotHeader,
    *,
    pace: Pace | None = None,
    patience: Seconds = PATIENCE,
) -> None:
    """Send the sealed slot of this `node` at `path` to the memory server at `address`.

    Returns when that has verified every byte and sealed the replica. Raises WireError where it has none afterwards,
    within `patience` of the last sign of life (a peer that still has to find memory is given longer).
    """
    line = Line(patience)
    await in_thread(line, partial(_offer, line, address, Put(token=token, node=node, header=header), path, pace))


async def fetch(
    addresses: Sequence[Address],
    token: str,
    checkpoint: CheckpointId,
    rank: Rank,
    chunks: Iterable[int],
    folder: str | os.PathLike[str],
    *,
    patience: Seconds = PATIENCE,
) -> Path:
    """A sparse slot file in `folder` that has the header, the hashes, the tail, the layout and these `chunks`.

    All of it is verified; what one of `addresses` cannot give, or gives damaged, is asked of the next. What is there
    from an earlier call is not asked for again. Raises WireError with what each said, naming node, file and chunk,
    and HostError where the folder cannot take it; what was good is kept.
    """
    get = Get(token=token, checkpoint=checkpoint, rank=rank)
    path, wanted = Path(folder) / borrowed_name(checkpoint, rank), frozenset(chunks)
    said: list[str] = []
    for address in addresses:
        line = Line(patience)
        try:
            await in_thread(line, partial(_bring, line, address, get, wanted, path))
            return path
        except WireError as exc:
            said.append(f"{address}: {exc}")
    raise WireError(f"nobody can give the slot of rank {rank} of {checkpoint}: {'; '.join(said) or 'nobody has it'}")


def _offer(line: Line, address: Address, put: Put, path: str | os.PathLike[str], pace: Pace | None) -> None:
    try:
        with opened(path) as fd:
            header = sealed_header(fd, put.header.checkpoint, put.header.rank)
            if header.root != put.header.root:
                raise CorruptCheckpointError("it is not what is offered any more")
            if not ask(line, address, put, line.patience + header.file_bytes / ALLOCATES).held:
                _send(line, fd, header, pace)
    except (HostError, CorruptCheckpointError) as exc:
        raise NotNowError(f"{os.fspath(path)} cannot be sent: {exc}") from exc


def _send(line: Line, fd: int, header: SlotHeader, pace: Pace | None) -> None:
    """Everything, and once more what has arrived damaged. Returns when the other side has sealed it."""
    try:
        send_digests(line, fd, header)
        send_chunks(line, fd, header, range(header.chunks), pace)
    except WireError as exc:
        raise last_words(line) or exc from exc
    answer = heard(line)
    if answer.again:
        numbers = chunks_in(((number, 1) for number in answer.again), header.chunks)
        if numbers is None:
            raise WireError("chunks were asked for again that there are not")
        send_chunks(line, fd, header, numbers, pace)
        answer = heard(line)
    if not answer.sealed:
        raise WireError("the other side has not sealed the replica")


def _bring(line: Line, address: Address, get: Get, wanted: frozenset[int], path: Path) -> None:
    """Add to the file at `path` what is still missing there."""
    if not is_begun(path, get):
        _bring_head(line, address, get, path)
    with opened(path, writable=True) as fd:
        header = slotfile.read_header(fd)
        digests = slotfile.read_digests(fd, header)
        if wanted and not 0 <= min(wanted) <= max(wanted) < header.chunks:
            raise WireError(f"the slot of rank {get.rank} has {header.chunks} chunks, and not all that were asked for")
        missing = missing_chunks(fd, header, digests, wanted.union(head_chunks(header)))
        if not missing:
            return
        answer = ask(line, address, msgspec.structs.replace(get, ranges=ranges_of(missing)))
        source = f"{shown(answer.file)} on {shown(answer.node)}"
        if answer.header is None or answer.header.root != header.root:
            raise WireError(f"{source} is not the slot that the hashes here are of")
        bad = receive_chunks(line, fd, header, digests, missing)
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise WireError(f"chunk {bad[0]}{more} of {source} is not what was written")


def is_begun(path: Path, get: Get) -> bool:
    try:
        with opened(path) as fd:
            sealed_header(fd, get.checkpoint, get.rank)
            return True
    except (HostError, CorruptCheckpointError):
        return False


def _bring_head(line: Line, address: Address, get: Get, path: Path) -> None:
    """Begin the file at `path` with what `address` says of the slot."""
    answer = ask(line, address, msgspec.structs.replace(get, head=True))
    header, source = answer.header, f"{shown(answer.file)} on {shown(answer.node)}"
    if header is None or (header.checkpoint, header.rank) != (get.checkpoint, get.rank) or flaw(header):
        raise WireError(f"{source} is not such a slot")
    begin_borrowed(path, get, header, receive_digests(line, header, source))


def begin_borrowed(path: Path, get: Get, header: SlotHeader, digests: bytes) -> None:
    """A file at `path` with its header and hashes and nothing else. It appears whole, and stays once it is there.

    Raises HostError.
    """
    new = path.with_name(f"{path.name}.{threading.get_native_id()}.new")
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, header.file_bytes)
            write(fd, digests, header.hashes_start)
            slotfile.write_header(fd, msgspec.structs.replace(header, sequence=0))
            with _BEGINNING:
                if not is_begun(path, get):
                    os.rename(new, path)
        finally:
            os.close(fd)
            new.unlink(missing_ok=True)
    except OSError as exc:
        raise HostError(f"{path} cannot be made: {why(exc)}") from exc


# --- giving and taking -----------------------------------------------------------------------------------------------


async def serve(
    listener: Listener,
    token: str,
    lookup: Lookup,
    *,
    job: JobId,
    node: NodeId,
    folder: str | os.PathLike[str],
    spent: Callable[[CheckpointId], bool] | None = None,
    parity: Callable[[CheckpointId], str | None] = lambda checkpoint: None,
    on_sealed: Callable[[NodeId, Path, SlotHeader], None] | None = None,
    patience: Seconds = PATIENCE,
) -> None:
    """Give slots of this `node` to whoever shows `token`, and keep others' replicas in `folder`, until cancelled.

    `spent` says of a replica's checkpoint that it may be overwritten: a newer one is committed, or it never will be.
    It is called in a thread. Without it the older of the two is overwritten. `lookup`, `parity` (path of a whole one)
    and `on_sealed` (a replica is whole) are called in the event loop.
    """
    shelf = Shelf(Path(folder), job, spent)
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def serve_one(connected: socket.socket) -> None:
        line = Line(patience, connected)
        try:
            request = await _request(line, token)
            if isinstance(request, Get):
                path = lookup(request.checkpoint, request.rank)
                await in_thread(line, partial(_told, line, partial(_give, line, request, node, path)), limiter)
            elif isinstance(request, GetParity):
                found = parity(request.checkpoint)
                giving = partial(give_parity, line, request, node, found)
                await in_thread(line, partial(_told, line, giving), limiter)
            else:
                sealed = await in_thread(line, partial(_told, line, partial(shelf.take, line, request)), limiter)
                if sealed is not None and on_sealed is not None:
                    on_sealed(request.node, *sealed)
        except (WireError, TimeoutError):
            return  # its other end knows
        finally:
            line.close()

    await accept(listener, serve_one)


async def _request(line: Line, token: str) -> Get | GetParity | Put:
    """Raises WireError, after one line of answer, where it is none, or its token is another one."""
    kind: Any = Get | GetParity | Put
    try:
        request: Get | GetParity | Put = decode(await line.overhear(LINE_LIMIT), kind)
    except WireError as exc:
        line.say(Answer(error=str(exc)))
        raise
    if not hmac.compare_digest(request.token.encode(), token.encode()):
        line.say(Answer(error="the token is not this job's", denied=True))
        raise AccessDeniedError("a peer showed another token")
    return request


def _told(line: Line, work: Callable[[], Result]) -> Result | None:
    """`work()`; what it fails of is told to the other side."""
    try:
        return work()
    except (PerdureError, OSError) as exc:
        line.say(Answer(error=why(exc) if isinstance(exc, OSError) else str(exc)))
        return None


def _give(line: Line, get: Get, node: NodeId, path: str | os.PathLike[str] | None) -> None:
    if path is None:
        raise WireError(f"{node} has no sealed slot of rank {get.rank} of {get.checkpoint}")
    with opened(path) as fd:
        header = sealed_header(fd, get.checkpoint, get.rank)
        numbers = chunks_in(get.ranges, header.chunks)
        if numbers is None:
            raise WireError(f"a slot of {header.chunks} chunks has not all that were asked for")
        line.say(Answer(node=node, file=os.fspath(path), header=header))
        try:
            if get.head:
                send_digests(line, fd, header)
            send_chunks(line, fd, header, numbers, None)
        except WireError:
            return  # no line can be put between the bytes; the connection ends too early, and that says it
