"""The memory server as a process: trainers that die, slots that are damaged, a control that comes and goes."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from perdure.vocab.checkpoint import Chosen, Level, Member, Shards, SlotState
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, NodeId
from perdure.wire import slotfile
from perdure.wire.memory import (
    Close,
    DrainOrder,
    Flush,
    Flushed,
    Parts,
    Policy,
    Protect,
    Refused,
    Restore,
    RestorePlan,
    SavePage,
    Skipped,
)
from perdure.wire.slots import CHUNK, DATA_START
from tests.process.memory_rig import (
    Control,
    Server,
    Trainer,
    a_config,
    a_layout,
    a_server,
    attached,
    checkpoint,
    connect,
    slot_bytes,
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


def test_a_save_that_is_written_is_sealed_and_reported(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        assert attached(trainer).slots == 2
        trainer.write(checkpoint(1))
        report = control.wait_for(lambda report: bool(report.held))
        held = report.held[0]
        assert (held.checkpoint, held.rank, held.level) == (checkpoint(1), 0, Level.SEALED)
        assert report.attached[0].shards == held.shards


def test_a_slot_is_given_again_only_when_a_newer_checkpoint_is_committed(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        first = trainer.write(checkpoint(1))
        trainer.write(checkpoint(2))
        control.wait_for(lambda report: len(report.held) == 2)
        assert not trainer.may_write()
        control.order(committed=checkpoint(1))
        control.wait_for(lambda report: report.told.committed == checkpoint(1))
        assert not trainer.may_write()
        control.order(committed=checkpoint(2))
        assert trainer.granted() == first
        assert trainer.word(SavePage.COMMITTED) == 2


def test_a_skipped_step_is_told_and_its_abort_frees_the_slots(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        freed = trainer.write(checkpoint(2))
        trainer.send(Skipped(checkpoint=checkpoint(3)))
        report = control.wait_for(lambda report: report.skipped == (checkpoint(3),) and len(report.held) == 2)
        assert report.held
        control.order(aborted=(checkpoint(2), checkpoint(3)))
        assert trainer.granted() == freed
        control.wait_for(lambda report: report.skipped == ())


def test_a_trainer_killed_in_the_copy_leaves_the_slot_before_whole(control: Control, folder: Path) -> None:
    """Thread 16 (dlrover 856): kill -9 the trainer, and the slots are still there."""
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        slot = trainer.begin(checkpoint(2), fill=9)
        trainer.close()
        control.wait_for(lambda report: not report.attached)
        assert slotfile.read_header(trainer.slots[slot]).state is SlotState.FREE
        assert [held.checkpoint for held in control.reports["n0"].held] == [checkpoint(1)]
        again = Trainer(folder, generation=2)
        assert len(again.slots) == 2


def test_a_trainer_killed_before_it_could_tell_has_its_save_sealed(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1), tell=False)
        trainer.close()
        control.wait_for(lambda report: [held.checkpoint for held in report.held] == [checkpoint(1)])


def test_a_server_killed_before_the_seal_is_followed_by_one_that_seals(control: Control, folder: Path) -> None:
    with a_server(control, folder) as server:
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        trainer.write(checkpoint(2), tell=False)
        server.kill()
    control.reports.clear()
    with a_server(control, folder):
        report = control.wait_for(lambda report: len(report.held) == 2)
        assert {held.checkpoint for held in report.held} == {checkpoint(1), checkpoint(2)}


def test_twenty_crashes_leave_the_bytes_constant(control: Control, folder: Path) -> None:
    """Thread 17 (sglang 40723): nothing leaks with a crash."""
    sizes = set()
    for crash in range(20):
        with a_server(control, folder) as server:
            trainer = Trainer(folder, generation=crash + 1)
            attached(trainer)
            if trainer.may_write():
                trainer.begin(checkpoint(crash, crash + 1), fill=crash)
            sizes.add(slot_bytes(folder))
            server.kill()
            trainer.close()
    assert len(sizes) == 1


def test_a_flipped_bit_in_a_sealed_slot_is_found_when_it_is_adopted(control: Control, folder: Path) -> None:
    with a_server(control, folder) as server:
        trainer = Trainer(folder)
        slots = [trainer.write(checkpoint(1)), trainer.write(checkpoint(2))]
        control.wait_for(lambda report: len(report.held) == 2)
        server.kill()
    os.pwrite(trainer.slots[slots[0]], b"\x06", DATA_START + 50_000)
    control.reports.clear()
    with a_server(control, folder):
        control.wait_for(lambda report: [held.checkpoint for held in report.held] == [checkpoint(2)])


@pytest.mark.parametrize("damage", ["truncate", "header", "empty"])
def test_a_damaged_file_is_removed_and_the_others_are_kept(control: Control, folder: Path, damage: str) -> None:
    with a_server(control, folder) as server:
        trainer = Trainer(folder)
        slots = [trainer.write(checkpoint(1)), trainer.write(checkpoint(2))]
        control.wait_for(lambda report: len(report.held) == 2)
        server.kill()
    path = folder / f"own-0-{slots[1]}.slot"
    if damage == "header":
        with open(path, "r+b") as file:
            file.write(b"\0" * 8192)
    else:
        os.truncate(path, 50_000 if damage == "truncate" else 0)
    control.reports.clear()
    with a_server(control, folder):
        control.wait_for(lambda report: [held.checkpoint for held in report.held] == [checkpoint(1)])
        assert not path.exists()


def test_a_restore_is_answered_when_control_has_chosen(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        trainer.close()
        control.wait_for(lambda report: not report.attached)
        again = Trainer(folder, generation=2)
        again.send(Restore(id=5))
        control.wait_for(lambda report: any(each.restoring == 1 for each in report.attached))
        control.order(generation=1, question=1, chosen=Chosen(checkpoint=checkpoint(9)))  # an answer to others
        chosen = Chosen(checkpoint=checkpoint(1), world_size=1, holders={0: ("n0",)})
        control.order(generation=2, question=1, chosen=chosen)
        plan, _ = again.receive()
        assert plan == RestorePlan(id=5, chosen=chosen, here={0: str(folder / "own-0-0.slot")})
        control.wait_for(lambda report: not any(each.restoring for each in report.attached))


def test_a_refused_restore_says_what_was_found(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.send(Restore(id=2, step=100))
        control.wait_for(lambda report: any(each.restore_step == 100 for each in report.attached))
        control.order(question=1, refused="step 100 is nowhere")
        answer, _ = trainer.receive()
        assert answer == Refused(reason="step 100 is nowhere", corrupt=True, id=2)


def test_what_was_here_before_is_not_given_until_the_trainer_has_restored(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        old = trainer.write(checkpoint(1))
        trainer.write(checkpoint(2))
        control.wait_for(lambda report: len(report.held) == 2)
        trainer.close()
        control.wait_for(lambda report: not report.attached)
        control.order(committed=checkpoint(2))
        again = Trainer(folder, generation=2)
        control.wait_for(lambda report: report.generation == 2)
        assert not again.may_write()
        again.send(Restore(id=1))
        control.order(generation=2, question=1, chosen=Chosen(checkpoint=checkpoint(2), world_size=1))
        assert isinstance(again.receive()[0], RestorePlan)
        assert again.granted() == old


def test_another_layout_gets_new_slots_and_the_old_stay_readable_until_a_commit(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        trainer.close()
        again = Trainer(folder, a_layout(nbytes=200_000), generation=2)
        assert attached(again).slots == 2
        assert control.wait_for(lambda report: report.generation == 2).held[0].checkpoint == checkpoint(1)
        again.write(checkpoint(2, 2))
        control.wait_for(lambda report: len(report.held) == 2)
        control.order(generation=2, committed=checkpoint(2, 2))
        control.wait_for(lambda report: [held.checkpoint for held in report.held] == [checkpoint(2, 2)])
        wait_until(lambda: len(list(folder.glob("own-*.slot"))) == 2, "old slots are left")


@pytest.mark.parametrize("garbage", [b"hello", b"{}", b"[" * 70_000, b'{"type":"written"}', b"\xff\xfe\0"])
def test_garbage_ends_that_connection_and_no_other(control: Control, folder: Path, garbage: bytes) -> None:
    with a_server(control, folder) as server:
        trainer = Trainer(folder)
        bad = connect(str(folder / "door"))
        bad.send(garbage)
        assert bad.recv(100) == b""
        bad.close()
        other = connect(str(folder / "door"))
        other.close()
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        _, said = server.stop()
        assert len(said.splitlines()) == 1


def test_a_rank_with_another_policy_is_refused(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        attached(Trainer(folder, a_layout(0, 2)))
        other = Trainer(folder, a_layout(1, 2), store="/elsewhere")
        assert isinstance(other.answer, Refused)
        assert "another checkpoint policy" in other.answer.reason
        late = Trainer(folder, a_layout(1, 2), generation=0)
        assert isinstance(late.answer, Refused)


def test_a_layout_that_lies_is_refused(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        for lie in ({"tail_room": 1 << 40}, {"shards": "0" * 32}, {"job": "another"}, {"rank": 7}):
            assert isinstance(Trainer(folder, a_layout(), **lie).answer, Refused)
        layout = a_layout()
        overlapping = msgspec.structs.replace(layout, parts=(layout.parts[0], layout.parts[0]))
        absurd = msgspec.structs.replace(layout, data_bytes=1 << 60)
        assert isinstance(Trainer(folder, overlapping).answer, Refused)
        assert isinstance(Trainer(folder, absurd).answer, Refused)
        assert not list(folder.glob("*.slot"))


def test_a_tmpfs_that_is_too_small_is_refused_with_the_arithmetic(control: Control, tmp_path: Path) -> None:
    """Thread 15 (dlrover 1046, vllm 48879): at attach, and never SIGBUS later."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path], check=True)
    try:
        with a_server(control, tmp_path / "slots"):
            trainer = Trainer(tmp_path / "slots", a_layout(nbytes=48 << 20))
            assert isinstance(trainer.answer, Refused)
            for part in ("2 slots of 48.0 MiB", "make 96.0 MiB", "64.0 MiB free"):
                assert part in trainer.answer.reason
            assert not list((tmp_path / "slots").glob("*.slot"))
            fits = Trainer(tmp_path / "slots", a_layout(nbytes=20 << 20))
            fits.write(checkpoint(1))
            control.wait_for(lambda report: bool(report.held))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_control_that_is_away_costs_nothing_and_is_told_later(folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with Control() as control:
            away = Server(msgspec.structs.replace(a_config(control, folder), control=Address(*closed.getsockname())))
            try:
                trainer = Trainer(folder)
                trainer.write(checkpoint(1))
                slot = trainer.slots[0]
                wait_until(lambda: slotfile.read_header(slot).state is SlotState.SEALED, "not sealed without control")
            finally:
                away.kill()
            with a_server(control, folder):
                control.wait_for(lambda report: bool(report.held))


def test_a_detached_server_ends_when_its_trainers_have_and_leaves_nothing(control: Control, folder: Path) -> None:
    with a_server(control, folder, linger=60.0) as server:
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        trainer.send(Close())
        assert server.end()[0] == 0
        assert not folder.exists()


def test_a_server_that_is_told_to_end_seals_what_is_written_and_removes_it_with_the_job(
    control: Control, folder: Path
) -> None:
    with a_server(control, folder) as server:
        trainer = Trainer(folder)
        slot = trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        assert server.stop()[0] == 0
        assert slotfile.read_header(trainer.slots[slot]).state is SlotState.SEALED
        assert not folder.exists()


def test_a_detached_server_that_is_told_to_end_keeps_the_slots(control: Control, folder: Path) -> None:
    with a_server(control, folder, linger=60.0) as server:
        trainer = Trainer(folder)
        slot = trainer.write(checkpoint(1))
        control.wait_for(lambda report: bool(report.held))
        assert server.stop()[0] == 0
        assert (folder / f"own-0-{slot}.slot").exists()


def test_two_servers_of_one_folder_cannot_be(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        Trainer(folder)
        with a_server(control, folder) as second:
            code, said = second.end()
            assert code == 1
            assert "memory server of" in said


def test_replicas_reach_the_partner_and_make_the_slot_replicated(control: Control, folder: Path) -> None:
    with a_server(control, folder / "a"), a_server(control, folder / "b", node="n1"):
        trainer = Trainer(folder / "a")
        partner = control.wait_for(lambda report: True, node="n1").address
        control.order(partners={"n0": (partner,)})
        trainer.write(checkpoint(1))
        control.wait_for(lambda report: [held.level for held in report.held] == [Level.REPLICATED])
        control.wait_for(lambda report: [held.rank for held in report.held] == [0], node="n1")


NODES = ("n0", "n1", "n2")


def three_sealed(control: Control, folder: Path) -> tuple[Protect, dict[NodeId, Address]]:
    """A slot of step 1 on each of three nodes that run; gives what control would order then."""
    members = tuple(Member(node=NodeId(node), ranks=(rank,)) for rank, node in enumerate(NODES))
    for rank, node in enumerate(NODES):
        layout = a_layout(rank, 3, (2 + rank) * CHUNK + 5)
        trainer = Trainer(folder / node, layout, local_world_size=1, policy=Policy(every=1, xor=2))
        attached(trainer)
        trainer.write(checkpoint(1), fill=10 + rank)
    reports = [control.wait_for(lambda report: bool(report.held), node=node) for node in NODES]
    addresses = {report.node: report.address for report in reports}
    return Protect(checkpoint=checkpoint(1), groups=(members,)), addresses


def test_parity_is_made_on_order_adopted_by_the_next_server_and_given_up_where_a_bit_is_wrong(
    control: Control, folder: Path
) -> None:
    with a_server(control, folder / "n0") as first, a_server(control, folder / "n1", node="n1"):
        with a_server(control, folder / "n2", node="n2"):
            wanted, addresses = three_sealed(control, folder)
            control.order(protect=(wanted,), addresses=addresses)
            for node in NODES:
                report = control.wait_for(lambda report: bool(report.parity), node=node)
                assert [(p.checkpoint, p.members) for p in report.parity] == [(checkpoint(1), wanted.groups[0])]
            path = folder / "n0" / "parity-0.xor"
            assert path.stat().st_blocks * 512 < 4 * CHUNK, "a share of the slots, of which the largest has 5 chunks"
            first.kill()
            lives = control.reports["n0"].incarnation
            before = path.read_bytes()
            with a_server(control, folder / "n0") as second:
                control.wait_for(lambda report: report.incarnation != lives and bool(report.parity))
                second.kill()
            assert path.read_bytes() == before, "it was adopted, not made again"
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            control.order(protect=())
            with a_server(control, folder / "n0") as third:
                control.wait_for(lambda report: report.incarnation not in (lives, second) and bool(report.held))
                wait_until(lambda: not path.exists(), "what is damaged is given up")
                assert third.stop()[1].count("parity-0.xor is given up: stripe") == 1


def test_node_of_a_group_that_is_gone_is_a_trouble_and_parity_comes_when_it_is_back(
    control: Control, folder: Path
) -> None:
    with a_server(control, folder / "n0"), a_server(control, folder / "n1", node="n1"):
        with a_server(control, folder / "n2", node="n2") as lost:
            wanted, addresses = three_sealed(control, folder)
            lost.kill()
        control.order(protect=(wanted,), addresses=addresses)
        report = control.wait_for(lambda report: bool(report.trouble))
        assert "no parity of step 1 of generation 1 is made on n0: cannot reach" in report.trouble[0]
        assert report.parity == ()
        with a_server(control, folder / "n2", node="n2"):
            old = addresses[NodeId("n2")]
            again = control.wait_for(lambda report: report.address != old and bool(report.held), node="n2")
            control.order(addresses={**addresses, NodeId("n2"): again.address})
            report = control.wait_for(lambda report: bool(report.parity))
            control.wait_for(lambda report: not report.trouble)


def test_a_committed_checkpoint_that_control_names_reaches_storage(
    control: Control, folder: Path, tmp_path: Path
) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder, store=str(tmp_path / "store"))
        assert attached(trainer).durable
        assert len(trainer.slots) == 3
        control.wait_for(lambda report: bool(report.store) and not report.unlooked)
        trainer.write_tail(checkpoint(1), b"\x82\xa6shared\x80\xa3own\x80")
        control.wait_for(lambda report: bool(report.held))
        world = Shards(attempt=1, generation=GenerationNumber(1), by_rank=(trainer.said.shards,))
        control.order(committed=checkpoint(1), world=world)
        trainer.send(Flush(id=3, deadline=100.0))
        control.wait_for(lambda report: report.flushing)
        node = NodeId("n0")
        order = DrainOrder(number=1, checkpoint=checkpoint(1), writers={node: (0,)}, committer=node)
        control.order(drain=order)
        report = control.wait_for(lambda report: bool(report.parts) or report.drain_failure is not None)
        assert report.parts == (Parts(number=1, ranks=(0,)),), report.drain_failure
        assert report.drain_bytes > 0
        assert not report.stored
        control.order(drain=msgspec.structs.replace(order, is_written=True))
        report = control.wait_for(lambda report: bool(report.stored) or report.drain_failure is not None)
        assert [stored.checkpoint for stored in report.stored] == [checkpoint(1)], report.trouble
        control.order(drain=None, durable=checkpoint(1))
        assert trainer.receive()[0] == Flushed(id=3, checkpoint=checkpoint(1))


def test_a_replica_group_that_has_lost_a_rank_is_committed_in_storage_from_the_others(
    control: Control, folder: Path, tmp_path: Path
) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder, a_layout(0, 2), store=str(tmp_path / "store"), local_world_size=1)
        control.wait_for(lambda report: bool(report.store) and not report.unlooked)
        trainer.write_tail(checkpoint(1), b"\x82\xa6shared\x80\xa3own\x80")
        control.wait_for(lambda report: bool(report.held))
        shards, node = trainer.said.shards, NodeId("n0")
        world = Shards(attempt=1, generation=GenerationNumber(1), by_rank=(shards, shards))
        order = DrainOrder(
            number=1, checkpoint=checkpoint(1), ranks=(0,), writers={node: (0,)}, committer=node, is_written=True
        )
        control.order(committed=checkpoint(1), world=world, drain=order)
        report = control.wait_for(lambda report: bool(report.stored) or report.drain_failure is not None)
        assert [stored.checkpoint for stored in report.stored] == [checkpoint(1)], report.drain_failure


