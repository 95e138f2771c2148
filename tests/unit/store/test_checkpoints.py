"""Checkpoints in storage: committed whole or not at all, checked to the bit, and never trusted further than that."""

import os
import pickle
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest

from perdure.errors import ConfigError, CorruptCheckpointError, HostError
from perdure.store.address import open_medium
from perdure.store.checkpoints import begin, commit, list_stored, survey, verify
from perdure.store.reading import copy_out, open_committed, read_parts, read_tail
from perdure.trainer.checkpoint.drain import answer
from perdure.trainer.checkpoint.tail import decode_tail
from perdure.vocab.ids import JobId
from tests.unit.store.a_checkpoint import (
    a_stored,
    an_id,
    drain,
    files_of,
    flip,
    replicated,
    sharded,
)


@pytest.fixture(params=["disk", "memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An address: POSIX, an object store in memory, and a file system used as an object store."""
    if request.param == "memory":
        # pytorch 142396, s3-connector 295: odd names, no fileno
        address = f"memory://bucket-{uuid.uuid4().hex}/a b/ü=1,2"
        yield address
        fsspec.filesystem("memory").store.clear()
    else:
        yield str(tmp_path / "store") if request.param == "disk" else f"local://{tmp_path}/store"


def test_store_without_anything_in_it_has_no_checkpoints(store):
    assert list_stored(store) == ()


def test_committed_checkpoint_is_listed_and_verifies(tmp_path, store):
    slots, _ = sharded(tmp_path)
    stored = drain(store, slots)
    assert list_stored(store) == (stored,)
    assert (stored.checkpoint, stored.world_size, stored.path) == (slots.checkpoint, 4, "step-0000000010.1700000000-1")
    assert verify(store, stored.path) == ()
    assert [decode_tail(read_tail(store, stored.path, rank)).own for rank in range(4)] == [
        {"rank": r} for r in range(4)
    ]
    assert len(read_parts(store, stored.path)) == 4


def test_listing_is_newest_first_by_line_not_by_step(tmp_path, store):
    """Thread 21 (transformers 35580): the newest complete one, whatever the names say."""
    for step, generation in ((30, 1), (20, 2), (25, 2)):
        a_stored(tmp_path, store, step, generation=generation)
    assert [(s.checkpoint.generation, s.checkpoint.step) for s in list_stored(store)] == [(2, 25), (2, 20), (1, 30)]


def test_uncommitted_checkpoint_does_not_exist(tmp_path, store):
    """Thread 2 (KempnerForge 102): everything but the commit has been done."""
    slots, _ = sharded(tmp_path)
    name = begin(store, slots.checkpoint)
    assert answer(msgspec.json.encode(slots.request(store, name, finish=True))).error == ""
    assert list_stored(store) == ()
    assert [found.problem for found in survey(store)] == ["it was never finished, or is being written"]
    with pytest.raises(CorruptCheckpointError):
        open_committed(store, "step-0000000010.1700000000-1")


def test_commit_twice_gives_the_same_and_changes_nothing(tmp_path, store):
    slots, _ = sharded(tmp_path)
    stored = drain(store, slots)
    assert commit(store, begin(store, slots.checkpoint), JobId("exp"), slots.by_rank) == stored
    assert verify(store, stored.path) == ()


def test_commit_by_two_nodes_at_once_gives_one_checkpoint(tmp_path, store):
    """Automodel 3824: two at once."""
    slots, _ = sharded(tmp_path)
    name = begin(store, slots.checkpoint)
    assert answer(msgspec.json.encode(slots.request(store, name, finish=True))).error == ""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(commit(store, name, JobId("exp"), slots.by_rank))
        except (HostError, CorruptCheckpointError) as problem:
            results.append(problem)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (stored,) = list_stored(store)
    assert stored in results
    assert verify(store, stored.path) == ()


def test_commit_with_a_part_missing_says_whose_and_changes_nothing(tmp_path, store):
    slots, _ = sharded(tmp_path)
    name = begin(store, slots.checkpoint)
    assert answer(msgspec.json.encode(slots.request(store, name, 0, 1, 3))).error == ""
    assert "parts/00002.json" in answer(msgspec.json.encode(slots.request(store, name, 0, finish=True))).error
    with pytest.raises(CorruptCheckpointError, match=r"parts/00002\.json"):
        commit(store, name, JobId("exp"), slots.by_rank)
    assert list_stored(store) == ()
    assert answer(msgspec.json.encode(slots.request(store, name, 2, finish=True))).error == ""
    assert verify(store, commit(store, name, JobId("exp"), slots.by_rank).path) == ()


def test_commit_of_files_that_were_cut_since_is_refused(tmp_path):
    slots, _ = sharded(tmp_path)
    store = tmp_path / "store"
    name = begin(str(store), slots.checkpoint)
    answer(msgspec.json.encode(slots.request(store, name, finish=True)))
    os.truncate(store / name / "__1_0.distcp", 100)
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp: has 100 of"):
        commit(str(store), name, JobId("exp"), slots.by_rank)


def test_checkpoint_of_replicas_with_a_rank_lost_is_committed_from_the_others(tmp_path, store):
    slots, _ = replicated(tmp_path, 3)
    request = msgspec.structs.replace(
        slots.request(store, begin(store, slots.checkpoint), 0, 2, finish=True), ranks=(0, 2)
    )
    assert answer(msgspec.json.encode(request)).error == ""
    stored = commit(store, request.name, JobId("exp"), slots.by_rank, ranks=(0, 2))
    assert verify(store, stored.path) == ()
    assert open_committed(store, stored.path)[1].ranks == (0, 2)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_one_bit_flipped_in_each_file_in_turn_is_named_by_verify(tmp_path):
    """torchtitan 4011, Megatron-LM 5281."""
    stored = a_stored(tmp_path, tmp_path / "store")
    folder = tmp_path / "store" / stored.path
    files = [path for path in files_of(folder) if path.stat().st_size]
    assert len(files) == 9  # two of data, two tails, two parts, finish, .metadata, manifest
    for path in files:
        for at in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, at)
            findings = verify(str(tmp_path / "store"), stored.path)
            assert [finding.file for finding in findings] == [str(path.relative_to(folder))]
            flip(path, at)
    assert verify(str(tmp_path / "store"), stored.path) == ()


def test_bad_chunk_of_a_large_file_is_named_by_its_bytes(tmp_path):
    import torch

    from tests.unit.store.a_checkpoint import Slots, a_slot

    path, shards = a_slot(tmp_path, 0, 1, [("model.w", (0,), (3_000_000,), torch.arange(3_000_000.0))])
    stored = drain(tmp_path / "store", Slots(an_id(), {0: path}, (shards,)))
    flip(tmp_path / "store" / stored.path / "__0_0.distcp", 9_000_000)
    (finding,) = verify(str(tmp_path / "store"), stored.path)
    end = (tmp_path / "store" / stored.path / "__0_0.distcp").stat().st_size - 1
    assert str(finding) == f"__0_0.distcp, chunk 2 (bytes 8388608 to {end}): is not what was written"


@pytest.mark.parametrize("damage", ["truncate", "remove", "grow"])
def test_file_missing_or_of_another_size_is_never_listed(tmp_path, damage):
    """metaseq 53."""
    older = a_stored(tmp_path, tmp_path / "store", 5)
    stored = a_stored(tmp_path, tmp_path / "store", 10)
    folder = tmp_path / "store" / stored.path
    for path in files_of(folder):
        if path.name == "COMMIT":
            continue
        before = path.read_bytes()
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(before[:-1] if damage == "truncate" else before + b"x")
        assert list_stored(str(tmp_path / "store")) == (older,), path
        assert str(path.relative_to(folder)) in {
            finding.file for finding in verify(str(tmp_path / "store"), stored.path)
        }
        path.write_bytes(before)
    assert len(list_stored(str(tmp_path / "store"))) == 2


def test_object_store_without_its_commit_object_has_no_checkpoint(tmp_path):
    store = f"local://{tmp_path}/store"
    stored = a_stored(tmp_path, store)
    (tmp_path / "store" / stored.path / "COMMIT").unlink()
    assert list_stored(store) == ()
    assert [finding.file for finding in verify(store, stored.path)] == ["COMMIT"]


# --- copies ----------------------------------------------------------------------------------------------------------


def test_plain_copy_in_another_store_and_under_another_name_is_restorable(tmp_path):
    """Thread 34 (orbax 394): a plain copy is a checkpoint."""
    stored = a_stored(tmp_path, tmp_path / "store")
    subprocess.run(["cp", "-r", tmp_path / "store", tmp_path / "other"], check=True)
    subprocess.run(["cp", "-r", tmp_path / "store" / stored.path, tmp_path / "other" / "before the change"], check=True)
    there = list_stored(str(tmp_path / "other"))
    assert [one.path for one in there] == [stored.path, "before the change"]
    assert all(verify(str(tmp_path / "other"), one.path) == () for one in there)
    # and where nothing is renamed
    assert len(list_stored(f"local://{tmp_path}/other")) == 2


def test_checked_copy_is_a_checkpoint_of_its_own(tmp_path, store):
    stored = a_stored(tmp_path, store)
    copy_out(store, stored.path, str(tmp_path / "out" / "mine"))
    assert verify(str(tmp_path / "out"), "mine") == ()
    assert [one.checkpoint for one in list_stored(str(tmp_path / "out"))] == [stored.checkpoint]


def test_copy_of_a_damaged_checkpoint_leaves_nothing(tmp_path):
    stored = a_stored(tmp_path, tmp_path / "store")
    flip(tmp_path / "store" / stored.path / "__1_0.distcp")
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        copy_out(str(tmp_path / "store"), stored.path, str(tmp_path / "out" / "mine"))
    assert os.listdir(tmp_path / "out") == []


# --- hostile ---------------------------------------------------------------------------------------------------------


def test_links_out_of_the_store_are_not_followed(tmp_path):
    stored = a_stored(tmp_path, tmp_path / "store")
    folder = tmp_path / "store" / stored.path
    for name in ("tail-00000.msgpack", "manifest.json", "parts/00000.json"):
        kept = (folder / name).read_bytes()
        (tmp_path / "outside").write_bytes(kept)
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "outside")
        assert list_stored(str(tmp_path / "store")) == ()
        assert verify(str(tmp_path / "store"), stored.path) != ()
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    os.rename(folder, tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    assert list_stored(str(tmp_path / "store")) == ()


def test_pipe_in_the_place_of_a_file_holds_nobody(tmp_path):
    """orbax 392: no wait without an end."""
    stored = a_stored(tmp_path, tmp_path / "store")
    tail = tmp_path / "store" / stored.path / "tail-00001.msgpack"
    tail.unlink()
    os.mkfifo(tail)
    assert list_stored(str(tmp_path / "store")) == ()
    with pytest.raises(CorruptCheckpointError, match="tail-00001"):
        read_tail(str(tmp_path / "store"), stored.path, 1)


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_pickle_in_any_file_is_not_run(tmp_path):
    stored = a_stored(tmp_path, tmp_path / "store")
    folder, mark = tmp_path / "store" / stored.path, tmp_path / "bang"
    for path in files_of(folder):
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps(_Bomb(mark)))
        list_stored(str(tmp_path / "store"))
        verify(str(tmp_path / "store"), stored.path)
        path.write_bytes(kept)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../store", "..", "", "a/b", "/"])
