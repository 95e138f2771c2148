"""The one copy: from tensors into a mapped slot by a few threads, and back.

Knows addresses and maps; knows neither layouts nor when a slot may be written. `ctypes.memmove` releases the GIL, so
that threads add up; they are made once, and again after a fork.
"""

import ctypes
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import xxhash

from perdure.trainer.checkpoint.tail import dtype_named
from perdure.vocab.checkpoint import TensorPart
from perdure.vocab.units import Bytes
from perdure.wire.slotfile import map_slot, populate
from perdure.wire.slots import CHUNK, DATA_START, HASH

PIECE: Bytes = 8 << 20
"""Copied by one thread at a time: large enough that taking the next one costs nothing, small enough to share out."""
_ALONE: Bytes = 256 << 10
"""Smaller tensors are copied by the calling thread: two threads would spend the time on the GIL."""
_IN_CACHE: Bytes = 1 << 20
"""Read back at a time: small enough to be in a core's cache still when it is copied after it was hashed."""

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process

Move = tuple[int, int, int]
"""(to address, from address, bytes)."""
Task = Callable[[], None]


def default_threads() -> int:
    """Two saturate the memory of a socket's share; one where there is one processor."""
    return min(2, len(os.sched_getaffinity(0)))


class Copiers:
    """Threads that wait for something to copy. They are daemons: they hold nothing that an ending process misses."""

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._pid = 0
        self._work: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, moves: Iterable[Move]) -> None:
        """Copy everything; returns when all is there. One caller at a time."""
        small, large = _dealt(moves)
        if self.threads == 1 or len(large) <= 1:
            _copy(deque((*small, *large)))
            return
        self.share(partial(_copy, deque(large)), len(large), first=partial(_copy, deque(small)))

    def share(self, task: "Task", pieces: int, first: "Task | None" = None) -> None:
        """Have as many threads do `task` as there are `pieces` for; this one does `first` before. None may raise."""
        helpers = min(self.threads, pieces) - 1
        if helpers > 0:
            self._start()
        for _ in range(helpers):
            self._work.put(task)
        if first is not None:
            first()
        task()
        for _ in range(helpers):
            self._done.get()

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()  # after a fork the threads are gone, and the queues may be locked by them
        self._work, self._done = queue.SimpleQueue(), queue.SimpleQueue()
        for number in range(self.threads - 1):
            threading.Thread(
                target=_serve, args=(self._work, self._done), name=f"perdure-copy-{number}", daemon=True
            ).start()


def _serve(work: "queue.SimpleQueue[Task]", done: "queue.SimpleQueue[None]") -> None:
    while True:
        work.get()()
        done.put(None)


def _copy(moves: "deque[Move]") -> None:
    move, take = ctypes.memmove, moves.popleft
    while True:
        try:
            to, start, count = take()
        except IndexError:
            return
        move(to, start, count)


def _dealt(moves: Iterable[Move]) -> tuple[list[Move], list[Move]]:
    small: list[Move] = []
    large: list[Move] = []
    for to, start, count in moves:
        if count < _ALONE:
            small.append((to, start, count))
            continue
        large.extend((to + at, start + at, min(PIECE, count - at)) for at in range(0, count, PIECE))
    return small, large


class SlotMap:
    """The trainer's own mapping of one slot, faulted in, so that no copy waits for the kernel."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor. Raises CorruptCheckpointError, HostError, OSError."""
        self.fd = fd
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino, status.st_size)
        self._map: mmap.mmap = map_slot(fd, writable=True)
        populate(self._map)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()
        self.is_pinned = False

    def pin(self) -> bool:
        """Register it with the CUDA driver, once, so that copies from a device need no bounce buffer; gives whether.

        Where the driver refuses, copies are slower and wait for the device, and nothing else changes.
        """
        if not self.is_pinned:
            self.is_pinned = int(torch.cuda.cudart().cudaHostRegister(self.address, len(self._map), _PORTABLE)) == 0
        return self.is_pinned

    def view(self, part: TensorPart) -> torch.Tensor:
        """The place of a part, as a tensor."""
        return viewed(self.bytes[DATA_START + part.start : DATA_START + part.start + part.nbytes], part)

    @property
    def map(self) -> mmap.mmap:
        """The whole file, to be read."""
        return self._map

    def write(self, start: int, data: bytes) -> None:
        """Bytes of the file from `start` on."""
        self._map[start : start + len(data)] = data

    def close(self) -> None:
        """Drop it. The memory goes when the last tensor on it does."""
        if self.fd < 0:
            return
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        del self.bytes
        os.close(self.fd)
        self.fd = -1


def viewed(flat: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """Bytes as the tensor that they are."""
    return flat.view(dtype_named(part.dtype)).view(part.shape)


def part_of(data: memoryview, part: TensorPart) -> torch.Tensor:
    """A part of `data` (a slot's, from DATA_START on) as the tensor that it is; nothing is copied."""
    return viewed(torch.frombuffer(data, dtype=torch.uint8)[part.start : part.start + part.nbytes], part)


def into_slot(
    slot: SlotMap, flat: Sequence[tuple[int, int, int]], rest: Sequence[tuple[TensorPart, Any]], copiers: Copiers
) -> None:
    """Copy tensors into the slot's data. CPU tensors are there when it returns; see `device` for the others."""
    base = slot.address + DATA_START
    copiers.run((base + start, address, count) for start, address, count in flat)
    for part, tensor in rest:
        slot.view(part).copy_(tensor)


def out_of(
    data: memoryview, digests: memoryview, moves: Sequence[tuple[int, int, int]], copiers: Copiers
) -> tuple[int, ...]:
    """The way back: copy parts of `data` (a slot's, from DATA_START on) to (start, address, bytes), and hash all of it.

    Gives the numbers of chunks that are not what `digests` say: what was copied from them is not to be used. Hashing
    and copying go over the memory once, together.
    """
    if not data.nbytes:
        return ()
    base = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    cuts = _cut(moves, data.nbytes)
    numbers, bad = deque(range(-(-data.nbytes // CHUNK))), deque[int]()

    def work() -> None:
        take, move = numbers.popleft, ctypes.memmove
        while True:
            try:
                number = take()
            except IndexError:
                return
            start, digest = number * CHUNK, xxhash.xxh3_128()
            for at in range(start, min(start + CHUNK, data.nbytes), _IN_CACHE):
                with data[at : min(at + _IN_CACHE, start + CHUNK)] as piece:
                    digest.update(piece)
                for begin, address, count in cuts[at // _IN_CACHE]:
                    move(address, base + begin, count)
            if digest.digest() != digests[number * HASH : (number + 1) * HASH]:
                bad.append(number)

    copiers.share(work, len(numbers))
    return tuple(sorted(bad))


def _cut(moves: Iterable[tuple[int, int, int]], nbytes: Bytes) -> list[list[tuple[int, int, int]]]:
    """(start, address, bytes) by the piece of `_IN_CACHE` bytes that they are in; those that are in several are cut."""
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in range(-(-nbytes // _IN_CACHE))]
    for start, address, count in moves:
        at = start
        while at < start + count:
            end = min(start + count, (at // _IN_CACHE + 1) * _IN_CACHE)
            cuts[at // _IN_CACHE].append((at, address + at - start, end - at))
            at = end
    return cuts
