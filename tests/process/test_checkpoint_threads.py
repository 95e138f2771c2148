"""What users of other tools have run into, tried on a real trainer's side and a real memory server, in one process."""

import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from perdure.errors import CorruptCheckpointError  # noqa: E402
from perdure.store.checkpoints import verify  # noqa: E402
from perdure.trainer.checkpoint.seat import Place  # noqa: E402
from perdure.trainer.checkpoint.slowness import PROBE  # noqa: E402
from perdure.trainer.checkpoint.sources import SealedSlot  # noqa: E402
from perdure.trainer.checkpoint.tier import Checkpoint  # noqa: E402
from perdure.trainer.heartbeat import Heartbeat  # noqa: E402
from perdure.vocab.checkpoint import Chosen, Shards  # noqa: E402
from perdure.vocab.ids import GenerationNumber, NodeId  # noqa: E402
from perdure.wire.memory import DrainOrder, Policy  # noqa: E402
from tests.process.memory_rig import (  # noqa: E402
    JOB,
    WITHIN,
    Control,
    Trainer,
    a_server,
    attached,
    checkpoint,
    wait_until,
)


@pytest.fixture
def control() -> Iterator[Control]:
    with Control() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/perdure-test-{os.getpid()}")
    yield path
    Trainer.free_all()
    subprocess.run(["rm", "-rf", path], check=True)


