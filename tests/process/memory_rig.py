"""A memory server as a real process, with a control and trainers that a test plays by real sockets."""

import array
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import anyio
import msgspec

from perdure.agent.memory.config import MemoryConfig
from perdure.host.proc import incarnation
from perdure.vocab.checkpoint import CheckpointId, Layout, SlotState, TensorPart
from perdure.vocab.ids import GenerationNumber, JobId, NodeId, Rank
from perdure.wire import slotfile
from perdure.wire.channel import Request, Response, listen, serve
from perdure.wire.digest import layout_hash, shards_hash
from perdure.wire.memory import (
    Attach,
    Attached,
    MemoryOrders,
    MemoryReport,
    Policy,
    SavePage,
    TrainerIn,
    TrainerOut,
    Written,
)
from perdure.wire.slots import DATA_START

JOB, TOKEN, WITHIN = JobId("job"), "a-token-of-the-test", 100.0


def checkpoint(step: int, generation: int = 1, attempt: int = 1) -> CheckpointId:
    return CheckpointId(attempt=attempt, generation=GenerationNumber(generation), step=step)


class Control:
    """Answers POST /v1/memory with `orders`; keeps the newest report of each node. Lives in a thread of its own."""

    def __init__(self) -> None:
        self.reports: dict[str, MemoryReport] = {}
        self._orders: MemoryOrders | None = None
        self._seen = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=anyio.run, args=(self._run,), daemon=True)

    def __enter__(self) -> "Control":
        self._thread.start()
        assert self._ready.wait(WITHIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop_call(self._scope.cancel)
        self._thread.join(WITHIN)

    def order(self, **changes: Any) -> None:
        """New orders, for everyone."""
        before = self._orders or MemoryOrders(version=0, attempt=1, generation=GenerationNumber(1))
        self._orders = msgspec.structs.replace(before, version=before.version + 1, **changes)
        self._loop_call(self._changed.set)

    def wait_for(self, what: Callable[[MemoryReport], bool], node: str = "n0") -> MemoryReport:
        """The first report of which `what` is true."""
        with self._seen:
            assert self._seen.wait_for(lambda: node in self.reports and what(self.reports[node]), WITHIN), (
                self.reports.get(node)
            )
            return self.reports[node]

    def _loop_call(self, what: Callable[[], object]) -> None:
        anyio.from_thread.run_sync(what, token=self._token)

    async def _run(self) -> None:
        self._token = anyio.lowlevel.current_token()
        self._changed = anyio.Event()
        listener = await listen("127.0.0.1", 0)
        self.address = listener.address
        with anyio.CancelScope() as self._scope:
            self._ready.set()
            await serve(self._answer, listener, token=TOKEN)

    async def _answer(self, request: Request) -> Response:
        report = request.read(MemoryReport)
        with self._seen:
            self.reports[report.node] = report
            self._seen.notify_all()
        with anyio.move_on_after(report.wait):
            while self._orders is None or self._orders.version == report.seen:
                await self._changed.wait()
                self._changed = anyio.Event()
        return Response.of(self._orders or MemoryOrders(version=0, attempt=1, generation=GenerationNumber(0)))


class Server:
    """`python -m perdure.agent.memory`."""

    def __init__(self, config: MemoryConfig, pass_fds: tuple[int, ...] = ()) -> None:
        read, write = os.pipe()
        os.write(write, msgspec.json.encode(config))
        os.close(write)
        argv = [sys.executable, "-P", "-m", "perdure.agent.memory", "--config-fd", str(read)]
        self.process = subprocess.Popen(argv, pass_fds=(read, *pass_fds), stderr=subprocess.PIPE, text=True)
        os.close(read)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WITHIN)

    def stop(self) -> tuple[int, str]:
        self.process.terminate()
        return self.end()

    def end(self) -> tuple[int, str]:
        """(exit code, what it said)"""
        _, said = self.process.communicate(timeout=WITHIN)
        return self.process.returncode, said


def a_config(control: Control, folder: object, node: str = "n0", **changes: Any) -> MemoryConfig:
    made = MemoryConfig(
        job=JOB,
        attempt=1,
        node=NodeId(node),
        folder=str(folder),
        control=control.address,
        token=TOKEN,
        nice=0,
        grace=5.0,
    )
    return msgspec.structs.replace(made, **changes)


@contextmanager
def a_server(control: Control, folder: object, **changes: Any) -> Iterator[Server]:
    """Running; killed at the end where the test has not ended it."""
    server = Server(a_config(control, folder, **changes))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def a_layout(rank: int = 0, world_size: int = 1, nbytes: int = 100_000) -> Layout:
    part = TensorPart(
        name="model.w", dtype="uint8", shape=(nbytes,), offsets=(0,), whole=(nbytes,), start=0, nbytes=nbytes
    )
    return Layout(rank=Rank(rank), world_size=world_size, parts=(part,), data_bytes=nbytes)


