"""Where the bytes of one checkpoint can be read: slots of this node, borrowed slots, storage. All of it is verified.

Knows files, maps and their hashes; does not know what a model is or which bytes it wants (`reader`). What storage
keeps is in `stored`.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from perdure.errors import CorruptCheckpointError, HostError, WireError
from perdure.trainer.checkpoint.catalogue import check_layout
from perdure.vocab.checkpoint import CheckpointId, Layout, SlotState, TensorPart
from perdure.vocab.units import Bytes
from perdure.wire.digest import chunk_digests, root_of
from perdure.wire.digest import layout_hash as hash_of
from perdure.wire.slotfile import decode_layout, open_slot, read_digests, read_header
from perdure.wire.slots import CHUNK, DATA_START, HASH, TAIL_LIMIT, SlotHeader

LAYOUT_LIMIT = 64 << 20
"""Bytes of the longest layout that is read: about 250 000 tensors. More is no layout."""
HASHES_LIMIT = 64 << 20
"""Bytes of the longest list of hashes that is read: a slot of 16 TiB."""
_MAP_NORESERVE = 0x4000  # linux/mman.h; Python names it since 3.13
_HASH_THREADS = 2
BAD_SOURCE = (CorruptCheckpointError, HostError, WireError, OSError)
"""What a source raises when another one may be better."""

Span = tuple[TensorPart, int, int]
"""A part, the first byte wanted of it, and how many."""
Mapped = Callable[[int], "mmap.mmap | None"]
"""Shared map of the file of that descriptor, where there is one. It is read, and never written."""


class SlotSource(Protocol):
    """Slots of one checkpoint that can be read, by the rank that wrote them.

    Every method raises CorruptCheckpointError (naming file and chunk), HostError or WireError where this source is of
    no use; another one may be. Nothing is given out that was not verified against the hashes.
    """

    @property
    def kind(self) -> str:
        """In words: "own memory", "peer memory", "storage"."""

    def ranks(self) -> tuple[int, ...]:
        """Whose slots are here, the cheapest first."""

    def layout(self, rank: int) -> Layout:
        """Checked: every part lies in the data, none overlaps another one."""

    def tail(self, rank: int) -> bytes:
        """What is no tensor, as it was written."""

    def want(self, rank: int, spans: Sequence[Span]) -> None:
        """Say ahead what will be read, so that it can be brought here at once."""

    def read(self, rank: int, part: TensorPart, first_byte: int, count: int) -> memoryview:
        """`count` bytes of `part`, verified. They stay valid as long as the view does."""

    def confirm(self) -> None:
        """Raises CorruptCheckpointError where what was read may have changed while it was read."""

    def close(self) -> None:
        """Give back what is open. Views that were given out stay valid."""


class Lender(Protocol):
    """Brings another rank's slot here: the trainer's client of its memory server."""

    def fetch(self, rank: int, chunks: Sequence[int]) -> str:
        """Path of a sparse slot file that has `chunks`, its header, layout, hashes and tail. Raises WireError."""


class SealedSlot:
    """One sealed slot file, mapped; a chunk is hashed when it is first touched, and once only."""

    def __init__(self, path: str, checkpoint: CheckpointId, rank: int, mapped: "Mapped | None" = None) -> None:
        """`mapped` gives the memory of files that this process has mapped and faulted in already.

        Raises CorruptCheckpointError: not sealed, of another checkpoint or rank, or its hashes are damaged.
        """
        self.path = path
        self._mapped = mapped
        try:
            self._fd = open_slot(path)
        except OSError as exc:
            raise CorruptCheckpointError(f"the slot {path} cannot be read: {os.strerror(exc.errno or 0)}") from exc
        try:
            self._open(checkpoint, rank)
        except CorruptCheckpointError as exc:
            os.close(self._fd)
            raise CorruptCheckpointError(f"{path}: {exc}") from exc
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self, checkpoint: CheckpointId, rank: int) -> None:
        self.header = _checked_header(read_header(self._fd), checkpoint, rank)
        self._digests = read_digests(self._fd, self.header)
        if root_of(self._digests, self.header.layout, checkpoint) != self.header.root:
            raise CorruptCheckpointError("its hashes do not fit its root hash")
        # Private, so that torch may have a writable view without being able to change the slot; nothing is copied.
        known = None if self._mapped is None else self._mapped(self._fd)
        self._map = known or mmap.mmap(
            self._fd, self.header.file_bytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        )
        self._view = memoryview(self._map)
        self._good: set[int] = set()

    def layout(self) -> Layout:
        header = self.header
        layout = decode_layout(bytes(self.bytes_at(header.layout_start, header.layout_bytes)))
        if hash_of(layout) != header.layout:
            raise CorruptCheckpointError(f"{self.path}: its layout is not the one that its header names")
        if (layout.rank, layout.world_size, layout.data_bytes) != (
            header.rank,
            header.world_size,
            header.data_bytes,
        ):
            raise CorruptCheckpointError(f"{self.path}: its layout and its header contradict each other")
        check_layout(layout, self.path)
        return layout

    def tail(self) -> bytes:
        return bytes(self.bytes_at(self.header.tail_start, self.header.tail_bytes))

    def read(self, part: TensorPart, first_byte: int, count: int) -> memoryview:
        if first_byte < 0 or count < 0 or first_byte + count > part.nbytes:
            raise CorruptCheckpointError(f"{self.path}: bytes {first_byte} … of {part.name} are outside of it")
        return self.bytes_at(DATA_START + part.start + first_byte, count)

    def bytes_at(self, start: int, count: int) -> memoryview:
        """Of the file; verified. Raises CorruptCheckpointError with the number of the first bad chunk."""
        if start < DATA_START or start + count > self.header.hashes_start:
            raise CorruptCheckpointError(f"{self.path}: bytes {start} to {start + count} are not in its hashed part")
        if count:
            self._verify(range((start - DATA_START) // CHUNK, (start + count - 1 - DATA_START) // CHUNK + 1))
        return self._view[start : start + count]

    def chunks_with(self, nbytes: Bytes) -> tuple[memoryview, memoryview]:
        """The chunks that have the first `nbytes` of the data, and their hashes: NOT verified."""
        count = -(-nbytes // CHUNK)
        end = min(DATA_START + count * CHUNK, self.header.hashes_start)
        return self._view[DATA_START:end], memoryview(self._digests)[: count * HASH]

    def _verify(self, chunks: range) -> None:
        for run in _runs(chunk for chunk in chunks if chunk not in self._good):
            start = DATA_START + run.start * CHUNK
            end = min(DATA_START + run.stop * CHUNK, self.header.hashes_start)
            with self._view[start:end] as view:
                found = chunk_digests(view, _HASH_THREADS)
            wanted = self._digests[run.start * HASH : run.stop * HASH]
            if found != wanted:
                bad = next(i for i in range(len(run)) if found[i * HASH :][:HASH] != wanted[i * HASH :][:HASH])
                raise CorruptCheckpointError(f"{self.path}: chunk {run.start + bad} is not what was sealed")
            self._good.update(run)

    def confirm(self) -> None:
        """Raises CorruptCheckpointError where the slot has been given to a new checkpoint meanwhile."""
        if read_header(self._fd) != self.header:
            raise CorruptCheckpointError(f"{self.path} was overwritten while it was read")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # the map stays, until the last view of it is gone
            self._fd = -1


class NodeSlots:
    """Sealed slots in this node's own memory, read where they are."""

    kind = "own memory"

    def __init__(self, checkpoint: CheckpointId, paths: Mapping[int, str]) -> None:
        self._checkpoint = checkpoint
        self._paths = paths
        self._open: dict[int, SealedSlot] = {}

    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._paths))

    def layout(self, rank: int) -> Layout:
        return self._slot(rank).layout()

    def tail(self, rank: int) -> bytes:
        return self._slot(rank).tail()

    def want(self, rank: int, spans: Sequence[Span]) -> None:
        """They are here."""

    def read(self, rank: int, part: TensorPart, first_byte: int, count: int) -> memoryview:
        return self._slot(rank).read(part, first_byte, count)

    def confirm(self) -> None:
        for slot in self._open.values():
            slot.confirm()

    def close(self) -> None:
        for slot in self._open.values():
            slot.close()
        self._open.clear()

    def _slot(self, rank: int) -> SealedSlot:
        if rank not in self._open:
            self._open[rank] = SealedSlot(self._paths[rank], self._checkpoint, rank)
        return self._open[rank]


