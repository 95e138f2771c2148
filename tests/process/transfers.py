"""Slot files, memory servers (in this process and in another one) and networks between them that fail, for tests."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec

from perdure.agent.memory.asking import NotNowError
from perdure.agent.memory.transfer import offer, serve
from perdure.errors import CorruptCheckpointError
from perdure.host.proc import incarnation
from perdure.vocab.checkpoint import CheckpointId, Layout, SlotState, TensorPart
from perdure.vocab.generation import Address
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire import digest, slotfile
from perdure.wire.slots import CHUNK, DATA_START, PAGE, SlotHeader
from perdure.wire.tcp import listen
from perdure.wire.transfer import replica_name

TOKEN, JOB, NODE = "a token of this job", JobId("j"), NodeId("ada")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
Slots = dict[tuple[CheckpointId, Rank], Path]


def step(number: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(attempt=1_700_000_000, generation=GenerationNumber(generation), step=number)


def a_slot(
    path: Path, checkpoint: CheckpointId, rank: int = 0, data: int = 2 * CHUNK + 123_456, job: JobId = JOB
) -> SlotHeader:
    """A sealed slot file whose bytes tell the step and the rank."""
    part = TensorPart(name="model.w", dtype="uint8", shape=(data,), offsets=(0,), whole=(data,), start=0, nbytes=data)
    layout = Layout(rank=Rank(rank), world_size=8, parts=(part,), data_bytes=data)
    text = msgspec.json.encode(layout)
    header = SlotHeader(
        sequence=0,
        job=job,
        rank=Rank(rank),
        world_size=8,
        state=SlotState.WRITING,
        checkpoint=checkpoint,
        writer=incarnation(os.getpid()),
        layout=digest.layout_hash(layout),
        shards=digest.shards_hash(layout),
        data_bytes=data,
        tail_room=2 * PAGE,
        tail_bytes=5000,
        layout_bytes=len(text),
    )
    path.parent.mkdir(exist_ok=True)
    fd = slotfile.create(str(path), header.file_bytes)
    try:
        pattern = f"step {checkpoint.step} rank {rank} ".encode() * 1000
        for at in range(0, data, len(pattern)):
            os.pwrite(fd, (str(at).encode() + pattern)[: min(len(pattern), data - at)], DATA_START + at)
        os.pwrite(fd, b"t" * 5000, header.tail_start)
        os.pwrite(fd, text, header.layout_start)
        return seal(fd, header)
    finally:
        os.close(fd)


def seal(fd: int, header: SlotHeader) -> SlotHeader:
    with slotfile.map_slot(fd) as whole, memoryview(whole) as view, view[DATA_START : header.hashes_start] as region:
        digests = digest.chunk_digests(region, 1)
    os.pwrite(fd, digests, header.hashes_start)
    assert header.checkpoint is not None
    root = digest.root_of(digests, header.layout, header.checkpoint)
    return slotfile.write_header(fd, msgspec.structs.replace(header, state=SlotState.SEALED, root=root))


def flip(path: Path, at: int) -> None:
    """One bit of one byte."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def hashed(path: Path) -> bytes:
    """The region that is hashed."""
    header = header_of(path)
    assert header is not None
    return path.read_bytes()[DATA_START : header.hashes_start]


def header_of(path: Path) -> SlotHeader | None:
    try:
        fd = slotfile.open_slot(str(path))
    except FileNotFoundError:
        return None
    try:
        return slotfile.read_header(fd)
    except CorruptCheckpointError:
        return None
    finally:
        os.close(fd)


def is_whole(path: Path) -> bool:
    """Sealed, and every byte is what was written."""
    header = header_of(path)
    if header is None or header.state is not SlotState.SEALED or header.checkpoint is None:
        return False
    fd = slotfile.open_slot(str(path))
    try:
        digests = slotfile.read_digests(fd, header)
    finally:
        os.close(fd)
    return (
        digest.bad_chunks(memoryview(hashed(path)), digests) == ()
        and digest.root_of(digests, header.layout, header.checkpoint) == header.root
    )


def replica(folder: Path, k: int, rank: int = 0, node: NodeId = NODE) -> Path:
    return folder / replica_name(node, Rank(rank), k)


def steps_in(folder: Path, rank: int = 0) -> set[int]:
    """Of the whole replicas."""
    found = [path for k in (0, 1) if is_whole(path := replica(folder, k, rank))]
    return {header.checkpoint.step for path in found if (header := header_of(path)) and header.checkpoint}


