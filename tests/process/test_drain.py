"""The drain: a child that writes sealed slots into storage as torch does, and may be killed at any moment."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest
import torch

from perdure.store.checkpoints import begin, commit, list_stored, verify
from perdure.trainer.checkpoint import part
from perdure.trainer.checkpoint.distcp import share_of
from perdure.trainer.checkpoint.drain import answer
from perdure.trainer.checkpoint.export import load_whole
from perdure.vocab.checkpoint import SlotState
from perdure.vocab.ids import JobId
from perdure.wire.memory import DrainReply, DrainRequest
from perdure.wire.slotfile import open_slot, read_header, write_header
from tests.unit.store.a_checkpoint import SHARED, Slots, a_slot, a_stored, an_id, drain, flip, replicated, sharded

PLAIN = Path(__file__).parent / "scripts" / "plain_load.py"
GROUP = {"lr": 0.001, "betas": (0.9, 0.95), "params": ["embed.weight"]}


class Drain:
    """The program, at its other end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "perdure.trainer.checkpoint.drain"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.reply() == DrainReply(id=0)

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, request: DrainRequest) -> DrainReply:
        self.send(msgspec.json.encode(request))
        return self.reply()

    def reply(self) -> DrainReply:
        out: IO[bytes] | None = self.process.stdout
        assert out is not None
        return msgspec.json.decode(out.readline(), type=DrainReply)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def child() -> Iterator[Drain]:
    running = Drain()
    yield running
    running.end()


def plain_load(folder: Path, state: dict[str, torch.Tensor], world: int, tmp: Path) -> None:
    """In processes that know torch alone."""
    torch.save({"tensors": state, "group": GROUP}, tmp / "expected.pt")
    meeting = tmp / f"meeting-{world}"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PLAIN), str(folder), str(tmp / "expected.pt"), str(world), str(meeting), str(rank)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * world, said


# --- what is written is torch's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sharded, replicated])
def test_drained_checkpoint_is_loaded_bitwise_by_torch_alone_in_one_and_three_processes(tmp_path, make):
    """Thread 27 (torchtitan 1136): uneven shards, another world size. Thread 28 (accelerate 3971): 0-dim tensors."""
    slots, state = make(tmp_path)
    stored = drain(tmp_path / "store", slots)
    for world in (1, 3):
        plain_load(tmp_path / "store" / stored.path, state, world, tmp_path)


