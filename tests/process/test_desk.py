"""The commit desk as a process: real sockets, real tokens, two servers' reports, kill -9, and its own end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from perdure.control.desk import DeskConfig, DeskFile
from perdure.errors import AccessDeniedError, WireError
from perdure.vocab.generation import Address
from perdure.vocab.ids import JobId
from perdure.wire.channel import Channel, RefusedError
from perdure.wire.memory import MemoryOrders, MemoryReport
from tests.unit.control.a_memory import a_memory, an_id

TOKEN = "0123456789abcdef"
LIMIT = 60.0


def start(config: bytes, **options: object) -> subprocess.Popen[bytes]:
    read, write = os.pipe()
    os.write(write, config)
    os.close(write)
    argv = [sys.executable, "-P", "-m", "perdure.control.desk", "--config-fd", str(read)]
    try:
        return subprocess.Popen(argv, pass_fds=[read], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]
    finally:
        os.close(read)


def encode(**changes: object) -> bytes:
    return msgspec.json.encode(DeskConfig(job=JobId("job"), token=TOKEN, **changes))  # type: ignore[arg-type]


@contextmanager
def a_desk(**changes: object) -> Iterator[tuple[subprocess.Popen[bytes], DeskFile]]:
    process = start(encode(**changes))
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, msgspec.json.decode(process.stdout.readline(), type=DeskFile)
    finally:
        process.kill()
        process.wait(LIMIT)
        process.stdout.close()
        process.stderr.close()


async def post(
    address: Address, report: MemoryReport, seen: int = 0, wait: float = 0.0, token: str = TOKEN
) -> MemoryOrders:
    return await ask(address, "POST", "/v1/memory", msgspec.structs.replace(report, seen=seen, wait=wait), token)


async def ask(address: Address, method: str, path: str, body: msgspec.Struct, token: str = TOKEN) -> MemoryOrders:
    channel = Channel(address, token, None)
    try:
        return await channel.call(method, path, body, MemoryOrders, timeout=LIMIT)
    finally:
        await channel.aclose()


def test_desk_holds_an_answer_until_another_node_completes_the_checkpoint() -> None:
    async def story(address: Address) -> None:
        memory = a_memory(2).attached()
        await post(address, memory.reports[0])
        orders = await post(address, memory.reports[1])
        assert orders.world is not None
        memory.sealed(an_id(4))
        waited: list[MemoryOrders] = []

        async def wait() -> None:
            waited.append(await post(address, memory.reports[0], seen=orders.version, wait=30.0))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            assert (await post(address, memory.reports[1])).version >= orders.version
        final = waited[0] if waited[0].committed else await post(address, memory.reports[0], waited[0].version, 30.0)
        assert final.committed == an_id(4)

    with a_desk() as (_, found):
        anyio.run(story, found.address)


def test_desk_answers_after_the_wait_although_there_is_no_news() -> None:
    async def story(address: Address) -> None:
        report = a_memory(1).attached().reports[0]
        orders = await post(address, report)
        assert (await post(address, report, orders.version, 0.05)).version == orders.version

    with a_desk() as (_, found):
        anyio.run(story, found.address)


def test_desk_that_was_killed_is_followed_by_one_that_finds_out_everything() -> None:
    memory = a_memory(2).attached().sealed(an_id(4))

    async def tell(address: Address) -> MemoryOrders:
        await post(address, memory.reports[0])
        return await post(address, memory.reports[1])

    with a_desk() as (process, found):
        before = anyio.run(tell, found.address)
        process.kill()
        process.wait(LIMIT)
    with a_desk(port=found.address.port) as (_, again):
        after = anyio.run(tell, again.address)
    assert before.committed == after.committed == an_id(4)
    assert after.version > before.version


def test_desk_refuses_strangers_and_garbage() -> None:
    async def story(address: Address) -> None:
        with pytest.raises(AccessDeniedError):
            await post(address, a_memory(1).reports[0], token="another-token")
        for garbage in (DeskFile(job=JobId("x"), address=address, token="t", pid=1), an_id(1)):
            with pytest.raises(RefusedError, match="no MemoryReport"):
                await ask(address, "POST", "/v1/memory", garbage)
        with pytest.raises(RefusedError, match="there is nothing"):
            await ask(address, "GET", "/v1/records", an_id(1))
        assert (await post(address, a_memory(1).reports[0])).version > 0

    with a_desk() as (_, found):
        anyio.run(story, found.address)


def test_desk_ends_when_nobody_reports_any_more() -> None:
    with a_desk(linger=0.5) as (process, found):
        anyio.run(post, found.address, a_memory(1).reports[0])
        assert process.wait(LIMIT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_desk_ends_on_a_signal_while_an_answer_is_held(number: int) -> None:
    async def story(process: subprocess.Popen[bytes], address: Address) -> None:
        report = a_memory(1).attached().reports[0]
        orders = await post(address, report)
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(WireError):
                    await post(address, report, orders.version, 30.0)

            group.start_soon(wait)
            # This answer comes over another connection, after the held request has been sent.
            await post(address, report)
            process.send_signal(number)

    with a_desk() as (process, found):
        anyio.run(story, process, found.address)
        assert process.wait(LIMIT) == 0


def test_desk_dies_with_its_parent_where_it_was_asked_to() -> None:
    script = (
        "import subprocess, sys, os\n"
        "read, write = os.pipe(); os.write(write, sys.stdin.buffer.read()); os.close(write)\n"
        "argv = [sys.executable, '-P', '-m', 'perdure.control.desk', '--config-fd', str(read)]\n"
        "p = subprocess.Popen(argv, pass_fds=[read])\n"
        "p.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(encode(with_parent=True))
        parent.stdin.close()
        found = msgspec.json.decode(parent.stdout.readline(), type=DeskFile)
        desk = os.pidfd_open(found.pid)
        parent.kill()
        with ExitStack() as stack:
            stack.callback(os.close, desk)
            assert parent.stdout.read() == b""  # the desk held the other end until it died
    with pytest.raises(WireError):
        anyio.run(post, found.address, a_memory(1).reports[0])


def test_second_desk_of_a_file_gives_the_first_ones_address_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "desk"
    with a_desk(file=str(path)) as (first, found):
        assert path.stat().st_mode & 0o777 == 0o600
        with a_desk(file=str(path)) as (second, again):
            assert second.wait(LIMIT) == 0
        assert again == found
        first.kill()
        first.wait(LIMIT)
        with a_desk(file=str(path)) as (_, third):
            assert third.pid not in (first.pid, second.pid)
            assert json.loads(path.read_bytes())["pid"] == third.pid


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"", "holds no configuration"),
        (b'{"job": "x"}', "token"),
        (encode(linger=0.0), "linger"),
        (encode(port=70_000), "port"),
        (encode(host="192.0.2.1"), "not an address of this machine"),
        (encode(file="/no/such/folder/desk"), "no such file"),
        (msgspec.json.encode({"job": "j", "token": "short"}), "token must be"),
    ],
)
def test_desk_that_cannot_start_says_why_in_one_line(config: bytes, words: str) -> None:
    with start(config) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode in (1, 2)
    assert out == b""
    assert words in err.decode()
    assert err.decode().startswith("perdure: ")
    assert "Traceback" not in err.decode()
