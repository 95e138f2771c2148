"""Checkpoints of a stranger, with right checksums: nothing is run, and nothing larger than the files is made."""

import io
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from perdure.errors import CorruptCheckpointError
from perdure.store.checkpoints import list_stored, record_of, verify
from perdure.store.manifest import FINISHED, MANIFEST, Finished, Manifest, Part, part_name, seal, unseal
from perdure.store.reading import copy_out
from perdure.trainer.checkpoint.export import load_whole
from perdure.trainer.checkpoint.reader import load
from perdure.vocab.checkpoint import Stored
from tests.process.jobs import perdure
from tests.unit.store.a_checkpoint import Slots, a_slot, an_id, drain
from tests.unit.trainer.tier_slots import a_plan

DATA = "__0_0.distcp"


class Loud:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self._mark), "w")


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """One tensor `model.w` of 4 x 4."""
    path, shards = a_slot(tmp_path, 0, 1, [("model.w", (0, 0), (4, 4), torch.arange(16.0).reshape(4, 4))])
    return drain(tmp_path / "store", Slots(an_id(), {0: path}, (shards,)))


def forged(store: Path, stored: Stored, data: bytes, **piece: Any) -> None:
    """Other bytes in the place of the data, and every checksum right."""
    folder = store / stored.path
    part = unseal((folder / part_name(0)).read_bytes(), Part, "")
    manifest = unseal((folder / MANIFEST).read_bytes(), Manifest, "")
    record = record_of(DATA, data)
    others = tuple(each for each in part.files if each.name != DATA)
    tensors = tuple(
        msgspec.structs.replace(each, start=0, nbytes=len(data), **piece)
        for each in part.tensors  # all in one file
    )
    text = seal(msgspec.structs.replace(part, files=(record, *others), tensors=tensors, values=()))
    (folder / DATA).write_bytes(data)
    (folder / part_name(0)).write_bytes(text)
    done = unseal((folder / FINISHED).read_bytes(), Finished, "")
    kept = tuple(each for each in manifest.files if each.name not in (DATA, part_name(0)))
    files = tuple(sorted((record, record_of(part_name(0), text), *kept), key=lambda each: each.name))
    (folder / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, files=files)))
    assert done.checkpoint == manifest.checkpoint


def archive(data: bytes, program: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with this pickle in it."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as packed:
        packed.writestr("archive/data.pkl", program)
        packed.writestr("archive/byteorder", b"little")
        packed.writestr("archive/data/0", data)
        packed.writestr("archive/version", b"3\n")
    return written.getvalue()


def honest(tensor: torch.Tensor) -> bytes:
    written = io.BytesIO()
    torch.save(tensor, written)
    return written.getvalue()


def bomb() -> bytes:
    """Some kilobytes that would be gigabytes: torch's own reader unpacks them."""
    with zipfile.ZipFile(io.BytesIO(honest(torch.zeros(4, 4)))) as packed:
        program = packed.read(next(name for name in packed.namelist() if name.endswith("data.pkl")))
    return archive(bytes(200 << 20), program, zipfile.ZIP_DEFLATED)


def refused(store: Path, stored: Stored) -> None:
    """By every way in."""
    with pytest.raises(CorruptCheckpointError):
        load_whole(str(store), stored.path)
    plan = a_plan(1, stored=stored, checkpoint=stored.checkpoint)
    target = torch.full((4, 4), -1.0)
    with pytest.raises(CorruptCheckpointError):
        load(plan, None, {"model.w": target}, rank=0, world_size=1, store=str(store), values=())
    assert target.unique().tolist() == [-1.0], "nothing was loaded"


def test_honest_bytes_with_forged_checksums_are_loaded(tmp_path: Path, stored: Stored) -> None:
    """So that what is refused below is refused for what it is."""
    forged(tmp_path / "store", stored, honest(torch.full((4, 4), 5.0)))
    assert load_whole(str(tmp_path / "store"), stored.path)["model"]["w"].unique().tolist() == [5.0]


def test_pickle_in_the_place_of_a_tensor_runs_nothing(tmp_path: Path, stored: Stored) -> None:
    mark = tmp_path / "it ran"
    for data in (pickle.dumps(Loud(mark)), archive(b"", pickle.dumps(Loud(mark), protocol=2)), honest_with(mark)):
        forged(tmp_path / "store", stored, data)
        refused(tmp_path / "store", stored)
        verify(str(tmp_path / "store"), stored.path)
        list_stored(str(tmp_path / "store"))
        copy_out(str(tmp_path / "store"), stored.path, str(tmp_path / f"copy-{len(data)}"))
    assert not mark.exists()


def honest_with(mark: Path) -> bytes:
    written = io.BytesIO()
    torch.save({"w": Loud(mark)}, written)
    return written.getvalue()


def test_packed_bytes_that_unfold_to_much_more_are_refused(tmp_path: Path, stored: Stored) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = bomb()
    assert len(data) < 1 << 20
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forged(tmp_path / "store", stored, data)
    refused(tmp_path / "store", stored)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(made, before) < 50 << 10  # KiB


@pytest.mark.parametrize(
    "piece",
    [
        {"whole": (1 << 40, 4), "shape": (1 << 40, 4)},
        {"whole": (1 << 62, 1 << 62), "shape": (4, 4)},
        {"dtype": "os"},
        {"dtype": "nn"},
        {"whole": (4, 4), "shape": (4, 4), "offsets": (0, 1)},
    ],
    ids=["terabytes", "overflow", "module", "torch's module", "outside"],
)
def test_absurd_piece_is_refused_before_room_is_made_for_it(
    tmp_path: Path, stored: Stored, piece: dict[str, Any]
) -> None:
    forged(tmp_path / "store", stored, honest(torch.zeros(4, 4)), **piece)
    refused(tmp_path / "store", stored)


def test_one_piece_of_a_file_cannot_stand_for_a_thousand_tensors(tmp_path: Path, stored: Stored) -> None:
    folder = tmp_path / "store" / stored.path
    part = unseal((folder / part_name(0)).read_bytes(), Part, "")
    (piece,) = part.tensors
    many = tuple(msgspec.structs.replace(piece, name=f"w{number}") for number in range(1000))
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        unseal(seal(msgspec.structs.replace(part, tensors=many)), Part, "it")


def test_command_line_refuses_a_hostile_checkpoint_in_one_sentence(tmp_path: Path, stored: Stored) -> None:
    mark = tmp_path / "it ran"
    store = str(tmp_path / "store")
    forged(tmp_path / "store", stored, honest_with(mark))
    (tmp_path / "store" / "link").symlink_to("/etc")
    for words in (["ls", store], ["verify", store], ["export", store, str(tmp_path / "out.pt")]):
        done = perdure(tmp_path, "checkpoint", *words)
        assert "Traceback" not in done.stderr
        assert "/etc" not in done.stdout
        assert done.returncode == (1 if words[0] == "export" else 0), (words, done.stdout, done.stderr)
    assert not (tmp_path / "out.pt").exists()
    assert not mark.exists()
