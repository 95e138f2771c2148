"""Builders: sealed slots of several ranks, as trainers and memory servers leave them, and what is drained from them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from perdure.store.checkpoints import begin, commit
from perdure.trainer.checkpoint.drain import answer
from perdure.trainer.checkpoint.tail import Tail, encode_tail
from perdure.vocab.checkpoint import CheckpointId, Layout, SlotState, Stored, TensorPart
from perdure.vocab.ids import JobId
from perdure.wire.digest import chunk_digests, layout_hash, root_of, shards_hash
from perdure.wire.memory import DrainRequest
from perdure.wire.slotfile import create, write_header
from perdure.wire.slots import DATA_START, SlotHeader, page_up

Piece = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Name, offsets, shape of the whole, and what this rank has of it."""


def an_id(step: int = 10, generation: int = 1, attempt: int = 1_700_000_000) -> CheckpointId:
    return CheckpointId(attempt=attempt, generation=generation, step=step)  # type: ignore[arg-type]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def a_slot(
    folder: Path,
    rank: int,
    world_size: int,
    pieces: Sequence[Piece],
    *,
    checkpoint: CheckpointId | None = None,
    shared: Mapping[str, object] | None = None,
) -> tuple[str, str]:
    """Path of a sealed slot, and its shards hash."""
    parts, blobs, at = [], [], 0
    for name, offsets, whole, tensor in pieces:
        data = raw(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(
            TensorPart(
                name=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                offsets=offsets,
                whole=whole,
                start=at,
                nbytes=len(data),
            )
        )
        blobs.append((at, data))
        at += -(-len(data) // 64) * 64
    layout = Layout(rank=rank, world_size=world_size, parts=tuple(parts), data_bytes=at)  # type: ignore[arg-type]
    tail = encode_tail(Tail(dict(shared or {}), {"rank": rank}))
    text = msgspec.json.encode(layout)
    where = checkpoint or an_id()
    header = SlotHeader(
        sequence=0,
        job=JobId("exp"),
        rank=rank,  # type: ignore[arg-type]
        world_size=world_size,
        state=SlotState.SEALED,
        checkpoint=where,
        layout=layout_hash(layout),
        shards=shards_hash(layout),
        data_bytes=at,
        tail_room=page_up(len(tail)),
        tail_bytes=len(tail),
        layout_bytes=len(text),
    )
    path = str(folder / f"own-{rank}-{where.step}.slot")
    fd = create(path, header.file_bytes)
    for start, data in blobs:
        os.pwrite(fd, data, DATA_START + start)
    os.pwrite(fd, tail, header.tail_start)
    os.pwrite(fd, text, header.layout_start)
    digests = chunk_digests(memoryview(os.pread(fd, header.hashed_bytes, DATA_START)))
    os.pwrite(fd, digests, header.hashes_start)
    root = root_of(digests, header.layout, where)
    write_header(fd, msgspec.structs.replace(header, root=root))
    os.close(fd)
    return path, header.shards


class Slots(msgspec.Struct, frozen=True):
    """One checkpoint in the slots of all its ranks."""

    checkpoint: CheckpointId
    paths: dict[int, str]
    by_rank: tuple[str, ...]

    def request(self, store: object, name: str, *ranks: int, finish: bool = False) -> DrainRequest:
        """Of `ranks` (none: all)."""
        chosen = ranks or tuple(self.paths)
        return DrainRequest(
            id=7,
            store=str(store),
            name=name,
            checkpoint=self.checkpoint,
            slots={rank: self.paths[rank] for rank in chosen},
            by_rank=self.by_rank,
            finish=finish,
        )


def rows_of(total: int, world_size: int) -> list[tuple[int, int]]:
    """(first row, rows) of each rank, as FSDP deals them: the last ones may have fewer, or none."""
    each = -(-total // world_size)
    return [(min(rank * each, total), max(min(each, total - rank * each), 0)) for rank in range(world_size)]


def a_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors: rows that do not divide, one that few ranks have, 0-dim, several dtypes, one empty."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(1001, 37, generator=dice),
        "model.head.bias": torch.randn(3, generator=dice),
        "model.norm": torch.randn(65, generator=dice).to(torch.bfloat16),
        "model.mask": torch.randint(0, 2, (10, 3), generator=dice).to(torch.bool),
        "model.nothing": torch.empty(0, 4),
        "optimizer.state.embed.weight.exp_avg": torch.randn(1001, 37, generator=dice),
        "optimizer.state.embed.weight.step": torch.tensor(10.0),
    }


SHARED = {
    "optimizer.param_groups.0.lr": 0.001,
    "optimizer.param_groups.0.betas": (0.9, 0.95),
    "optimizer.param_groups.0.params": ["embed.weight"],
}


def sharded(
    folder: Path, world_size: int = 4, *, checkpoint: CheckpointId | None = None, seed: int = 0
) -> tuple[Slots, dict[str, torch.Tensor]]:
    """Row shards, uneven; norms and counters on all ranks. Gives the slots and the whole tensors."""
    state, paths, hashes = a_state(seed), {}, []
    for rank in range(world_size):
        pieces: list[Piece] = []
        for name, tensor in state.items():
            if tensor.dim() != 2:
                pieces.append((name, (0,) * tensor.dim(), tuple(tensor.shape), tensor))
                continue
            first, count = rows_of(tensor.shape[0], world_size)[rank]
            pieces.append((name, (first, 0), tuple(tensor.shape), tensor[first : first + count]))
        path, shards = a_slot(folder, rank, world_size, pieces, checkpoint=checkpoint, shared=SHARED)
        paths[rank] = path
        hashes.append(shards)
    return Slots(checkpoint or an_id(), paths, tuple(hashes)), state


def replicated(
    folder: Path, world_size: int = 3, *, checkpoint: CheckpointId | None = None, seed: int = 0
) -> tuple[Slots, dict[str, torch.Tensor]]:
    """Every rank has all, as in DDP."""
    state, paths, hashes = a_state(seed), {}, []
    for rank in range(world_size):
        pieces = [(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor) for name, tensor in state.items()]
        path, shards = a_slot(folder, rank, world_size, pieces, checkpoint=checkpoint, shared=SHARED)
        paths[rank] = path
        hashes.append(shards)
    return Slots(checkpoint or an_id(), paths, tuple(hashes)), state


def drain(store: object, slots: Slots, *, job: str = "exp") -> Stored:
    """Into `store`, in this process, to its commit."""
    name = begin(str(store), slots.checkpoint)
    reply = answer(msgspec.json.encode(slots.request(store, name, finish=True)))
    assert reply.error == ""
    return commit(str(store), name, JobId(job), slots.by_rank)


def a_stored(
    tmp: Path, store: object, step: int = 10, *, job: str = "exp", generation: int = 1, seed: int = 0
) -> Stored:
    """A small committed checkpoint of two ranks."""
    folder = tmp / f"slots-{job}-{step}-{generation}"
    folder.mkdir()
    slots, _ = sharded(folder, 2, checkpoint=an_id(step, generation), seed=seed)
    return drain(store, slots, job=job)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, at: int | None = None) -> None:
    """One bit, in the middle by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)
