"""Memory servers whose peers stop, die, trickle, fill up or lie: a missing acknowledgement, never a hang or damage."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from perdure.agent.memory.transfer import Pace, fetch, offer
from perdure.errors import AccessDeniedError, HostError, WireError
from perdure.host.proc import read_state
from perdure.vocab.checkpoint import CheckpointId, SlotState
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire.slots import CHUNK, SlotHeader
from perdure.wire.transfer import LINE_LIMIT, SLOT_LIMIT, Answer, Get, Put, replica_name
from tests.process.transfers import (
    JOB,
    NODE,
    TOKEN,
    a_slot,
    another_process,
    happened,
    hashed,
    header_of,
    is_whole,
    replica,
    send,
    send_to_busy,
    serving,
    step,
    steps_in,
    stop_at,
    through,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# --- stopped, dead and slow ------------------------------------------------------------------------------------------


async def test_stopped_peer_costs_an_acknowledgement_and_the_next_source_is_used(tmp_path: Path) -> None:
    """Thread 35 (orbax 392): deadlines on every wait. SIGSTOP: the kernel still accepts for it."""
    source = tmp_path / "own-0-1.slot"
    header = a_slot(source, step(1))
    a_slot(tmp_path / "bob" / "own-0-1.slot", step(1))
    with another_process(tmp_path / "bob") as (process, address):
        await send(address, source, header)
        os.kill(process.pid, signal.SIGSTOP)
        await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
        assert read_state(process.pid) == "T"
        newer = a_slot(tmp_path / "own-0-2.slot", step(2))
        with pytest.raises(WireError, match="kept us waiting for too long"):
            await offer(address, TOKEN, NODE, tmp_path / "own-0-2.slot", newer, patience=0.5)
        async with serving(tmp_path / "cyd", {(step(1), Rank(0)): source}) as other:
            path = await fetch([address, other], TOKEN, step(1), Rank(0), range(3), tmp_path, patience=0.5)
            assert is_whole(path)
        os.kill(process.pid, signal.SIGCONT)
        await send_to_busy(address, tmp_path / "own-0-2.slot", newer)
        assert steps_in(tmp_path / "bob") == {1, 2}


@pytest.mark.parametrize("byte", [0, 100, 3000, CHUNK + 5, 2 * CHUNK + 5])
async def test_peer_that_stops_anywhere_in_a_replica_is_given_up(tmp_path: Path, byte: int) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob", patience=0.5) as address:
        with through(address, stop_at(byte)) as proxy:
            with pytest.raises(WireError):
                await offer(proxy.address, TOKEN, NODE, tmp_path / "own.slot", header, patience=0.5)
        assert steps_in(tmp_path / "bob") == set()


async def test_sender_that_falls_silent_gives_up_its_place(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob", patience=1.0) as address:
        with closing(socket.create_connection((address.host, address.port))) as silent:
            silent.sendall(msgspec.json.encode(Put(token=TOKEN, node=NODE, header=header)) + b"\n")
            assert b"error" in await anyio.to_thread.run_sync(to_the_end, silent), "it has heard that it was too slow"
        await send(address, tmp_path / "own.slot", header)
    assert steps_in(tmp_path / "bob") == {1}


def to_the_end(connected: socket.socket) -> bytes:
    connected.settimeout(30)
    return b"".join(iter(lambda: connected.recv(1 << 16), b""))


async def test_byte_now_and_then_is_as_good_as_a_stopped_peer(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    ended = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as door:

        def trickle() -> None:
            connected, _ = door.accept()
            with connected:
                while not ended.wait(0.05):
                    try:
                        connected.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(WireError, match="kept us waiting"):
                await offer(
                    Address("127.0.0.1", door.getsockname()[1]),
                    TOKEN,
                    NODE,
                    tmp_path / "own.slot",
                    header,
                    patience=0.4,
                )
        finally:
            ended.set()
            thread.join()


async def test_killed_receiver_leaves_no_half_replica_that_looks_whole(tmp_path: Path) -> None:
    """Thread 20 (pytorch-lightning 688): kill in the middle: what was whole is whole, and what is not says so."""
    bob = tmp_path / "bob"
    slots = {n: (tmp_path / f"{n}.slot", a_slot(tmp_path / f"{n}.slot", step(n))) for n in (1, 2, 3)}
    with another_process(bob) as (process, address):
        await send(address, *slots[1])
        await send(address, *slots[2])
        with through(address, stop_at(CHUNK + 5)) as proxy:
            async with anyio.create_task_group() as group:
                group.start_soon(_fails, proxy.address, *slots[3])
                await happened(proxy.reached)
                process.kill()
                process.wait()
                proxy.go_on.set()
    assert steps_in(bob) == {2}
    torn = header_of(replica(bob, 0))
    assert torn is not None
    assert torn.state is SlotState.WRITING
    with another_process(bob) as (_, address):
        await send(address, *slots[3])
    assert steps_in(bob) == {2, 3}


async def _fails(address: Address, path: Path, header: SlotHeader) -> None:
    with pytest.raises(WireError):
        await send(address, path, header)


async def test_killed_sender_leaves_the_older_replica_whole_and_its_place_free(tmp_path: Path) -> None:
    bob = tmp_path / "bob"
    slots = {n: (tmp_path / f"{n}.slot", a_slot(tmp_path / f"{n}.slot", step(n))) for n in (1, 2)}
    async with serving(bob) as address:
        await send(address, *slots[1])
        with through(address, stop_at(CHUNK + 5)) as proxy:
            with anyio.move_on_after(30) as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(send, proxy.address, *slots[2])
                    await happened(proxy.reached)
                    group.cancel_scope.cancel()
            assert not scope.cancelled_caught, "who is cancelled leaves at once"
        assert steps_in(bob) == {1}
        await retried(address, *slots[2])
    assert steps_in(bob) == {1, 2}


async def retried(address: Address, path: Path, header: SlotHeader) -> None:
    """Until the receiver has noticed that the first sender is gone."""
    while True:
        try:
            return await send(address, path, header)
        except WireError as exc:
            if "is on its way" not in str(exc):
                raise


async def test_event_loop_goes_on_while_gigabytes_would_wait(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    turns = 0
    async with serving(tmp_path / "bob") as address, anyio.create_task_group() as group:
        with through(address, stop_at(CHUNK + 5)) as proxy:
            group.start_soon(_fails, proxy.address, tmp_path / "own.slot", header)
            await happened(proxy.reached)
            for _ in range(1000):
                await anyio.lowlevel.checkpoint()
                turns += 1
    assert turns == 1000


async def test_pace_is_shared_and_a_paced_replica_arrives(tmp_path: Path) -> None:
    pace = Pace(10.0)
    assert [pace.reserve(20, now) for now in (100.0, 100.0, 103.0, 200.0)] == [0.0, 2.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="never ends"):
        Pace(0.0)
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        await offer(address, TOKEN, NODE, tmp_path / "own.slot", header, pace=Pace(50e6))
    assert steps_in(tmp_path / "bob") == {1}


# --- no room ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_tmpfs(folder: Path, megabytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)])
    if mounted.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_no_room_for_a_replica_is_an_answer_and_leaves_nothing(tmp_path: Path) -> None:
    """Thread 15 (dlrover 1046, vllm 48879): a /dev/shm that is too small is a sentence, never SIGBUS."""
    small, large = (
        a_slot(tmp_path / "1.slot", step(1), data=CHUNK),
        a_slot(tmp_path / "2.slot", step(2), data=4 * CHUNK),
    )
    with small_tmpfs(tmp_path / "bob", 12) as bob:
        async with serving(bob) as address:
            with pytest.raises(WireError, match=r"no room for a replica: it needs 16\.\d MiB, and 12\.0 MiB are left"):
                await send(address, tmp_path / "2.slot", large)
            assert os.listdir(bob) == []
            await send(address, tmp_path / "1.slot", small)
            with pytest.raises(WireError, match="no room"):
                await send(address, tmp_path / "2.slot", large)
            assert steps_in(bob) == {1}
            (bob / "ballast").write_bytes(bytes(os.statvfs(bob).f_bavail * os.statvfs(bob).f_frsize))
            newer = a_slot(tmp_path / "3.slot", step(3), data=CHUNK)
            with pytest.raises(WireError, match="no room"):
                await send(address, tmp_path / "3.slot", newer)
            assert steps_in(bob) == {1}
            (bob / "ballast").unlink()
            await send(address, tmp_path / "3.slot", newer)
            assert steps_in(bob) == {1, 3}


async def test_full_folder_while_borrowing_is_said_and_what_fits_is_kept(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1), data=4 * CHUNK)
    async with serving(tmp_path / "bob", {(step(1), Rank(0)): tmp_path / "own.slot"}) as address:
        with small_tmpfs(tmp_path / "here", 10) as here:
            with pytest.raises(HostError, match="a slot cannot be written: (no space left|the disk took)"):
                await fetch([address], TOKEN, step(1), Rank(0), range(header.chunks), here)
            (path,) = here.iterdir()
            assert hashed(path)[:CHUNK] == hashed(tmp_path / "own.slot")[:CHUNK]
            subprocess.run(["mount", "-o", "remount,size=40m", str(here)], check=True)
            await fetch([address], TOKEN, step(1), Rank(0), range(header.chunks), here)
            assert is_whole(path)


async def test_folder_that_is_gone_is_an_error_and_the_server_goes_on(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        (tmp_path / "bob").rmdir()
        with pytest.raises(WireError, match="cannot keep a replica"):
            await send(address, tmp_path / "own.slot", header)
        (tmp_path / "bob").mkdir()
        await send(address, tmp_path / "own.slot", header)


# --- strangers and rubbish -------------------------------------------------------------------------------------------


def said_to(address: Address, line: bytes) -> list[Answer]:
    """The lines that come back, up to the end of the connection."""
    with closing(socket.create_connection((address.host, address.port), timeout=30)) as connected:
        try:
            connected.sendall(line)
            text = to_the_end(connected)
        except ConnectionError:
            return []
    return [msgspec.json.decode(each, type=Answer) for each in text.splitlines()]


async def test_wrong_token_gets_one_line_and_a_closed_connection(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, step(1))
    async with serving(tmp_path / "bob", {(step(1), Rank(0)): source}) as address:
        with pytest.raises(AccessDeniedError, match="not this job's"):
            await offer(address, "another token", NODE, source, header)
        with pytest.raises(WireError, match="not this job's"):
            await fetch([address], "", step(1), Rank(0), (), tmp_path)
        request = msgspec.json.encode(Get(token=TOKEN[:-1], checkpoint=step(1), rank=Rank(0), head=True)) + b"\n"
        (answer,) = await anyio.to_thread.run_sync(said_to, address, request)
        assert answer.denied
        assert answer.header is None
    assert os.listdir(tmp_path / "bob") == []


RUBBISH = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff\xfe" * 1000 + b"\n",
    b"[" * 100_000 + b"\n",
    b'{"type":"get","token":"' + TOKEN.encode() + b'","extra":' + b"[" * 100_000 + b"\n",
    b'{"type":"get"}\n',
    b'{"type":"put","token":"x","node":"\\ud800","header":null}\n',
    b"x" * (LINE_LIMIT + (1 << 16)),
    json.dumps({"type": "get", "token": TOKEN, "checkpoint": {}, "rank": "../../etc/passwd"}).encode() + b"\n",
    json.dumps(
        {"type": "get", "token": TOKEN, "checkpoint": {"attempt": 1e999, "generation": 1, "step": 1}, "rank": 0}
    ).encode()
    + b"\n",
]


async def test_rubbish_gets_one_line_at_most_and_the_server_goes_on(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob", patience=5.0) as address:
        for line in RUBBISH:
            answers = await anyio.to_thread.run_sync(said_to, address, line)
            assert len(answers) <= 1
            assert all(answer.error for answer in answers)
        assert os.listdir(tmp_path / "bob") == []
        await send(address, tmp_path / "own.slot", header)
    assert sorted(os.listdir(tmp_path)) == ["bob", "own.slot"]


def absurd(header: SlotHeader) -> dict[str, SlotHeader]:
    def but(**changes: object) -> SlotHeader:
        return msgspec.structs.replace(header, **changes)

    return {
        "huge": but(data_bytes=SLOT_LIMIT + 1),
        "fits no machine": but(data_bytes=SLOT_LIMIT),
        "huge tail": but(tail_room=1 << 60),
        "more tail than room": but(tail_bytes=header.tail_room + 1),
        "huge layout": but(layout_bytes=1 << 40),
        "negative rank": but(rank=Rank(-1)),
        "rank outside": but(rank=Rank(8)),
        "huge world": but(rank=Rank(1 << 40), world_size=1 << 41),
        "negative step": but(checkpoint=CheckpointId(attempt=1, generation=GenerationNumber(1), step=-1)),
        "no checkpoint": but(checkpoint=None),
        "not sealed": but(state=SlotState.WRITING),
        "path as hash": but(root="../../../etc/passwd"),
        "another job": but(job=JobId("k")),
        "long job": but(job=JobId("j" * 5000)),
    }


async def test_absurd_header_allocates_nothing_and_names_no_file(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        for name, wrong in absurd(header).items():
            line = msgspec.json.encode(Put(token=TOKEN, node=NODE, header=wrong)) + b"\n"
            answers = await anyio.to_thread.run_sync(said_to, address, line)
            assert [bool(answer.error) for answer in answers] == [True], name
        negative = msgspec.json.encode(Put(token=TOKEN, node=NODE, header=header)).replace(
            b'"data_bytes":', b'"data_bytes":-'
        )
        assert (await anyio.to_thread.run_sync(said_to, address, negative + b"\n"))[0].error
    assert os.listdir(tmp_path / "bob") == []


@pytest.mark.parametrize(
    "node", ["../../up", "/etc/passwd", ".", "..", "a/b", "a-1-0.slot", "zürich rack 4", "%2e", "\0"]
)
async def test_strange_node_name_stays_in_the_folder(tmp_path: Path, node: str) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        await offer(address, TOKEN, NodeId(node), tmp_path / "own.slot", header)
    assert os.listdir(tmp_path / "bob") == [replica_name(NodeId(node), Rank(0), 0)]
    assert sorted(os.listdir(tmp_path)) == ["bob", "own.slot"]


@pytest.mark.parametrize("node", ["", "n" * 300, "ü" * 60])
async def test_node_without_a_usable_name_is_refused(tmp_path: Path, node: str) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    async with serving(tmp_path / "bob") as address:
        with pytest.raises(WireError, match="is no name of a node"):
            await offer(address, TOKEN, NodeId(node), tmp_path / "own.slot", header)
    assert os.listdir(tmp_path / "bob") == []


async def test_link_in_the_place_of_a_replica_is_not_followed(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    (tmp_path / "precious").write_bytes(bytes(header.file_bytes))
    async with serving(tmp_path / "bob") as address:
        replica(tmp_path / "bob", 0).symlink_to(tmp_path / "precious")
        await send(address, tmp_path / "own.slot", header)
    assert not any((tmp_path / "precious").read_bytes())
    assert not replica(tmp_path / "bob", 0).is_symlink()
    assert steps_in(tmp_path / "bob") == {1}


async def test_lying_source_allocates_nothing_and_the_next_one_is_asked(tmp_path: Path) -> None:
    source = tmp_path / "own.slot"
    header = a_slot(source, step(1))
    lies = [*absurd(header).values(), header]
    replies = [msgspec.json.encode(Answer(header=each, node="eve\n", file="\x1b[2J")) + b"\n" for each in lies]
    replies += [b"rubbish\n", b'{"error":5}\n', b"", b'{"header":null}\n']
    with closing(socket.create_server(("127.0.0.1", 0))) as door:

        def lie() -> None:
            for reply in replies:
                connected, _ = door.accept()
                with connected:
                    connected.recv(1 << 16)
                    connected.sendall(reply)

        thread = threading.Thread(target=lie)
        thread.start()
        eve = Address("127.0.0.1", door.getsockname()[1])
        async with serving(tmp_path / "bob", {(step(1), Rank(0)): source}) as address:
            for _ in replies[:-1]:
                with pytest.raises(WireError) as raised:
                    await fetch([eve], TOKEN, step(1), Rank(0), (0,), tmp_path)
                assert str(raised.value).isprintable()
                assert sorted(os.listdir(tmp_path)) == ["bob", "own.slot"]
            path = await fetch([eve, address], TOKEN, step(1), Rank(0), range(3), tmp_path)
        thread.join()
    assert is_whole(path)


async def test_receiver_that_asks_for_chunks_that_there_are_not_is_refused(tmp_path: Path) -> None:
    header = a_slot(tmp_path / "own.slot", step(1))
    assert header.job == JOB
    for again in ((99,), (-1,), (0, 0), tuple(range(50_000))):
        with closing(socket.create_server(("127.0.0.1", 0))) as door:

            def take(again: tuple[int, ...] = again, door: socket.socket = door) -> None:
                connected, _ = door.accept()
                with connected, connected.makefile("rb") as lines:
                    lines.readline()
                    connected.sendall(msgspec.json.encode(Answer()) + b"\n")
                    lines.read(header.hashed_bytes + 16 * header.chunks)
                    connected.sendall(msgspec.json.encode(Answer(again=again)) + b"\n")

            thread = threading.Thread(target=take)
            thread.start()
            with pytest.raises(WireError, match="asked for again that there are not"):
                await send(Address("127.0.0.1", door.getsockname()[1]), tmp_path / "own.slot", header)
            thread.join()