class BorrowedSlots:
    """Slots in other nodes' memory: their chunks are brought into sparse files here when they are wanted."""

    kind = "peer memory"

    def __init__(self, checkpoint: CheckpointId, ranks: Sequence[int], lender: Lender) -> None:
        self._checkpoint = checkpoint
        self._ranks = tuple(ranks)
        self._lender = lender
        self._open: dict[int, SealedSlot] = {}
        self._there: dict[int, set[int]] = {}

    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def layout(self, rank: int) -> Layout:
        return self._slot(rank).layout()

    def tail(self, rank: int) -> bytes:
        return self._slot(rank).tail()

    def want(self, rank: int, spans: Sequence[Span]) -> None:
        self._bring(rank, {chunk for part, first, count in spans for chunk in _chunks(part, first, count)})

    def read(self, rank: int, part: TensorPart, first_byte: int, count: int) -> memoryview:
        self._bring(rank, set(_chunks(part, first_byte, count)))
        return self._slot(rank).read(part, first_byte, count)

    def confirm(self) -> None:
        """Borrowed files are nobody else's."""

    def close(self) -> None:
        for slot in self._open.values():
            slot.close()
        self._open.clear()

    def _bring(self, rank: int, chunks: set[int]) -> None:
        absent = chunks - self._there.setdefault(rank, set())
        if absent:
            self._reopen(rank, self._lender.fetch(rank, sorted(absent)))
            self._there[rank] |= absent

    def _slot(self, rank: int) -> SealedSlot:
        if rank not in self._open:
            self._reopen(rank, self._lender.fetch(rank, ()))
        return self._open[rank]

    def _reopen(self, rank: int, path: str) -> None:
        """Mapped anew: a private map need not show what was written into the file after it was made (mmap(2))."""
        slot = SealedSlot(path, self._checkpoint, rank)
        if rank in self._open:
            self._open[rank].close()
        self._open[rank] = slot


