"""Builders for tests of reading: real slot files of any world, and a lender that copies chunks of them."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from perdure.errors import WireError
from perdure.trainer.checkpoint.layout import bind
from perdure.trainer.checkpoint.tail import Tail, encode_tail
from perdure.vocab.checkpoint import CheckpointId, Chosen, Layout, SlotState, Stored
from perdure.vocab.ids import GenerationNumber, JobId, NodeId
from perdure.wire.digest import chunk_digests, layout_hash, root_of, shards_hash
from perdure.wire.memory import RestorePlan
from perdure.wire.slotfile import create, read_header, write_header
from perdure.wire.slots import CHUNK, DATA_START, HASH, PAGE, SlotHeader, chunk_range

CHECKPOINT = CheckpointId(attempt=1_700_000_000, generation=GenerationNumber(3), step=41)
ELSEWHERE = NodeId("elsewhere")


def write_slot(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    *,
    shared: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    checkpoint: CheckpointId = CHECKPOINT,
    layout: Layout | None = None,
) -> Layout:
    """A sealed slot with these tensors; `layout` is a lie to be told instead of the true one."""
    bound = bind(tensors, rank, world_size)
    told = bound.layout if layout is None else layout
    tail = encode_tail(Tail(shared or {}, own or {}))
    text = msgspec.json.encode(told)
    header = SlotHeader(
        sequence=0,
        job=JobId("job"),
        rank=told.rank,
        world_size=told.world_size,
        state=SlotState.WRITTEN,
        checkpoint=checkpoint,
        layout=layout_hash(told),
        shards=shards_hash(told),
        data_bytes=told.data_bytes,
        tail_room=max(len(tail), PAGE),
        tail_bytes=len(tail),
        layout_bytes=len(text),
    )
    fd = create(str(path), header.file_bytes)
    for part, local in zip(bound.layout.parts, bound.places, strict=True):
        os.pwrite(fd, raw(local), DATA_START + part.start)
    os.pwrite(fd, tail, header.tail_start)
    os.pwrite(fd, text, header.layout_start)
    os.close(fd)
    seal(path, header)
    return told


def seal(path: Path, header: SlotHeader) -> None:
    """Hash what is in the file and say so in its header, whatever it is."""
    fd = os.open(path, os.O_RDWR)
    digests = chunk_digests(memoryview(os.pread(fd, header.hashed_bytes, DATA_START)), 1)
    os.pwrite(fd, digests, header.hashes_start)
    assert header.checkpoint is not None
    root = root_of(digests, header.layout, header.checkpoint)
    write_header(fd, msgspec.structs.replace(header, state=SlotState.SEALED, root=root))
    os.close(fd)


def header_of(path: Path) -> SlotHeader:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd)
    finally:
        os.close(fd)


def flip(path: Path, at: int) -> None:
    """One bit of the byte at `at`."""
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 0x10]), at)
    os.close(fd)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of it: what bitwise equal means, for NaN too."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def a_plan(
    world_size: int,
    *,
    here: Mapping[int, Path] | None = None,
    away: Sequence[int] = (),
    stored: Stored | None = None,
    missing: tuple[int, ...] = (),
    checkpoint: CheckpointId | None = CHECKPOINT,
) -> RestorePlan:
    chosen = Chosen(
        checkpoint=checkpoint,
        world_size=world_size,
        holders=dict.fromkeys(away, (ELSEWHERE,)),
        stored=stored,
        missing=missing,
    )
    return RestorePlan(id=1, chosen=chosen, here={rank: str(path) for rank, path in (here or {}).items()})


class CopyingLender:
    """Another node's slots: chunks that are asked for are copied into sparse files, as a memory server does."""

    def __init__(self, folder: Path, slots: Mapping[int, Path]) -> None:
        self._folder = folder
        self._slots = slots
        self.asked: dict[int, set[int]] = {}

    def fetch(self, rank: int, chunks: Sequence[int]) -> str:
        if rank not in self._slots:
            raise WireError(f"no node has the slot of rank {rank}")
        source, target = self._slots[rank], self._folder / f"borrowed-{rank}.slot"
        header = header_of(source)
        self.asked.setdefault(rank, set()).update(chunks)
        always = range((header.tail_start - DATA_START) // CHUNK, header.chunks)
        with source.open("rb") as read, target.open("r+b" if target.exists() else "w+b") as write:
            write.truncate(header.file_bytes)
            ranges = [chunk_range(header, chunk) for chunk in {*chunks, *always}]
            ranges += [(0, DATA_START), (header.hashes_start, header.hashes_start + header.chunks * HASH)]
            for start, end in ranges:
                read.seek(start)
                write.seek(start)
                write.write(read.read(end - start))
        return str(target)


def copied(path: Path, to: Path) -> Path:
    shutil.copyfile(path, to)
    return to