def an_attach(layout: Layout, generation: int = 1, **changes: Any) -> Attach:
    made = Attach(
        job=JOB,
        attempt=1,
        generation=GenerationNumber(generation),
        rank=layout.rank,
        world_size=layout.world_size,
        local_world_size=layout.world_size,
        trainer=incarnation(os.getpid()),
        layout=layout_hash(layout),
        shards=shards_hash(layout),
        tail_room=4096,
        policy=Policy(every=1),
    )
    return msgspec.structs.replace(made, **changes)


class Trainer:
    """One trainer's line: what `trainer.checkpoint.client` does, by hand."""

    everyone: ClassVar[list["Trainer"]] = []
    """Not freed yet."""

    def __init__(self, folder: object, layout: Layout | None = None, **attach: Any) -> None:
        self.link = connect(os.path.join(str(folder), "door"))
        self.slots: list[int] = []
        self._fds: list[int] = []
        self.everyone.append(self)
        self.layout = layout or a_layout()
        self.said = an_attach(self.layout, **attach)
        self.answer, fds = self._attach()
        self.slots, self._fds = fds[1:], fds
        if fds:
            self.page = memoryview(mmap.mmap(fds[0], mmap.PAGESIZE)).cast("q")

    def _attach(self) -> tuple[TrainerOut, list[int]]:
        fd = os.memfd_create("layout")
        os.write(fd, msgspec.json.encode(self.layout))
        self.send(self.said, fd)
        os.close(fd)
        return self.receive()

    def send(self, message: TrainerIn, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.link.sendmsg([msgspec.json.encode(message)], rights)

    def receive(self) -> tuple[TrainerOut, list[int]]:
        data, ancillary, _, _ = self.link.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 32), socket.MSG_CMSG_CLOEXEC)
        assert data, "the server has closed the connection"
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        return msgspec.json.decode(data, type=TrainerOut), list(fds)

    def word(self, word: SavePage) -> int:
        return self.page[word]

    def granted(self) -> int:
        """The slot to write next, when there is one."""
        wait_until(self.may_write, "no slot was given")
        return self.word(SavePage.GRANT)

    def may_write(self) -> bool:
        slot = self.word(SavePage.GRANT)
        return slot >= 0 and slotfile.read_header(self.slots[slot]).state is SlotState.FREE

    def begin(self, what: CheckpointId, fill: int) -> int:
        """WRITING, and half of the bytes."""
        slot = self.granted()
        fd = self.slots[slot]
        header = slotfile.read_header(fd)
        changes = {"state": SlotState.WRITING, "checkpoint": what, "writer": self.said.trainer, "tail_bytes": 1}
        slotfile.write_header(fd, msgspec.structs.replace(header, **changes))
        os.pwrite(fd, bytes([fill]) * (self.layout.data_bytes // 2), DATA_START)
        return slot

    def write_tail(self, what: CheckpointId, tail: bytes) -> int:
        """A whole save with this tail."""
        slot = self.begin(what, 7)
        fd, header = self.slots[slot], slotfile.read_header(self.slots[slot])
        os.pwrite(fd, tail, header.tail_start)
        slotfile.write_header(fd, msgspec.structs.replace(header, state=SlotState.WRITTEN, tail_bytes=len(tail)))
        self.send(Written(slot=slot, checkpoint=what, stall=0.01))
        return slot

    def write(self, what: CheckpointId, fill: int = 7, *, tell: bool = True) -> int:
        """A whole save."""
        slot = self.begin(what, fill)
        fd = self.slots[slot]
        os.pwrite(fd, bytes([fill]) * self.layout.data_bytes, DATA_START)
        slotfile.write_header(fd, msgspec.structs.replace(slotfile.read_header(fd), state=SlotState.WRITTEN))
        if tell:
            self.send(Written(slot=slot, checkpoint=what, stall=0.01))
        return slot

    def close(self) -> None:
        """As the kernel does it for a process that dies; slots stay readable for the test."""
        self.link.close()

    @classmethod
    def free_all(cls) -> None:
        while cls.everyone:
            one = cls.everyone.pop()
            one.link.close()
            for fd in one._fds:
                os.close(fd)


def attached(trainer: Trainer) -> Attached:
    assert isinstance(trainer.answer, Attached), trainer.answer
    return trainer.answer


def connect(path: str) -> socket.socket:
    """When the server is there."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(WITHIN)

    def is_there() -> bool:
        try:
            link.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    wait_until(is_there, f"nobody listens at {path}")
    return link


def wait_until(what: Callable[[], bool], problem: str) -> None:
    """Look often: pages and files tell nobody that they have changed."""
    pause = threading.Event()
    for _ in range(int(WITHIN / 0.005)):
        if what():
            return
        pause.wait(0.005)
    raise AssertionError(problem)


def slot_bytes(folder: object) -> int:
    """Allocated in all slot files."""
    return sum(e.stat().st_blocks * 512 for e in os.scandir(str(folder)) if e.name.endswith(".slot"))