@asynccontextmanager
async def serving(
    folder: Path,
    slots: Slots | None = None,
    node: str = "bob",
    spent: Callable[[CheckpointId], bool] | None = None,
    sealed: list[tuple[NodeId, Path, SlotHeader]] | None = None,
    patience: float = 10.0,
    parity: dict[CheckpointId, str] | None = None,
) -> AsyncIterator[Address]:
    """A memory server's port, in this process."""
    await anyio.Path(folder).mkdir(exist_ok=True)
    listener = await listen("127.0.0.1", 0)

    def lookup(checkpoint: CheckpointId, rank: Rank) -> Path | None:
        return (slots or {}).get((checkpoint, rank))

    def on_sealed(node: NodeId, path: Path, header: SlotHeader) -> None:
        if sealed is not None:
            sealed.append((node, path, header))

    async def run() -> None:
        await serve(
            listener,
            TOKEN,
            lookup,
            job=JOB,
            node=NodeId(node),
            folder=folder,
            spent=spent,
            parity=lambda checkpoint: None if parity is None else parity.get(checkpoint),
            on_sealed=on_sealed,
            patience=patience,
        )

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                yield listener.address
            finally:
                group.cancel_scope.cancel()
    finally:
        await listener.aclose()


SERVER = """
import sys, anyio
from pathlib import Path
from perdure.agent.memory.transfer import serve
from perdure.wire import slotfile
from perdure.wire.tcp import listen
folder = Path(sys.argv[1])
def lookup(checkpoint, rank):
    return next((path for path in folder.glob("own-*") if f"-{rank}-{checkpoint.step}." in path.name), None)
async def main():
    listener = await listen("127.0.0.1", 0)
    print(listener.address.port, flush=True)
    await serve(listener, sys.argv[2], lookup, job="j", node="bob", folder=folder, patience=5.0)
anyio.run(main)
"""


@contextmanager
def another_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """A memory server's port, in a process that can be stopped and killed. Slots: own-RANK-STEP.slot."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder), TOKEN], env=ENV, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, Address("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Proxy:
    """A network between two servers that damages, stops or cuts what passes, at a byte of our choice."""

    def __init__(self, to: Address, act: Callable[["Proxy", int, bytes], bytes | None]) -> None:
        self._to, self._act = to, act
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._door.getsockname()[1])
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.connections = 0
        self._sockets = [self._door]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            far = socket.create_connection((self._to.host, self._to.port))
            self.connections += 1
            self._sockets += [near, far]
            for source, target, acts in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._carry, args=(source, target, acts), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, acts: bool) -> None:
        passed = 0
        try:
            while part := source.recv(1 << 16):
                sent = self._act(self, passed, part) if acts else part
                passed += len(part)
                if sent is None:
                    break
                target.sendall(sent)
        except OSError:
            pass
        _shut(source, target)

    def close(self) -> None:
        self.go_on.set()
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@contextmanager
def through(to: Address, act: Callable[[Proxy, int, bytes], bytes | None]) -> Iterator[Proxy]:
    proxy = Proxy(to, act)
    try:
        yield proxy
    finally:
        proxy.close()


def damage_at(byte: int, times: int = 1) -> Callable[[Proxy, int, bytes], bytes]:
    """One bit of what the asking side sends, this often."""
    left = [times]

    def act(proxy: Proxy, passed: int, part: bytes) -> bytes:
        if left[0] and passed <= byte < passed + len(part):
            left[0] -= 1
            at = byte - passed
            return part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
        return part

    return act


def stop_at(byte: int) -> Callable[[Proxy, int, bytes], bytes | None]:
    """Nothing passes from there on, and no connection ends."""

    def act(proxy: Proxy, passed: int, part: bytes) -> bytes | None:
        if passed + len(part) <= byte:
            return part
        proxy.reached.set()
        proxy.go_on.wait(60)
        return None

    return act


async def happened(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 30)


async def send(address: Address, path: Path, header: SlotHeader, patience: float = 10.0) -> None:
    await offer(address, TOKEN, NODE, path, header, patience=patience)


async def send_to_busy(address: Address, path: Path, header: SlotHeader) -> None:
    """As `copies` does: a peer that is still at an offer that was given up is asked again."""
    with anyio.fail_after(30):
        while True:
            try:
                return await send(address, path, header)
            except NotNowError:
                await anyio.sleep(0.02)
