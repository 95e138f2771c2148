"""Reading what was drained into storage: alone, and where a node's memory turns out to be bad."""

import math
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from perdure.errors import ConfigError, CorruptCheckpointError
from perdure.trainer.checkpoint.reader import Loaded, load
from perdure.vocab.checkpoint import Stored
from perdure.wire.memory import RestorePlan
from tests.unit.store.a_checkpoint import SHARED, Slots, drain, files_of, flip, replicated, sharded
from tests.unit.trainer.tier_slots import a_plan, same


class Drained(msgspec.Struct, frozen=True):
    """Four ranks' slots and the same checkpoint in storage."""

    store: Path
    slots: Slots
    stored: Stored
    truth: dict[str, torch.Tensor]

    def plan(self, here: tuple[int, ...] = ()) -> RestorePlan:
        paths = {rank: Path(self.slots.paths[rank]) for rank in here}
        return a_plan(len(self.slots.paths), here=paths, stored=self.stored, checkpoint=self.slots.checkpoint)

    def load(self, here: tuple[int, ...] = (), *, store: str | None = None) -> tuple[Loaded, dict[str, torch.Tensor]]:
        """All of it, by the one rank of a new world."""
        targets = {name: torch.full_like(tensor, 1) for name, tensor in self.truth.items()}
        store = str(self.store) if store is None else store
        return load(self.plan(here), None, targets, rank=0, world_size=1, store=store, values=set(SHARED)), targets

    def differing(self, found: dict[str, torch.Tensor]) -> list[str]:
        return [name for name in self.truth if not same(found[name], self.truth[name])]


@pytest.fixture
def drained(tmp_path: Path) -> Drained:
    slots, truth = sharded(tmp_path)
    store = tmp_path / "store"
    return Drained(store, slots, drain(store, slots), truth)


def test_storage_alone_gives_every_tensor_and_value_bitwise(drained: Drained) -> None:
    loaded, found = drained.load()
    assert drained.differing(found) == []
    assert loaded.shared == SHARED
    assert sorted(loaded.owns) == [0, 1, 2, 3]
    assert set(loaded.sources) == {"storage"}


def test_a_store_of_fsspec_gives_the_same(tmp_path: Path) -> None:
    """Thread 36 (pytorch 142396, s3-connector 295): no file numbers, odd names."""
    slots, truth = sharded(tmp_path)
    store = "memory://odd name's bucket/exp=17"
    drained = Drained(tmp_path, slots, drain(store, slots), truth)
    _, found = drained.load(store=store)
    assert drained.differing(found) == []


def test_ranks_that_no_memory_has_are_read_from_storage(drained: Drained) -> None:
    loaded, found = drained.load(here=(0, 2))
    assert drained.differing(found) == []
    assert loaded.sources["own memory"] > 0
    assert loaded.sources["storage"] > 0


def test_one_flipped_bit_in_each_slot_in_turn_is_read_from_storage(drained: Drained) -> None:
    """Thread 38 (torchtitan 4011) and Thread 1 (Megatron-LM 5281): storage is the next source."""
    for path in map(Path, drained.slots.paths.values()):
        flip(path, 8192 + 64)
        loaded, found = drained.load(here=(0, 1, 2, 3))
        assert drained.differing(found) == []
        assert loaded.sources["storage"] > 0
        flip(path, 8192 + 64)
    assert set(drained.load(here=(0, 1, 2, 3))[0].sources) == {"own memory"}


def test_one_flipped_bit_in_each_stored_file_in_turn_is_refused_where_it_is_read(drained: Drained) -> None:
    """Thread 38 (torchtitan 4011): in every file."""
    refused: dict[str, str] = {}
    for path in files_of(drained.store):
        if not path.stat().st_size:
            continue  # COMMIT
        flip(path)
        try:
            loaded, found = drained.load()
        except CorruptCheckpointError as exc:
            refused[path.name] = str(exc)
        else:  # it was not needed, or is another rank's tail; what is needed was right
            assert drained.differing(found) == []
            assert loaded.shared == SHARED
        flip(path)
    assert all(name in said for name, said in refused.items())
    assert {f"__{rank}_0.distcp" for rank in range(4)} <= set(refused)
    assert {f"{rank:05d}.json" for rank in range(4)} <= set(refused)
    assert "manifest.json" in refused


def test_a_stored_file_that_is_cut_short_or_gone_is_refused(drained: Drained) -> None:
    for path in drained.store.rglob("*.distcp"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptCheckpointError, match=path.name):
            drained.load()
        path.unlink()
        with pytest.raises(CorruptCheckpointError, match=path.name):
            drained.load()
        path.write_bytes(whole)


def test_a_plain_copy_of_a_good_checkpoint_is_restorable(drained: Drained) -> None:
    """Thread 34 (orbax 394): cp -r of a good checkpoint."""
    shutil.copytree(drained.store / drained.stored.path, drained.store / "kept by hand")
    copy = Drained(
        drained.store, drained.slots, msgspec.structs.replace(drained.stored, path="kept by hand"), drained.truth
    )
    shutil.rmtree(drained.store / drained.stored.path)
    assert copy.differing(copy.load()[1]) == []


def test_a_path_that_climbs_out_of_the_store_is_refused(drained: Drained) -> None:
    climbing = msgspec.structs.replace(drained.stored, path=f"../store/{drained.stored.path}")
    with pytest.raises(CorruptCheckpointError, match="no name of a checkpoint"):
        Drained(drained.store, drained.slots, climbing, drained.truth).load()


def test_another_checkpoint_in_the_folder_is_not_mixed_in(drained: Drained, tmp_path: Path) -> None:
    later = msgspec.structs.replace(drained.slots.checkpoint, step=11)
    (tmp_path / "later").mkdir()
    slots, _ = sharded(tmp_path / "later", checkpoint=later, seed=1)
    other = drain(drained.store, slots)
    shutil.rmtree(drained.store / drained.stored.path)
    (drained.store / other.path).rename(drained.store / drained.stored.path)
    with pytest.raises(CorruptCheckpointError, match="holds step 11"):
        drained.load()


def test_a_pickle_in_the_place_of_the_metadata_is_never_opened(drained: Drained) -> None:
    (drained.store / drained.stored.path / ".metadata").write_bytes(
        b"cos\nsystem\n(S'touch /tmp/perdure-was-here'\ntR."
    )
    assert drained.differing(drained.load()[1]) == []
    assert not Path("/tmp/perdure-was-here").exists()


def test_replicas_share_a_stored_checkpoint_and_any_world_reads_it(tmp_path: Path) -> None:
    slots, truth = replicated(tmp_path)
    drained = Drained(tmp_path / "store", slots, drain(tmp_path / "store", slots), truth)
    loaded, found = drained.load()
    assert drained.differing(found) == []
    assert loaded.nbytes == sum(math.prod(t.shape) * t.element_size() for t in truth.values())


def test_a_part_of_the_model_is_read_alone_unless_strict(drained: Drained) -> None:
    targets = {"model.norm": torch.zeros_like(drained.truth["model.norm"])}
    with pytest.raises(ConfigError, match=r"only in the checkpoint: model\.embed"):
        load(drained.plan(), None, targets, rank=0, world_size=1, store=str(drained.store))
    loaded = load(drained.plan(), None, targets, rank=0, world_size=1, store=str(drained.store), strict=False)
    assert "model.mask" in loaded.extra
    assert loaded.sources == {"storage": targets["model.norm"].nbytes}
    assert same(targets["model.norm"], drained.truth["model.norm"])
