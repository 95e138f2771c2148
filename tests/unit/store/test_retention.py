"""What may go from a store, and what never does."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from perdure.errors import ConfigError
from perdure.store.checkpoints import begin, list_stored, survey, verify
from perdure.store.retention import AT_ONCE, clean, drop, retain
from perdure.vocab.ids import JobId
from tests.unit.store.a_checkpoint import a_stored, an_id, flip

EXP = JobId("exp")


def names(store: object) -> list[str]:
    return [found.name for found in survey(str(store))]


def steps(store: object) -> list[int]:
    return [stored.checkpoint.step for stored in list_stored(str(store))]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Steps 1 to 4 of one job."""
    for step in (1, 2, 3, 4):
        a_stored(tmp_path, tmp_path / "store", step)
    return tmp_path / "store"


def test_retention_keeps_the_newest_and_never_none(store):
    assert len(retain(str(store), 2, EXP)) == 2
    assert steps(store) == [4, 3]
    retain(str(store), 0, EXP)
    assert steps(store) == [4]
    assert not [name for name in os.listdir(store) if name.startswith(".")]


def test_retention_with_a_lowered_number_deletes_a_few_at_a_time_the_oldest_first(tmp_path, store):
    a_stored(tmp_path, store, 5)
    assert len(retain(str(store), 1, EXP)) == AT_ONCE == 3
    assert steps(store) == [5, 4]
    assert len(retain(str(store), 1, EXP)) == 1
    assert steps(store) == [5]


def test_retention_in_an_object_store_deletes_objects(tmp_path, store):
    retain(f"local://{store}", 1, EXP)
    assert steps(f"local://{store}") == [4]
    assert sorted(os.listdir(store)) == ["step-0000000004.1700000000-1"]


def test_retention_spares_other_jobs_copies_and_what_is_in_flight(tmp_path, store):
    """Thread 22 (SimpleTuner 2989, unsloth-zoo 782): by run, in the order of commits. Thread 34 (orbax 394)."""
    other = a_stored(tmp_path, store, 1, job="other", generation=2)
    subprocess.run(["cp", "-r", store / "step-0000000001.1700000000-1", store / "the good one"], check=True)
    (store / "notes").mkdir()
    retain(str(store), 1, EXP, [an_id(2)])
    assert names(store) == [
        other.path,
        "step-0000000004.1700000000-1",
        "step-0000000002.1700000000-1",
        "the good one",
    ]
    assert (store / "notes").is_dir()


def test_damaged_newest_does_not_count_as_kept(store):
    """Thread 21 (transformers 35580): the newest *complete* one is never deleted."""
    os.truncate(store / "step-0000000004.1700000000-1" / "__0_0.distcp", 10)
    retain(str(store), 1, EXP)
    assert steps(store) == [3]


def test_two_deleters_at_once_disturb_nobody(store):
    """Thread 23 (transformers 20988): concurrent deletes."""
    done: list[tuple[str, ...]] = []

    def run() -> None:
        done.append(retain(str(store), 1, EXP))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    assert steps(store) == [4]
    assert verify(str(store), "step-0000000004.1700000000-1") == ()


def test_abandoned_folder_is_removed_after_a_grace_time_and_the_current_one_never(store):
    """Thread 24 (torchtitan 4197): what a dead run has left goes, the current one never."""
    abandoned, current = begin(str(store), an_id(5)), begin(str(store), an_id(6))
    for name in (abandoned, current):
        (store / name / "__0_0.distcp").write_bytes(b"half")
    then = (store / abandoned / "__0_0.distcp").stat().st_mtime
    assert clean(str(store), [an_id(6)], grace=60, now=then + 30) == ()
    assert clean(str(store), [an_id(6)], grace=60, now=then + 90) == (abandoned,)
    assert current in os.listdir(store)
    assert steps(store) == [4, 3, 2, 1]


def test_empty_abandoned_folder_and_trash_are_removed(store):
    begin(str(store), an_id(5))
    shutil.copytree(store / "step-0000000001.1700000000-1", store / ".trash-step-0000000009.1700000000-1.aabb")
    (store / ".trash-mine").mkdir()
    assert len(clean(str(store), grace=0, now=4e9)) == 2
    assert sorted(name for name in os.listdir(store) if "tmp" in name or "trash" in name) == [".trash-mine"]


def test_unfinished_prefix_of_an_object_store_is_removed_after_a_grace_time(store):
    address = f"local://{store}"
    name = begin(address, an_id(5))
    (store / name / "__0_0.distcp").write_bytes(b"half")
    then = (store / name / "__0_0.distcp").stat().st_mtime
    assert clean(address, grace=60, now=then + 30) == ()
    assert clean(address, grace=60, now=then + 90) == (name,)
    assert steps(address) == [4, 3, 2, 1]


def test_last_good_checkpoint_is_dropped_only_by_force(store):
    retain(str(store), 1, EXP)
    (name,) = names(store)
    with pytest.raises(ConfigError, match="last good checkpoint of job exp"):
        drop(str(store), name)
    drop(str(store), name, force=True)
    assert names(store) == []


def test_damaged_checkpoint_and_unknown_name_are_told_apart(store):
    flip(store / "step-0000000004.1700000000-1" / "manifest.json")
    drop(str(store), "step-0000000004.1700000000-1")
    assert steps(store) == [3, 2, 1]
    for name in ("step-0000000004.1700000000-1", "../store", ".."):
        with pytest.raises(ConfigError, match="there is no checkpoint"):
            drop(str(store), name)