def test_name_that_leaves_the_store_is_refused(tmp_path, name):
    a_stored(tmp_path, tmp_path / "store")
    with pytest.raises((ConfigError, CorruptCheckpointError)):
        verify(str(tmp_path / "store"), name)
    with pytest.raises((ConfigError, CorruptCheckpointError)):
        read_tail(str(tmp_path / "store"), name, 0)


# --- stores that refuse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "relative/folder", "nosuch://bucket/x", "a\0b"])
def test_address_that_is_no_store_is_a_configuration_error(address):
    with pytest.raises(ConfigError):
        begin(address, an_id())


def test_store_below_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"cannot write to the store .*/file/store: .*a file is in the way"):
        begin(str(tmp_path / "file" / "store"), an_id())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_is_a_reply_and_the_next_try_succeeds(tmp_path, small):
    """Thread 11 (Megatron-LM 1435): no space is no exception in training, and no half checkpoint."""
    slots, _ = sharded(tmp_path)
    name = begin(str(small), slots.checkpoint)
    reply = answer(msgspec.json.encode(slots.request(small, name, finish=True)))
    assert reply.error.endswith("no space left on device; free some space on it")
    assert list_stored(str(small)) == ()
    subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
    assert answer(msgspec.json.encode(slots.request(small, name, finish=True))).error == ""
    assert verify(str(small), commit(str(small), name, JobId("exp"), slots.by_rank).path) == ()


def test_read_only_store_is_refused_in_one_sentence_and_still_read(tmp_path, small):
    subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
    stored = a_stored(tmp_path, small)
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(HostError, match="read-only"):
        begin(str(small), an_id(11))
    assert list_stored(str(small)) == (stored,)
    assert verify(str(small), stored.path) == ()


def test_store_whose_library_raises_its_own_errors_says_one_sentence(tmp_path):
    """Thread 11 (Megatron-LM 1435): 403s and time-outs are one sentence each."""

    class Refusing(fsspec.AbstractFileSystem):
        protocol = "refusing"

        def ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
            raise RuntimeError("403: the token\nhas expired")

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            raise TimeoutError

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(HostError, match=r"cannot list the store refusing://b: 403: the token has expired"):
        list_stored("refusing://b")
    with pytest.raises(HostError, match="did not answer in time"):
        begin("refusing://b", an_id())


def test_room_that_is_left_is_known_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert open_medium(str(tmp_path / "not" / "yet")).free() > 0  # type: ignore[operator]
    shutil.rmtree(tmp_path, ignore_errors=True)