def reason_of(source: SlotSource, rank: int, problem: Exception) -> str:
    """For the list of what was tried."""
    whose = f" of rank {rank}" if rank >= 0 else ""
    return f"{source.kind}{whose}: {problem}"


def _checked_header(header: SlotHeader, checkpoint: CheckpointId, rank: int) -> SlotHeader:
    if header.state is not SlotState.SEALED:
        raise CorruptCheckpointError(f"the slot is not sealed but {header.state}")
    if header.checkpoint != checkpoint:
        raise CorruptCheckpointError(f"the slot holds {header.checkpoint}, wanted is {checkpoint}")
    if header.rank != rank:
        raise CorruptCheckpointError(f"the slot is rank {header.rank}'s, wanted is rank {rank}'s")
    sizes = (header.data_bytes, header.tail_room, header.tail_bytes, header.layout_bytes)
    if min(sizes) < 0 or header.tail_bytes > min(header.tail_room, TAIL_LIMIT):
        raise CorruptCheckpointError("the slot's header has sizes that cannot be")
    if header.chunks * HASH > HASHES_LIMIT or header.layout_bytes > LAYOUT_LIMIT:
        raise CorruptCheckpointError(f"a slot of {header.file_bytes} bytes is larger than any that is read")
    return header


def _chunks(part: TensorPart, first_byte: int, count: int) -> range:
    if count <= 0:
        return range(0)
    return range((part.start + first_byte) // CHUNK, (part.start + first_byte + count - 1) // CHUNK + 1)


def _runs(numbers: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges of neighbours."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
