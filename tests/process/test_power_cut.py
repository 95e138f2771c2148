"""The power goes at any moment of a drain, a commit and the deletes after it: a good checkpoint is left."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perdure.store.checkpoints import list_stored, verify
from perdure.store.retention import retain
from perdure.vocab.ids import JobId
from tests.process.power_cut import Did, Tree, cuts, laid_out, noted, tree_of
from tests.unit.store.a_checkpoint import Slots, a_slot, an_id, drain

EXP = JobId("exp")


def small(folder: Path, step: int) -> Slots:
    """Two ranks with little, so that every cut can be looked at."""
    folder.mkdir()
    made = []
    for rank in (0, 1):
        rows = torch.full((3, 2), float(step + rank))
        made.append(a_slot(folder, rank, 2, [("model.w", (3 * rank, 0), (6, 2), rows)], checkpoint=an_id(step)))
    return Slots(an_id(step), {0: made[0][0], 1: made[1][0]}, (made[0][1], made[1][1]))


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tree, list[Did]]:
    """What was there, and all that a drain, its commit and the retention do to it."""
    store = tmp_path / "store"
    drain(store, small(tmp_path / "1", 1))
    slots = small(tmp_path / "2", 2)
    before = tree_of(store)
    with noted(store, monkeypatch) as did:
        drain(store, slots)
        did.append(Did("say", "committed"))
        retain(str(store), 1, EXP)
    return before, did


def failures(before: Tree, did: list[Did], folder: Path) -> Iterator[str]:
    """What is wrong with what is left, after any cut."""
    said = next(number for number, one in enumerate(did, 1) if one.what == "say")
    looked = 0
    for done, tree in cuts(before, did):
        store = laid_out(tree, folder / "left")
        listed = list_stored(str(store))
        steps = [stored.checkpoint.step for stored in listed]
        bad = [stored.path for stored in listed if verify(str(store), stored.path)]
        if bad or not steps or (done >= said and 2 not in steps):
            yield f"after {done} of {len(did)}: {steps}, bad {bad}, in {sorted(tree)}"
        shutil.rmtree(store)
        looked += 1
    assert looked > 200


def test_power_cut_anywhere_leaves_a_restorable_checkpoint(story: tuple[Tree, list[Did]], tmp_path: Path) -> None:
    """Thread 37 (nvidia-resiliency-ext 359, 364): what was not synced may be lost, and what was committed may not."""
    assert list(failures(*story, tmp_path)) == []


@pytest.mark.parametrize("left_out", ["file", "folder"])
def test_program_that_does_not_sync_is_caught(story: tuple[Tree, list[Did]], left_out: str, tmp_path: Path) -> None:
    before, did = story
    lazy = [one for one in did if one.what != f"sync {left_out}"]
    assert len(lazy) < len(did)
    assert next(failures(before, lazy, tmp_path))