class State:
    """Tensors by name, as an object that a script may give."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def opened(folder: Path, state: Any, generation: int = 1) -> Checkpoint:
    place = Place(
        job=JOB,
        attempt=1,
        generation=generation,
        rank=0,
        world_size=1,
        local_world_size=1,
        socket=str(folder / "door"),
    )
    return Checkpoint({"state": state}, place, Heartbeat(), policy=Policy(every=1))


def saved(control: Control, kept: Checkpoint, step: int) -> None:
    """It is sealed and committed, and its successor has a slot."""
    wait_until(lambda: kept.save(step), "no slot was free")
    control.wait_for(lambda report: checkpoint(step) in [held.checkpoint for held in report.held])
    control.order(committed=checkpoint(step))


def bytes_in(folder: Path, step: int) -> dict[str, Any]:
    """What was sealed of a step, by name; every byte is checked."""
    for path in folder.glob("own-0-*.slot"):
        try:
            slot = SealedSlot(str(path), checkpoint(step), 0)
        except CorruptCheckpointError:  # the other slot
            continue
        parts = slot.layout().parts
        found = {
            part.name: torch.frombuffer(bytearray(slot.read(part, 0, part.nbytes)), dtype=torch.float32)
            for part in parts
        }
        slot.close()
        return found
    raise AssertionError(f"no slot holds step {step}")


def test_values_of_the_moment_are_kept_though_the_script_goes_on_at_once(control: Control, folder: Path) -> None:
    """Thread 5 (pytorch 144657) and Thread 6 (pytorch-lightning 20953): a stamp of its step in every tensor."""
    sizes = [1, 1000, 300_000, 3_000_000] * 4
    tensors = {str(number): torch.zeros(size) for number, size in enumerate(sizes)}
    with a_server(control, folder):
        kept = opened(folder, State(tensors))
        for step in range(1, 9):
            for tensor in tensors.values():
                tensor.fill_(step)
            wait_until(lambda step=step: kept.save(step), "no slot was free")  # type: ignore[misc]
            for tensor in tensors.values():
                tensor.add_(1000)  # the next step, in place
            control.wait_for(lambda report, step=step: checkpoint(step) in [h.checkpoint for h in report.held])  # type: ignore[misc]
            control.order(committed=checkpoint(step))
            assert {float(v) for each in bytes_in(folder, step).values() for v in (each.min(), each.max())} == {step}
        kept.close()


def test_steps_that_change_no_byte_are_told_once(control: Control, folder: Path) -> None:
    """Thread 7 (NVIDIA-NeMo/RL 3312): the step moved, and the state is the same to the last byte."""
    state = State({"w": torch.ones(2_000_000), "b": torch.ones(3)})
    with a_server(control, folder):
        kept = opened(folder, state)
        for step in (1, 2, 3):
            saved(control, kept, step)
        (trouble,) = control.wait_for(lambda report: bool(report.trouble)).trouble
        assert "the step moved from 1 to 2, but no byte of its state has changed" in trouble
        kept.close()


def test_same_names_with_other_memory_are_saved_anew(control: Control, folder: Path) -> None:
    """Thread 7 (NVIDIA-NeMo/RL 3312): two saves with different storages for the same keys differ."""
    state = State({"w": torch.full((5000,), 1.0)})
    with a_server(control, folder):
        kept = opened(folder, state)
        for step in (1, 2, 3):
            state.tensors = {"w": torch.full((5000,), float(step))}
            saved(control, kept, step)
            assert bytes_in(folder, step)["state.w"].unique().tolist() == [step]
        assert control.reports["n0"].trouble == ()
        kept.close()


def test_script_that_raises_in_a_save_costs_that_step_alone(control: Control, folder: Path) -> None:
    """Thread 32 (Automodel 3824, 3261): the step is given up for all ranks, so that none waits for this one."""

    class Fragile(State):
        fails = False

        def state_dict(self) -> dict[str, Any]:
            if self.fails:
                raise RuntimeError("the script's own")
            return self.tensors

    state = Fragile({"w": torch.ones(100)})
    with a_server(control, folder):
        kept = opened(folder, state)
        saved(control, kept, 1)
        state.fails = True
        with pytest.raises(RuntimeError, match="the script's own"):
            kept.save(2)
        control.wait_for(lambda report: report.skipped == (checkpoint(2),))
        state.fails = False
        state.tensors["w"].add_(1)
        saved(control, kept, 3)
        kept.close()


def test_3000_tensors_need_no_more_descriptors_than_one(control: Control, folder: Path) -> None:
    """Thread 43 (xtuner 1859): ulimit -n 256, on both sides."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, here + 60), before[1]))  # other tests may hold some
    try:
        tensors = {f"layer.{number}": torch.full((16,), float(number)) for number in range(3000)}
        with a_server(control, folder) as server:
            descriptors = Path(f"/proc/{server.process.pid}/fd")
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (256, 256))
            kept = opened(folder, State(tensors))
            for step in (1, 2, 3):
                tensors["layer.0"].fill_(step)
                saved(control, kept, step)
            assert len(list(descriptors.iterdir())) < 40
            found = bytes_in(folder, 3)
            assert len(found) == 3000
            assert found["state.layer.2999"].unique().tolist() == [2999.0]
            kept.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_saving_and_restoring_need_almost_no_memory_beside_the_slots(control: Control, folder: Path) -> None:
    """Thread 45 (Speech 12637, radixark/Megatron-LM 61): the peak is measured, after attach and through a restore."""
    count, allowed = 24_000_000, PROBE + (12 << 20)  # 92 MiB of state; a busy machine makes a save look slow
    state = State({f"{n}": torch.full((count // 8,), float(n)) for n in range(8)})
    model = torch.nn.ParameterDict(state.tensors)
    with a_server(control, folder):
        kept = opened(folder, model)
        start = _forget_peak()
        for step in (1, 2, 3):
            with torch.no_grad():
                model["0"].add_(1)
            saved(control, kept, step)
        assert _peak() - start < allowed, "of saving"
        kept.close()
        again = opened(folder, model, generation=2)
        start = _forget_peak()
        chosen = Chosen(checkpoint=checkpoint(3), world_size=1, holders={0: (NodeId("n0"),)})
        control.order(generation=GenerationNumber(2), question=1, chosen=chosen)
        assert again.restore() == 4
        assert _peak() - start < allowed, "of restoring"
        assert again.restored is not None
        assert again.restored.nbytes == 4 * count
        again.close()


def _forget_peak() -> int:
    """Bytes that are resident now; the peak begins here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def test_save_that_is_much_slower_than_a_copy_says_why(
    control: Control, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Thread 46 (dlrover 1225): 55 s where less than 1 was promised, and nobody knew why."""
    state = State({"w": torch.zeros(16384, 4096, dtype=torch.uint8).t()})  # byte by byte: far slower than any copy
    with a_server(control, folder):
        kept = opened(folder, state)
        for step in (1, 2, 3, 4):
            state.tensors["w"].add_(1)
            saved(control, kept, step)
        kept.close()
    said = [line for line in capfd.readouterr().err.splitlines() if "a bare copy takes" in line]
    assert len(said) == 1
    assert "1 tensors are not contiguous, the first is state.w" in said[0]


def test_new_life_attaches_while_a_drain_of_the_old_one_runs(control: Control, folder: Path, tmp_path: Path) -> None:
    """Thread 18 (dlrover 1069): it gets other slots, and what is drained arrives whole."""
    store = tmp_path / "store"
    with a_server(control, folder, drain_bytes_per_second=30_000.0):
        trainer = Trainer(folder, store=str(store))
        attached(trainer)
        control.wait_for(lambda report: bool(report.store) and not report.unlooked)
        trainer.write_tail(checkpoint(1), b"\x82\xa6shared\x80\xa3own\x80")
        control.wait_for(lambda report: bool(report.held))
        world = Shards(attempt=1, generation=GenerationNumber(1), by_rank=(trainer.said.shards,))
        node = NodeId("n0")
        order = DrainOrder(number=1, checkpoint=checkpoint(1), writers={node: (0,)}, committer=node)
        control.order(committed=checkpoint(1), world=world, drain=order)
        wait_until(lambda: bool(list(store.glob("*.tmp/*.new"))), "the drain has not begun")
        trainer.close()
        begun = time.monotonic()
        again = Trainer(folder, generation=2, store=str(store))
        assert attached(again).slots == 3
        assert list(store.glob("*.tmp")), "the drain still runs"
        control.order(generation=GenerationNumber(2), question=1, chosen=Chosen(checkpoint=None))
        again.write(checkpoint(1, 2))
        again.write(checkpoint(2, 2))
        control.wait_for(lambda report: bool(report.parts))
        control.order(drain=msgspec.structs.replace(order, is_written=True))
        report = control.wait_for(lambda report: bool(report.stored))
        assert [stored.checkpoint for stored in report.stored] == [checkpoint(1)], report.trouble
        assert verify(str(store), report.stored[0].path) == ()
        assert time.monotonic() - begun < WITHIN


def test_restore_after_steps_of_the_same_process_gives_what_was_saved(control: Control, folder: Path) -> None:
    """Thread 9 (torchtitan 930): the copy that is still being hashed when it is asked for counts."""
    weight = torch.zeros(4_000_000)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(weight, requires_grad=False)})
    with a_server(control, folder):
        kept = opened(folder, model)

        def answer() -> None:
            asked = control.wait_for(lambda report: any(each.restoring for each in report.attached))
            newest = max(held.checkpoint for held in asked.held)
            chosen = Chosen(checkpoint=newest, world_size=1, holders={0: (NodeId("n0"),)})
            control.order(question=2, turn=1, chosen=chosen)  # the first one would have come before the saves

        for step in (1, 2, 3):
            weight.fill_(step)
            saved(control, kept, step)
        weight.fill_(4)
        wait_until(lambda: kept.save(4), "no slot was free")
        weight.fill_(99)
        control_side = threading.Thread(target=answer)
        control_side.start()
        assert kept.restore() == 5
        control_side.join()
        assert weight.unique().tolist() == [4.0]
        kept.close()
