"""DCP's save into a slot and its load out of it, by DCP's own names."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from perdure.errors import ConfigError
from perdure.trainer.checkpoint.reader import TierReader
from perdure.trainer.checkpoint.state import State
from perdure.trainer.checkpoint.tiers import Tiers
from perdure.trainer.checkpoint.writer import TierWriter
from tests.unit.trainer.tier_slots import a_plan, same, write_slot


class OneSlot:
    """A checkpoint without a memory server: what is saved is sealed at once, in the one file."""

    def __init__(self, path: Path, objects: dict[str, Any], is_free: bool) -> None:
        self.path = path
        self.steps: list[int] = []
        self._state = State(objects)
        self._is_free = is_free

    def save(self, step: int) -> bool:
        self.steps.append(step)
        if self._is_free:
            self.path.unlink(missing_ok=True)
            gathered = self._state.gather()
            write_slot(self.path, gathered.tensors, 0, 1, shared=gathered.shared, own=gathered.own)
        return self._is_free

    def tiers(self, step: int | None = None) -> tuple[int, Tiers | None]:
        if not self.path.exists():
            return 0, None
        there = Tiers(a_plan(1, here={0: self.path}), None, "", rank=0, world_size=1)
        assert step in (None, there.checkpoint.step)
        return there.checkpoint.step + 1, there

    def close(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def undistributed() -> Iterator[None]:
    """DCP warns that there is no process group; there need not be one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def a_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": seed}


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=str) for leaf in flat(state[key])]
    return [state]


def test_what_dcp_saves_dcp_loads_again(tmp_path: Path) -> None:
    writer = TierWriter(opener=lambda **objects: OneSlot(tmp_path / "0", objects, True))
    for seed in (1, 2):
        dcp.save(a_state(seed), checkpoint_id=f"run/step-{seed}", storage_writer=writer)
        assert writer.saved
    assert writer.checkpoint is not None
    assert writer.checkpoint.steps == [1, 2]  # type: ignore[attr-defined]
    found = a_state(3)
    dcp.load(
        found, storage_reader=TierReader(Tiers(a_plan(1, here={0: tmp_path / "0"}), None, "", rank=0, world_size=1))
    )
    for one, other in zip(flat(found), flat(a_state(2)), strict=True):
        assert same(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_reader_made_of_the_writer_finds_the_newest_and_the_step_that_is_named(tmp_path: Path) -> None:
    writer = TierWriter(a_state(1), opener=lambda **objects: OneSlot(tmp_path / "0", objects, True))
    reader = TierReader(writer)
    assert reader.start() == 0
    with pytest.raises(CheckpointException, match="there is no checkpoint to load"):
        dcp.load(a_state(3), storage_reader=reader)
    dcp.save(a_state(2), checkpoint_id="step-41", storage_writer=writer)
    for how in ({}, {"checkpoint_id": "run/step-41"}):
        found = a_state(3)
        dcp.load(found, storage_reader=reader, **how)
        assert found["step"] == 2
        assert same(found["model"]["weight"], a_state(2)["model"]["weight"])
    assert reader.start() == 42


def test_a_reader_of_a_writer_without_a_state_says_what_to_give(tmp_path: Path) -> None:
    writer = TierWriter(opener=lambda **objects: OneSlot(tmp_path / "0", objects, True))
    with pytest.raises(ConfigError, match=r"TierWriter\(state, store=…\)"):
        TierReader(writer).start()


def test_async_save_keeps_the_values_of_the_call(tmp_path: Path) -> None:
    writer = TierWriter(opener=lambda **objects: OneSlot(tmp_path / "0", objects, True))
    state = a_state(1)
    response = dcp.async_save(state, checkpoint_id="1", storage_writer=writer)
    for tensor in state["model"].values():
        tensor.fill_(9)
    response.result(timeout=60)
    found = a_state(3)
    dcp.load(found, storage_reader=TierReader(writer))
    assert same(found["model"]["weight"], a_state(1)["model"]["weight"])


def test_a_save_without_a_free_slot_is_skipped_and_told(tmp_path: Path) -> None:
    writer = TierWriter(opener=lambda **objects: OneSlot(tmp_path / "0", objects, False))
    dcp.save(a_state(1), checkpoint_id="7", storage_writer=writer)
    assert not writer.saved


def test_a_save_without_a_step_is_refused(tmp_path: Path) -> None:
    writer = TierWriter(opener=lambda **objects: OneSlot(tmp_path / "0", objects, True))
    with pytest.raises(ConfigError, match="names no step"):
        dcp.save(a_state(1), checkpoint_id="latest", storage_writer=writer)


def test_options_reach_the_checkpoint_that_is_opened(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def opener(store: str, **objects: Any) -> OneSlot:
        seen.update(store=store, names=sorted(objects))
        return OneSlot(tmp_path / "0", objects, True)

    dcp.save(a_state(1), checkpoint_id="1", storage_writer=TierWriter(opener=opener, store="/scratch"))
    assert seen == {"store": "/scratch", "names": ["model", "optimizer", "step"]}