def test_export_gives_the_nested_state_without_reading_a_pickle(tmp_path):
    slots, state = sharded(tmp_path)
    stored = drain(tmp_path / "store", slots)
    whole = load_whole(str(tmp_path / "store"), stored.path)
    assert whole["optimizer"]["param_groups"] == [GROUP]
    assert set(whole["model"]) == {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert torch.equal(whole["model"]["embed.weight"], state["model.embed.weight"])
    assert torch.equal(whole["optimizer"]["state"]["embed.weight"]["exp_avg"], state[EXP_AVG])
    (tmp_path / "store" / stored.path / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert torch.equal(load_whole(str(tmp_path / "store"), stored.path)["model"]["norm"], state["model.norm"])


EXP_AVG = "optimizer.state.embed.weight.exp_avg"


def test_replicas_share_the_writing_by_bytes_and_agree_on_it(tmp_path):
    slots, _ = replicated(tmp_path, 3)
    layout = part.SealedSlot(slots.paths[0], slots.checkpoint, 0).layout()
    shares = [share_of(rank, layout.parts, (0, 1, 2)) for rank in range(3)]
    assert sorted(piece.name for share in shares for piece in share) == sorted(p.name for p in layout.parts)
    shuffled = list(layout.parts)
    random.Random(1).shuffle(shuffled)
    assert [share_of(rank, shuffled, (0, 1, 2)) for rank in range(3)] == shares
    stored = drain(tmp_path / "store", slots)
    assert stored.nbytes < 1.2 * sum(piece.nbytes for piece in layout.parts)


# --- the program -----------------------------------------------------------------------------------------------------


def test_child_is_niced_answers_garbage_and_ends_with_its_input(child, tmp_path):
    pid = child.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    for line in (b"garbage", b"{}", b"\xff\xfe", b"[" * 5000):
        child.send(line)
        reply = child.reply()
        assert (reply.id, reply.nbytes) == (-1, 0)
        assert reply.error.startswith("that is no request")
    slots, _ = sharded(tmp_path, 2)
    name = begin(str(tmp_path / "store"), slots.checkpoint)
    refused = child.ask(msgspec.structs.replace(slots.request(tmp_path / "store", name), name="../../etc"))
    assert "no name for" in refused.error
    reply = child.ask(slots.request(tmp_path / "store", name, finish=True))
    assert (reply.id, reply.error) == (7, "")
    assert reply.nbytes > 300_000
    assert child.ask(slots.request(tmp_path / "store", name, finish=True)).nbytes == reply.nbytes  # found, not written
    assert (
        verify(str(tmp_path / "store"), commit(str(tmp_path / "store"), name, JobId("exp"), slots.by_rank).path) == ()
    )
    child.process.stdin.close()
    assert child.process.wait(timeout=60) == 0


def test_child_killed_while_it_writes_leaves_nothing_that_counts_and_the_next_one_finishes(child, tmp_path):
    """Thread 33 (SkyRL 1960) and Thread 2 (KempnerForge 102): killed between dispatch and commit."""
    older = a_stored(tmp_path, tmp_path / "store", 5)
    slots, _ = sharded(tmp_path)
    store = str(tmp_path / "store")
    name = begin(store, slots.checkpoint)
    slow = msgspec.structs.replace(slots.request(store, name, finish=True), bytes_per_second=20_000.0)
    child.send(msgspec.json.encode(slow))
    wait_for_writing(tmp_path / "store" / name)
    child.process.send_signal(signal.SIGKILL)
    child.process.wait()
    assert list_stored(store) == (older,)
    assert answer(msgspec.json.encode(slots.request(store, name, finish=True))).error == ""
    assert verify(store, commit(store, name, JobId("exp"), slots.by_rank).path) == ()


def test_drain_killed_before_any_of_its_file_operations_never_leaves_a_half_checkpoint(tmp_path):
    """Thread 20 (pytorch-lightning 688): SIGKILL in every phase, from the first folder to the last rename."""
    older = a_stored(tmp_path, tmp_path / "kept", 5)
    slots, _ = sharded(tmp_path, 2)
    survived = 0
    for point in range(1, 400):
        store = tmp_path / "store"
        shutil.copytree(tmp_path / "kept", store)
        ended = _drain_and_die(slots, str(store), point)
        listed = list_stored(str(store))
        assert listed[-1] == older, point
        for stored in listed:
            assert verify(str(store), stored.path) == (), point
        survived += len(listed) == 1
        if point % 7 == 0:  # whoever comes next finishes it
            again = drain(store, slots)
            assert verify(str(store), again.path) == (), point
            assert not list((store / again.path).rglob("*.new")), point
        shutil.rmtree(store)
        if not ended:
            break
    else:
        pytest.fail("it never came to its end")
    assert survived > 30


def _drain_and_die(slots: Slots, store: str, point: int) -> bool:
    """In a fork, killed just before its file operation number `point`; False where it had fewer."""
    pid = os.fork()
    if pid == 0:
        left = point

        def count(event: str, _arguments: object) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.scandir"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            drain(store, slots)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


# --- slots that are not what was sealed ------------------------------------------------------------------------------


def test_slot_with_a_flipped_bit_never_leaves_memory(tmp_path):
    """Thread 38 (torchtitan 4011): nothing unverified is written."""
    slots, _ = sharded(tmp_path, 2)
    size = os.path.getsize(slots.paths[0])
    for at in (8192 + 100, 8192 + size // 3, size - 4096):
        flip(Path(slots.paths[0]), at)
        name = begin(str(tmp_path / "store"), slots.checkpoint)
        reply = answer(msgspec.json.encode(slots.request(tmp_path / "store", name, finish=True)))
        assert slots.paths[0] in reply.error
        assert list((tmp_path / "store" / name / "parts").iterdir()) == []
        flip(Path(slots.paths[0]), at)


def test_slot_cut_short_gone_or_of_another_checkpoint_is_a_reply(tmp_path):
    slots, _ = sharded(tmp_path, 2)
    other, _ = a_slot(tmp_path, 0, 2, [], checkpoint=an_id(11))
    name = begin(str(tmp_path / "store"), slots.checkpoint)
    os.truncate(slots.paths[1], 20_000)
    for path in (other, slots.paths[1], str(tmp_path / "none"), str(tmp_path), "/dev/null"):
        request = msgspec.structs.replace(slots.request(tmp_path / "store", name, 0), slots={0: path})
        assert answer(msgspec.json.encode(request)).error != "", path


def test_slot_given_away_while_it_is_read_makes_no_part(child, tmp_path):
    """Thread 12 (dlrover 1585, 1649): what is drained must not be overwritten; if it was, the part does not exist."""
    slots, _ = sharded(tmp_path, 2)
    name = begin(str(tmp_path / "store"), slots.checkpoint)
    slow = msgspec.structs.replace(slots.request(tmp_path / "store", name, 0), bytes_per_second=50_000.0)
    child.send(msgspec.json.encode(slow))
    wait_for_writing(tmp_path / "store" / name)
    fd = open_slot(slots.paths[0], writable=True)  # as a memory server that has forgotten the pin
    write_header(fd, msgspec.structs.replace(read_header(fd), state=SlotState.WRITING))
    os.close(fd)
    assert "was overwritten while it was read" in child.reply().error
    assert list((tmp_path / "store" / name / "parts").iterdir()) == []


def wait_for_writing(folder: Path) -> None:
    while not list(folder.glob("*.new")):
        os.sched_yield()


def test_shared_values_are_written_by_the_lowest_rank_alone(tmp_path):
    slots, _ = sharded(tmp_path)
    stored = drain(tmp_path / "store", slots)
    parts = part_files(tmp_path / "store" / stored.path)
    assert [len(one["values"]) for one in parts] == [len(SHARED), 0, 0, 0]


def part_files(folder: Path) -> list[dict[str, list[object]]]:
    return [msgspec.json.decode(path.read_bytes()) for path in sorted((folder / "parts").glob("0*.json"))]
