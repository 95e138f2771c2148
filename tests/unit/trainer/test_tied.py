"""Tensors that are one and the same under several names: kept once, found by each name, by torch alone too."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.copy import Copiers
from perdure.trainer.checkpoint.export import load_whole
from perdure.trainer.checkpoint.reader import TierReader
from perdure.trainer.checkpoint.restore import Restored, World, fill
from perdure.trainer.checkpoint.state import State
from perdure.trainer.checkpoint.tiers import Tiers
from perdure.vocab.checkpoint import Stored
from tests.unit.store.a_checkpoint import Slots, drain
from tests.unit.trainer.tier_slots import CHECKPOINT, CopyingLender, a_plan, header_of, write_slot


@pytest.fixture(autouse=True)
def undistributed() -> Iterator[None]:
    """DCP warns that there is no process group; there need not be one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(torch.nn.Module):
    """A language model in small: what it reads and what it writes may be the same matrix."""

    def __init__(self, seed: int, *, is_tied: bool, head_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in ("head", "embed") if head_first else ("embed", "head"):
            setattr(self, name, torch.nn.Linear(6, 11, bias=False))
        self.norm = torch.nn.LayerNorm(6)
        if is_tied:
            self.head.weight = self.embed.weight


def saved(path: Path, model: torch.nn.Module, **objects: Any) -> Path:
    gathered = State({"model": model, **objects}).gather()
    write_slot(path, gathered.tensors, 0, 1, shared=gathered.shared, own=gathered.own)
    return path


def drained(tmp: Path, slot: Path) -> Stored:
    return drain(tmp / "store", Slots(CHECKPOINT, {0: str(slot)}, (header_of(slot).shards,)))


def restored(slot: Path, model: torch.nn.Module, **objects: Any) -> Restored:
    state = State({"model": model, **objects})
    plan = a_plan(1, here={0: slot})
    return fill(state, plan, CopyingLender(slot.parent, {}), World(0, 1, ""), Copiers(1))


PLAIN = """
import sys, torch, torch.distributed.checkpoint as dcp
model = {name: torch.zeros(11, 6) for name in ("embed.weight", "head.weight")}
dcp.load({"model": model}, checkpoint_id=sys.argv[1])
assert torch.equal(model["embed.weight"], model["head.weight"]), model
assert torch.equal(model["head.weight"], torch.load(sys.argv[2])), model
assert not [name for name in sys.modules if name.startswith("perdure")]
"""


def test_torch_alone_finds_a_tied_tensor_under_each_of_its_names(tmp_path: Path) -> None:
    model = Net(1, is_tied=True)
    stored = drained(tmp_path, saved(tmp_path / "0", model))
    torch.save(model.head.weight.detach().clone(), tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path / "store" / stored.path), str(tmp_path / "expected.pt")],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    part = msgspec.json.decode((tmp_path / "store" / stored.path / "parts" / "00000.json").read_bytes())
    assert [piece["name"] for piece in part["tensors"]].count("model.head.weight") == 0, "it is stored once"


def test_export_gives_one_tensor_under_both_names(tmp_path: Path) -> None:
    stored = drained(tmp_path, saved(tmp_path / "0", Net(1, is_tied=True)))
    model = load_whole(str(tmp_path / "store"), stored.path)["model"]
    assert model["head.weight"] is model["embed.weight"]


def test_tied_checkpoint_fills_an_untied_model(tmp_path: Path) -> None:
    model = Net(1, is_tied=True)
    other = Net(2, is_tied=False)
    found = restored(saved(tmp_path / "0", model), other)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight.data_ptr() != other.embed.weight.data_ptr()
    assert (found.missing, found.extra) == ((), ())


def test_model_that_ties_under_another_first_name_is_filled(tmp_path: Path) -> None:
    model, other = Net(1, is_tied=True), Net(2, is_tied=True, head_first=True)
    found = restored(saved(tmp_path / "0", model), other)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert (found.missing, found.extra) == ((), ())


def test_untied_checkpoint_is_not_forced_into_a_tied_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only in the checkpoint: model\.head\.weight"):
        restored(saved(tmp_path / "0", Net(1, is_tied=False)), Net(2, is_tied=True))


def test_dcp_load_with_the_tier_reader_finds_both_names(tmp_path: Path) -> None:
    model = Net(1, is_tied=True)
    tiers = Tiers(a_plan(1, here={0: saved(tmp_path / "0", model)}), None, "", rank=0, world_size=1)
    state = {"model": Net(2, is_tied=False).state_dict()}
    dcp.load(state, storage_reader=TierReader(tiers))
    assert all(torch.equal(state["model"][name], model.embed.weight) for name in ("embed.weight", "head.weight"))


class Table:
    """An object of the user's that keeps one tensor twice."""

    def __init__(self, value: float) -> None:
        self.rows = torch.full((5,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "best": self.rows, "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["best"], state["rows"])
        self.rows = state["rows"]


def test_object_that_keeps_one_tensor_twice_comes_back(tmp_path: Path) -> None:
    table = Table(0.0)
    restored(saved(tmp_path / "0", Net(1, is_tied=True), table=Table(7.0)), Net(2, is_tied=True), table=table)
    assert table.rows.tolist() == [7.0] * 5


@pytest.mark.parametrize("name", ["tied", "objects"])
def test_name_that_checkpoints_use_themselves_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=…"):
        State({name: Table(1.0)})
