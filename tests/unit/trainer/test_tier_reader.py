"""Reading slots into any world: bitwise, from the first good source, or not at all."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.errors import ConfigError, CorruptCheckpointError
from perdure.trainer.checkpoint.reader import Loaded, TierReader, load, local_bytes
from perdure.trainer.checkpoint.tiers import Tiers
from perdure.vocab.checkpoint import Layout, TensorPart
from perdure.wire.slotfile import write_header
from perdure.wire.slots import CHUNK, DATA_START
from tests.unit.trainer.tier_slots import (
    CHECKPOINT,
    CopyingLender,
    a_plan,
    copied,
    flip,
    header_of,
    same,
    seal,
    write_slot,
)

# What a model and its optimizer may have: uneven rows and columns, fewer rows than ranks, nothing at all, no dimension.
SHARDED = {
    "model.embed": (torch.float32, (25, 7), 0),
    "model.tall": (torch.bfloat16, (1003, 3), 0),
    "model.few": (torch.float32, (3, 4), 0),
    "model.one": (torch.float64, (1,), 0),
    "model.wide": (torch.float16, (6, 11), 1),
    "model.cube": (torch.int64, (5, 3, 2), 2),
    "model.empty": (torch.float32, (0, 4), 0),
    "optimizer.state.embed.exp_avg": (torch.float32, (25, 7), 0),
}
REPLICATED = {
    "optimizer.state.embed.step": (torch.float32, ()),
    "model.mask": (torch.bool, (13,)),
    "model.norm": (torch.bfloat16, (9,)),
    "model.nothing": (torch.float32, (0,)),
    "model.spectrum": (torch.complex64, (3, 2)),
}


def a_truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in SHARDED.items()} | REPLICATED
    truth = {}
    for name, (dtype, shape) in shapes.items():
        count = torch.zeros(shape).numel() * dtype.itemsize
        noise = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        truth[name] = noise.view(dtype).reshape(shape)  # any bits, NaN among them
    return truth


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[Any]:
    """This process as one rank of a world that does not communicate: torch's own stand-in for a process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def a_state(mesh: Any, truth: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """This rank's tensors, with what is true in them, or with what must be overwritten."""
    state = {}
    for name, (dtype, shape, dim) in SHARDED.items():
        size, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, [Shard(dim)])
        if truth is None:
            local = torch.full(size, 1, dtype=dtype)
        else:
            local = truth[name]
            for at, (offset, length) in enumerate(zip(offsets, size, strict=True)):
                local = local.narrow(at, min(offset, local.shape[at]), length)
        stride = torch.empty(shape).stride()
        state[name] = DTensor.from_local(
            local.contiguous(), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    for name, (dtype, shape) in REPLICATED.items():
        plain = torch.full(shape, 1, dtype=dtype) if truth is None else truth[name].clone()
        state[name] = plain
        if name == "model.norm":
            state[name] = DTensor.from_local(plain, mesh, [Replicate()], run_check=False)
    return state


def write_world(folder: Path, world_size: int, truth: Mapping[str, torch.Tensor]) -> dict[int, Path]:
    folder.mkdir()
    slots = {}
    for rank in range(world_size):
        slots[rank] = folder / f"own-{rank}-0.slot"
        with as_rank(rank, world_size) as mesh:
            write_slot(
                slots[rank],
                a_state(mesh, truth),
                rank,
                world_size,
                shared={"scheduler.last_epoch": 7, "optimizer.param_groups.embed.betas": (0.9, 0.95)},
                own={"coordinate": rank, "rng": b"dice of %d" % rank},
            )
    return slots


def whole_of(
    states: list[dict[str, torch.Tensor]], places: list[dict[str, tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    """What the ranks have together."""
    whole: dict[str, torch.Tensor] = {}
    for state, offsets in zip(states, places, strict=True):
        for name, local in state.items():
            if name not in SHARDED:
                whole[name] = local
                continue
            dtype, shape, _ = SHARDED[name]
            target = whole.setdefault(name, torch.full(shape, 77, dtype=dtype))
            for at, (offset, length) in enumerate(zip(offsets[name], local.shape, strict=True)):
                target = target.narrow(at, min(offset, target.shape[at]), length)
            target.copy_(local)
    return whole


def read_world(world_size: int, read: Callable[[int, dict[str, torch.Tensor]], Loaded]) -> dict[str, torch.Tensor]:
    """Every rank of a world reads; gives what they have together then."""
    states, places = [], []
    for rank in range(world_size):
        with as_rank(rank, world_size) as mesh:
            state = a_state(mesh)
            loaded = read(rank, state)
            assert loaded.nbytes == sum(map(local_bytes, state.values())) == sum(loaded.sources.values())
            places.append(
                {
                    name: compute_local_shape_and_global_offset(torch.Size(shape), mesh, [Shard(dim)])[1]
                    for name, (_, shape, dim) in SHARDED.items()
                }
            )
            states.append({n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()})
    return whole_of(states, places)


def differing(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in truth if not same(found[name], truth[name])]


# --- any world -------------------------------------------------------------------------------------------------------


def test_uneven_shards_after_4_to_3_to_5_to_1_are_bitwise_equal(tmp_path: Path) -> None:
    """Thread 27 (torchtitan 1136): uneven shards. Thread 28 (accelerate 3971): 0-dim and step tensors."""
    truth = a_truth()
    found: Mapping[str, torch.Tensor] = truth
    for writers, readers in ((4, 3), (3, 5), (5, 1), (1, 4)):
        slots = write_world(tmp_path / f"{writers}", writers, found)
        plan = a_plan(writers, here=slots)
        found = read_world(
            readers, lambda rank, state, p=plan, n=readers: load(p, None, state, rank=rank, world_size=n)
        )
        assert differing(found, truth) == []


def test_borrowed_slots_of_other_nodes_give_the_same_as_own_ones(tmp_path: Path) -> None:
    truth = a_truth()
    slots = write_world(tmp_path / "w", 4, truth)
    lender = CopyingLender(tmp_path, {rank: slots[rank] for rank in (1, 2, 3)})
    plan = a_plan(4, here={0: slots[0]}, away=(1, 2, 3))
    found = read_world(3, lambda rank, state: load(plan, lender, state, rank=rank, world_size=3))
    assert differing(found, truth) == []


def test_same_world_needs_only_its_own_slot_of_another_node(tmp_path: Path) -> None:
    truth = a_truth()
    slots = write_world(tmp_path / "w", 4, truth)
    lender = CopyingLender(tmp_path, slots)
    with as_rank(2, 4) as mesh:
        state = a_state(mesh)
        loaded = load(a_plan(4, away=(0, 1, 2, 3)), lender, state, rank=2, world_size=4)
    assert set(lender.asked) == {2}
    assert loaded.own == {"coordinate": 2, "rng": b"dice of 2"}
    assert set(loaded.owns) == {2}
    assert set(loaded.sources) == {"peer memory"}


def test_another_world_gives_shared_values_and_every_ranks_own_ones(tmp_path: Path) -> None:
    """Thread 25 (torchtitan 811): per-rank loader keys must not be lost when the world grows."""
    slots = write_world(tmp_path / "w", 2, a_truth())
    with as_rank(3, 4) as mesh:
        loaded = load(a_plan(2, here=slots), None, a_state(mesh), rank=3, world_size=4)
    assert loaded.own is None
    assert {rank: own["coordinate"] for rank, own in loaded.owns.items()} == {0: 0, 1: 1}
    assert loaded.shared == {"scheduler.last_epoch": 7, "optimizer.param_groups.embed.betas": (0.9, 0.95)}


def test_own_state_that_is_lost_is_none_while_a_replica_gives_the_tensors(tmp_path: Path) -> None:
    state = {"model.w": torch.arange(6.0)}
    write_slot(tmp_path / "1", state, 1, 2, own={"coordinate": 1})
    found = {"model.w": torch.zeros(6)}
    loaded = load(a_plan(2, here={1: tmp_path / "1"}, missing=(0,)), None, found, rank=0, world_size=2)
    assert loaded.own is None
    assert set(loaded.owns) == {1}
    assert same(found["model.w"], state["model.w"])


def test_fetch_brings_only_the_chunks_that_are_needed(tmp_path: Path) -> None:
    rows = 6 * CHUNK // 4096
    whole = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    with as_rank(0, 1) as mesh:
        write_slot(tmp_path / "0", {"model.w": DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)}, 0, 1)
    lender = CopyingLender(tmp_path, {0: tmp_path / "0"})
    with as_rank(1, 3) as mesh:
        local = torch.zeros(rows // 3, 1024)
        target = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        load(a_plan(1, away=(0,)), lender, {"model.w": target}, rank=1, world_size=3)
    assert lender.asked[0] == {2, 3}
    assert same(local, whole[rows // 3 : 2 * rows // 3])


def test_a_replicated_model_is_not_read_from_one_rank_by_all(tmp_path: Path) -> None:
    state = {"model.w": torch.arange(1000.0)}
    slots = {rank: tmp_path / f"{rank}" for rank in range(4)}
    for rank, path in slots.items():
        write_slot(path, state, rank, 4)
    asked = []
    for rank in range(3):
        lender = CopyingLender(tmp_path, slots)
        load(a_plan(4, away=tuple(slots)), lender, {"model.w": torch.zeros(1000)}, rank=rank, world_size=3)
        asked.append({rank for rank, chunks in lender.asked.items() if chunks})
    assert asked == [{0}, {1}, {2}]


def test_dcp_load_with_the_tier_reader_fills_a_nested_state(tmp_path: Path) -> None:
    write_slot(tmp_path / "0", {"model.a": torch.arange(8.0)}, 0, 1, shared={"scheduler.last_epoch": 7})
    state = {"model": {"a": torch.zeros(8)}, "scheduler": {"last_epoch": 0}}
    tiers = Tiers(a_plan(1, here={0: tmp_path / "0"}), None, "", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not distributed
        dcp.load(state, storage_reader=TierReader(tiers))
    assert state["scheduler"]["last_epoch"] == 7
    assert same(state["model"]["a"], torch.arange(8.0))  # type: ignore[arg-type]


# --- what does not fit -----------------------------------------------------------------------------------------------


def an_adam(names: str) -> dict[str, torch.Tensor]:
    return {f"optimizer.state.{name}.exp_avg": torch.full((4,), 1.0) for name in names}


def test_a_missing_and_an_extra_optimizer_key_are_both_named(tmp_path: Path) -> None:
    """Thread 29 (pytorch 146157): named, and a choice. Thread 26 (Fast-LLM 436): every key, or a loud error."""
    write_slot(tmp_path / "0", an_adam("ab"), 0, 1)
    targets = an_adam("bc")
    for target in targets.values():
        target.zero_()
    plan = a_plan(1, here={0: tmp_path / "0"})
    with pytest.raises(
        ConfigError, match=r"not in .*: optimizer\.state\.c\.exp_avg; only in .*: optimizer\.state\.a\."
    ):
        load(plan, None, targets, rank=0, world_size=1)
    assert all(not target.any() for target in targets.values())
    loaded = load(plan, None, targets, rank=0, world_size=1, strict=False)
    assert loaded.missing == ("optimizer.state.c.exp_avg",)
    assert loaded.extra == ("optimizer.state.a.exp_avg",)
    assert targets["optimizer.state.b.exp_avg"].tolist() == [1.0] * 4
    assert not targets["optimizer.state.c.exp_avg"].any()


def test_values_that_are_no_tensors_are_compared_too(tmp_path: Path) -> None:
    write_slot(tmp_path / "0", {}, 0, 1, shared={"scheduler.last_epoch": 7})
    with pytest.raises(ConfigError, match=r"not in .*: scheduler\.base_lrs; only in .*: scheduler\.last_epoch"):
        load(a_plan(1, here={0: tmp_path / "0"}), None, {}, rank=0, world_size=1, values={"scheduler.base_lrs"})


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_always(tmp_path: Path, strict: bool) -> None:
    write_slot(tmp_path / "0", {"model.w": torch.ones(4, 2)}, 0, 1)
    target = {"model.w": torch.zeros(2, 4)}
    with pytest.raises(ConfigError, match=r"another shape .*model\.w \(2, 4\) ≠ \(4, 2\)"):
        load(a_plan(1, here={0: tmp_path / "0"}), None, target, rank=0, world_size=1, strict=strict)
    assert not target["model.w"].any()


def test_another_dtype_is_refused_or_converted(tmp_path: Path) -> None:
    write_slot(tmp_path / "0", {"model.w": torch.ones(4, dtype=torch.bfloat16)}, 0, 1)
    plan = a_plan(1, here={0: tmp_path / "0"})
    target = {"model.w": torch.zeros(4)}
    with pytest.raises(ConfigError, match="another dtype"):
        load(plan, None, target, rank=0, world_size=1)
    load(plan, None, target, rank=0, world_size=1, strict=False)
    assert target["model.w"].tolist() == [1.0] * 4


def test_a_rank_whose_shard_nobody_has_is_a_loud_hole(tmp_path: Path) -> None:
    slots = write_world(tmp_path / "w", 4, a_truth())
    del slots[2]
    with as_rank(0, 1) as mesh, pytest.raises(CorruptCheckpointError, match="no data for parts of model"):
        load(a_plan(4, here=slots), None, a_state(mesh), rank=0, world_size=1)


# --- damage ----------------------------------------------------------------------------------------------------------


def places_to_flip(path: Path) -> dict[str, int]:
    header = header_of(path)
    return {
        "first byte": DATA_START,
        "last byte of the data": DATA_START + header.data_bytes - 1,
        "tail": header.tail_start + 2,
        "layout": header.layout_start + 5,
        "hashes": header.hashes_start + 3,
        "header": 4096 + 200,
    }


@pytest.mark.parametrize("place", ["first byte", "last byte of the data", "tail", "layout", "hashes", "header"])
def test_one_flipped_bit_in_each_slot_is_refused(tmp_path: Path, place: str) -> None:
    """Thread 38 (torchtitan 4011): in every slot."""
    slots = write_world(tmp_path / "w", 4, a_truth())
    for rank, path in slots.items():
        at = places_to_flip(path)[place]
        flip(path, at)
        with as_rank(rank, 4) as mesh, pytest.raises(CorruptCheckpointError, match=f"own-{rank}-0.slot"):
            load(a_plan(4, here=slots), None, a_state(mesh), rank=rank, world_size=4)
        flip(path, at)


@pytest.mark.parametrize("place", ["first byte", "last byte of the data", "tail", "layout", "hashes", "header"])
def test_one_flipped_bit_in_each_slot_is_read_from_the_next_holder(tmp_path: Path, place: str) -> None:
    """Thread 1 (Megatron-LM 5281): the next source is used."""
    truth = a_truth()
    slots = write_world(tmp_path / "w", 4, truth)
    lender = CopyingLender(tmp_path, {r: copied(p, tmp_path / f"replica-{r}") for r, p in slots.items()})
    plan = a_plan(4, here=slots, away=tuple(slots))
    for path in slots.values():
        at = places_to_flip(path)[place]
        flip(path, at)
        found = read_world(3, lambda rank, state: load(plan, lender, state, rank=rank, world_size=3))
        assert differing(found, truth) == []
        flip(path, at)


def test_a_bad_chunk_costs_only_itself(tmp_path: Path) -> None:
    whole = torch.arange(4 * CHUNK // 4, dtype=torch.float32)
    state = {f"model.{i}": piece.clone() for i, piece in enumerate(whole.chunk(4))}
    write_slot(tmp_path / "0", state, 0, 1)
    lender = CopyingLender(tmp_path, {0: copied(tmp_path / "0", tmp_path / "replica")})
    flip(tmp_path / "0", DATA_START + 2 * CHUNK + 99)
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    loaded = load(a_plan(1, here={0: tmp_path / "0"}, away=(0,)), lender, targets, rank=0, world_size=1)
    assert loaded.sources == {"own memory": 3 * CHUNK, "peer memory": CHUNK}
    assert lender.asked[0] == {2}
    assert differing(targets, state) == []


def test_bad_everywhere_names_every_source_that_was_tried(tmp_path: Path) -> None:
    write_slot(tmp_path / "own", {"model.w": torch.ones(4)}, 0, 1)
    lender = CopyingLender(tmp_path, {0: copied(tmp_path / "own", tmp_path / "replica")})
    for name in ("own", "replica"):
        flip(tmp_path / name, DATA_START)
    plan = a_plan(1, here={0: tmp_path / "own"}, away=(0,))
    with pytest.raises(CorruptCheckpointError) as caught:
        load(plan, lender, {"model.w": torch.zeros(4)}, rank=0, world_size=1)
    assert "own memory of rank 0" in str(caught.value)
    assert "peer memory of rank 0" in str(caught.value)
    assert "chunk 0" in str(caught.value)


@pytest.mark.parametrize("size", [0, 100, 8192, 12000, -4096])
def test_a_slot_that_is_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    """Thread 19 (metaseq 53): sizes are checked at restore."""
    path = tmp_path / "0"
    write_slot(path, {"model.w": torch.ones(9000)}, 0, 1)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CorruptCheckpointError):
        load(a_plan(1, here={0: path}), None, {"model.w": torch.zeros(9000)}, rank=0, world_size=1)


def test_a_slot_of_another_checkpoint_rank_or_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0"
    other = msgspec.structs.replace(CHECKPOINT, step=40)
    write_slot(path, {"model.w": torch.ones(4)}, 0, 2, checkpoint=other)
    for plan in (a_plan(2, here={0: path}), a_plan(2, here={1: path}, checkpoint=other)):
        with pytest.raises(CorruptCheckpointError, match="wanted is"):
            load(plan, None, {"model.w": torch.zeros(4)}, rank=0, world_size=2)


def test_a_slot_that_is_overwritten_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "0"
    write_slot(path, {"model.w": torch.ones(4)}, 0, 1)
    tiers = Tiers(a_plan(1, here={0: path}), None, "", rank=0, world_size=1)
    tiers.know_all()
    seal(path, header_of(path))  # a new header, as any writer makes one
    with pytest.raises(CorruptCheckpointError, match="overwritten"):
        tiers.confirm()


# --- hostile layouts -------------------------------------------------------------------------------------------------


def a_part(**changes: Any) -> TensorPart:
    plain = TensorPart(name="model.w", dtype="float32", shape=(4,), offsets=(0,), whole=(8,), start=0, nbytes=16)
    return msgspec.structs.replace(plain, **changes)


HUGE = 1 << 60
HOSTILE = {
    "parts that overlap in the file": (a_part(), a_part(offsets=(4,), start=0)),
    "boxes that overlap": (a_part(shape=(8,), nbytes=32), a_part(offsets=(4,), start=64)),
    "the same shard twice": (a_part(), a_part(start=64)),
    "negative offset": (a_part(offsets=(-4,)),),
    "negative shape": (a_part(shape=(-4,), nbytes=-16),),
    "negative start": (a_part(start=-64),),
    "not aligned": (a_part(start=4),),
    "beyond the file": (a_part(start=1 << 20),),
    "absurd size": (a_part(shape=(HUGE,), whole=(HUGE,), nbytes=4 * HUGE),),
    "absurd whole": (a_part(shape=(4, 1), offsets=(0, 0), whole=(HUGE, HUGE)),),
    "absurd count of dimensions": (a_part(shape=(1,) * 10_000, offsets=(0,) * 10_000, whole=(1,) * 10_000, nbytes=4),),
    "numbers without end": (a_part(start=1 << 200),),
    "bytes that do not fit the shape": (a_part(nbytes=12),),
    "outside of the whole": (a_part(offsets=(6,)),),
    "dimensions that differ": (a_part(offsets=(0, 0)),),
    "no dtype": (a_part(dtype="load"),),
    "a dtype that climbs": (a_part(dtype="serialization.load"),),
    "two dtypes": (a_part(), a_part(dtype="int32", offsets=(4,), start=64)),
    "two wholes": (a_part(), a_part(whole=(9,), offsets=(4,), start=64)),
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_layout_loads_nothing_and_allocates_nothing(tmp_path: Path, parts: tuple[TensorPart, ...]) -> None:
    lie = Layout(rank=0, world_size=1, parts=parts, data_bytes=192)  # type: ignore[arg-type]
    write_slot(tmp_path / "0", {f"{i}": torch.ones(4) for i in range(3)}, 0, 1, layout=lie)
    target = {"model.w": torch.zeros(8)}
    with pytest.raises(CorruptCheckpointError):
        load(a_plan(1, here={0: tmp_path / "0"}), None, target, rank=0, world_size=1, strict=False)
    assert not target["model.w"].any()


def test_a_sparse_file_that_claims_an_enormous_slot_is_not_read() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # ext4 has no files of that size
        check_enormous(Path(folder) / "0")


def check_enormous(path: Path) -> None:
    write_slot(path, {"model.w": torch.ones(4)}, 0, 1)
    header = msgspec.structs.replace(header_of(path), data_bytes=1 << 45)
    fd = os.open(path, os.O_RDWR)
    write_header(fd, header)
    os.close(fd)
    os.truncate(path, header.file_bytes)
    with pytest.raises(CorruptCheckpointError, match="larger than any"):
        load(a_plan(1, here={0: path}), None, {"model.w": torch.zeros(4)}, rank=0, world_size=1)