def test_a_store_that_refuses_for_good_is_refused_at_attach(control: Control, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("a file, no folder")
    with a_server(control, folder):
        answer = Trainer(folder, store=str(store)).answer
        assert isinstance(answer, Refused)
        assert str(store) in answer.reason
        store.unlink()
        assert attached(Trainer(folder, store=str(store))).durable, "a refusal was remembered"


def test_a_store_that_begins_to_refuse_is_told_and_costs_no_slot(
    control: Control, folder: Path, tmp_path: Path
) -> None:
    """Thread 11 (Megatron-LM 1435): training goes on, and who waits for storage is told why it does not come."""
    store = tmp_path / "store"
    with a_server(control, folder):
        trainer = Trainer(folder, store=str(store))
        assert attached(trainer).durable
        control.wait_for(lambda report: bool(report.store) and not report.unlooked)
        store.rmdir()
        store.write_text("a file, no folder")
        trainer.write_tail(checkpoint(1), b"\x82\xa6shared\x80\xa3own\x80")
        control.wait_for(lambda report: bool(report.held))
        world = Shards(attempt=1, generation=GenerationNumber(1), by_rank=(trainer.said.shards,))
        node = NodeId("n0")
        order = DrainOrder(number=1, checkpoint=checkpoint(1), writers={node: (0,)}, committer=node)
        control.order(committed=checkpoint(1), world=world, drain=order)
        failure = control.wait_for(lambda report: report.drain_failure is not None).drain_failure
        assert failure is not None
        assert (failure.number, failure.lasting) == (1, True)
        assert str(store) in failure.why
        trainer.send(Flush(id=3, deadline=100.0))
        control.wait_for(lambda report: report.flushing and any(each.flushing for each in report.attached))
        control.order(drain=None, unstorable=failure.why)
        answer, _ = trainer.receive()
        assert isinstance(answer, Flushed)
        assert answer.error == failure.why
        trainer.write(checkpoint(2))
        control.wait_for(lambda report: any(held.checkpoint == checkpoint(2) for held in report.held))


def test_a_flush_without_a_storage_tier_says_so(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.send(Flush(id=1, deadline=5.0))
        answer, _ = trainer.receive()
        assert isinstance(answer, Flushed)
        assert "no storage tier" in answer.error


def test_a_trainer_that_attaches_anew_ends_its_earlier_connection(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainer = Trainer(folder)
        trainer.write(checkpoint(1))
        again = Trainer(folder)
        assert attached(again).slots == 2
        assert trainer.link.recv(100) == b""
        control.wait_for(lambda report: bool(report.held) and len(report.attached) == 1)


def test_two_ranks_of_a_node_have_slots_of_their_own(control: Control, folder: Path) -> None:
    with a_server(control, folder):
        trainers = [Trainer(folder, a_layout(rank, 2)) for rank in (0, 1)]
        for trainer in trainers:
            trainer.write(checkpoint(1))
        report = control.wait_for(lambda report: len(report.held) == 2)
        assert {held.rank for held in report.held} == {0, 1}
        trainers[1].close()
        report = control.wait_for(lambda report: len(report.attached) == 1)
        assert len(report.held) == 2
