"""Imports what the program needs once, then forks workers and stores of it in milliseconds.

`python -u -m perdure.trainer.forkserver --fd N --nproc K [--preload a,b] --script-kind script|module --target T` talks
to the agent (its parent) over descriptor N. It never touches CUDA, starts no thread, and what it forks belongs to the
agent. It knows nothing of generations; it forks what it is asked to.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = "/dev/null"  # -m put the current folder there, and a random.py in it is the user's, not ours

import argparse
import array
import gc
import json
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from perdure.errors import PerdureError, WireError
from perdure.trainer import heartbeat, preload, process, progress, store, worker
from perdure.wire.messages import (
    Entry,
    ForkReply,
    ForkRequest,
    ForkServerIn,
    ForkServerOut,
    ForkServerParked,
    ForkServerReady,
    StoreRequest,
)

_PACKET = 1 << 20
_DESCRIPTORS = 3
"""Of a ForkRequest: stdout, stderr, heartbeat page."""
_QUIET = 0.4
"""Seconds without a request after which processes are forked ahead: never while a generation is being started."""

_decoder = msgspec.json.Decoder(ForkServerIn)


class Order(NamedTuple):
    """A request and its descriptors; for a store, the write end of the pipe in which it tells its port."""

    request: ForkRequest | StoreRequest
    fds: tuple[int, ...]


class Child(NamedTuple):
    """What a forked process has to do, and the process between it and the server, which ends at once."""

    order: "Order | Parking"
    between: int


class Parking(NamedTuple):
    """A process that is forked ahead gets its order later, over `place`."""

    place: socket.socket


class Parked(NamedTuple):
    """The server's view of a process that waits."""

    pid: int
    place: socket.socket


# --- getting warm ----------------------------------------------------------------------------------------------------


def warm_up(kind: str, target: str, extra: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Import; gives the names of what was imported and notes on what could not be."""
    imported, notes = preload.bring_in(preload.libraries(kind, target), optional=True)
    more, more_notes = preload.bring_in([preload.Import(name, ()) for name in extra], optional=False)
    if "torch" in sys.modules:
        later, _ = preload.bring_in([preload.Import(name, ()) for name in preload.TORCH_LATER], optional=True)
        more += later
    gc.collect()
    gc.freeze()  # a collection in a worker shall not copy every page of the imports
    return tuple(dict.fromkeys([*imported, *more])), notes + more_notes


# --- serving ---------------------------------------------------------------------------------------------------------


class ForkServer:
    """The loop. `serve` returns None in the server when the agent is gone, and a Child in each process it forks."""

    def __init__(self, channel: socket.socket, refusal: str, ahead: int) -> None:
        """`ahead`: how many processes to have forked before they are asked for."""
        self._channel = channel
        self._refusal = refusal
        self._ahead = 0 if refusal else ahead
        self._parked: list[Parked] = []
        self._stores: dict[int, tuple[StoreRequest, int]] = {}
        """Read end of its pipe → a store that has not told its port yet, and its pid."""

    def serve(self) -> Child | None:
        while True:
            poll = select.poll()  # no descriptor of its own that a child would have to close
            for fd in (self._channel.fileno(), *self._stores):
                poll.register(fd, select.POLLIN)
            lacking = len(self._parked) < self._ahead
            ready = poll.poll(_QUIET * 1000 if lacking else None)
            if not ready and lacking:
                child = self._park(self._ahead - len(self._parked))
                if child is not None:
                    return child
            for fd, _ in ready:
                if fd != self._channel.fileno():
                    self._finish_store(fd)
                    continue
                orders = self._receive()
                if orders is None:
                    return None
                accepted = [order for order in orders if self._accept(order)]
                child = self._fork([order for order in accepted if not self._hand_over(order)])
                if child is not None:
                    return child

    def _receive(self) -> list[Order] | None:
        """All requests that wait, so that they share the process between; None: the agent is gone."""
        orders: list[Order] = []
        flags = 0
        while True:
            try:
                data, fds, seen = _receive_packet(self._channel, flags)
            except BlockingIOError:
                return orders
            except ConnectionError:
                return None
            if not data:
                return None
            if seen & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("the agent sent the fork server a packet that is too large")
            orders.append(Order(_decoder.decode(data), fds))
            flags = socket.MSG_DONTWAIT

    def _accept(self, order: Order) -> bool:
        request, fds = order
        problem = f"forking is unsafe here: {self._refusal}" if self._refusal else ""
        if not problem and isinstance(request, ForkRequest):
            if request.launch.entry is Entry.PROGRAM:
                problem = f"{request.launch.target} is a program of its own and cannot be forked; spawn it"
            elif len(fds) != _DESCRIPTORS:
                problem = f"a fork request carries {len(fds)} descriptors, not stdout, stderr and heartbeat page"
        if problem:
            self._reply(ForkReply(id=request.id, error=problem))
            _close(fds)
        return not problem

    # --- forked ahead ------------------------------------------------------------------------------------------------

    def _park(self, count: int) -> Child | None:
        """Fork `count` processes that wait for an order: it saves the forks when every millisecond counts."""
        places = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        told, tell = os.pipe()
        try:
            first = os.fork()
        except OSError:
            self._ahead = 0  # no room for what is only a convenience
            _close((told, tell))
            for pair in places:
                pair[0].close()
                pair[1].close()
            return None
        if first == 0:
            child = _fork_between([Parking(theirs) for _, theirs in places], tell)
            assert isinstance(child.order, Parking)
            kept = child.order.place.fileno()
            _close(theirs.detach() for _, theirs in places if theirs.fileno() != kept)
            _close((told, tell, *(ours.detach() for ours, _ in places), *self._own_descriptors()))
            return child
        os.close(tell)
        os.waitpid(first, 0)
        with open(told, "rb") as file:
            answers: list[int | str] = [msgspec.json.decode(line, type=int | str) for line in file]
        for ours, theirs in places:
            theirs.close()
            answer = answers.pop(0) if answers else ""
            if isinstance(answer, int):
                self._parked.append(Parked(answer, ours))
            else:
                self._ahead = 0
                ours.close()
        send(self._channel, ForkServerParked(pids=tuple(parked.pid for parked in self._parked)))
        return None

    def _hand_over(self, order: Order) -> bool:
        """Give `order` to a process that waits, and answer it; False: there is none."""
        request, fds = order
        pipe = os.pipe() if isinstance(request, StoreRequest) else None
        given = list(fds) if pipe is None else [pipe[1]]
        while self._parked:
            parked = self._parked.pop(0)
            with parked.place:
                try:
                    socket.send_fds(parked.place, [msgspec.json.encode(request)], given)
                except ConnectionError:
                    continue  # somebody has ended it
            _close(given)
            if pipe is not None:
                assert isinstance(request, StoreRequest)
                self._stores[pipe[0]] = (request, parked.pid)
            else:
                self._reply(ForkReply(id=request.id, pid=parked.pid))
            return True
        if pipe is not None:
            _close(pipe)
        return False

    def _own_descriptors(self) -> tuple[int, ...]:
        """What a forked process has to close of the server's."""
        parked = tuple(parked.place.detach() for parked in self._parked)
        return (self._channel.detach(), *self._stores, *parked)

    # --- forked on request -------------------------------------------------------------------------------------------

    def _fork(self, orders: list[Order]) -> Child | None:
        """Fork all, as grandchildren: the process between ends at once, and the agent (a subreaper) adopts them."""
        if not orders:
            return None
        pipes = {i: os.pipe() for i, order in enumerate(orders) if isinstance(order.request, StoreRequest)}
        orders = [Order(o.request, (pipes[i][1],)) if i in pipes else o for i, o in enumerate(orders)]
        told, tell = os.pipe()
        try:
            first = os.fork()
        except OSError as error:
            _close((told, tell, *(fd for pair in pipes.values() for fd in pair), *(fd for o in orders for fd in o.fds)))
            for order in orders:
                self._reply(ForkReply(id=order.request.id, error=f"fork failed: {error.strerror}"))
            return None
        if first == 0:
            child = _fork_between(orders, tell)
            assert isinstance(child.order, Order)
            kept = set(child.order.fds)
            _close(fd for o in orders for fd in o.fds if fd not in kept)
            _close((told, tell, *(read for read, _ in pipes.values()), *self._own_descriptors()))
            return child
        os.close(tell)
        _close(fd for order in orders for fd in order.fds)
        self._answer(orders, pipes, first, told)
        return None

    def _answer(self, orders: list[Order], pipes: dict[int, tuple[int, int]], between: int, told: int) -> None:
        os.waitpid(between, 0)  # from here on the new processes are the agent's children
        with open(told, "rb") as file:
            answers: list[int | str] = [msgspec.json.decode(line, type=int | str) for line in file]
        answers += ["the forking process was killed"] * (len(orders) - len(answers))
        for i, (order, answer) in enumerate(zip(orders, answers, strict=True)):
            if isinstance(answer, str):
                self._reply(ForkReply(id=order.request.id, error=f"fork failed: {answer}"))
                _close(pipes[i][:1] if i in pipes else ())
            elif isinstance(order.request, StoreRequest):
                self._stores[pipes[i][0]] = (order.request, answer)
            else:
                self._reply(ForkReply(id=order.request.id, pid=answer))

    def _finish_store(self, fd: int) -> None:
        request, pid = self._stores.pop(fd)
        with open(fd, "rb") as file:
            line = file.readline()
        told = json.loads(line) if line else {"error": "the store ended before it was bound"}
        self._reply(ForkReply(id=request.id, pid=pid, **told))  # also with an error: the agent reaps it

    def _reply(self, message: ForkServerOut) -> None:
        send(self._channel, message)


def _fork_between(orders: Sequence[Order | Parking], tell: int) -> Child:
    """In the process between: fork one process for each order, tell their pids, end. Returns only in the new ones."""
    between = os.getpid()
    for order in orders:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(tell, msgspec.json.encode(error.strerror) + b"\n")
            continue
        if pid == 0:
            return Child(order, between)
        os.write(tell, msgspec.json.encode(pid) + b"\n")
    os._exit(0)


def _receive_packet(channel: socket.socket, flags: int) -> tuple[bytes, tuple[int, ...], int]:
    # Not socket.recv_fds: it ignores its flags (Python 3.11).
    room = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, seen, _ = channel.recvmsg(_PACKET, room, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, tuple(fds), seen


def send(channel: socket.socket, message: ForkServerOut) -> None:
    """Nothing is lost where the agent is gone: its next sign is the end of the channel."""
    try:
        channel.send(msgspec.json.encode(message))
    except ConnectionError:
        return


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


# --- in the forked process -------------------------------------------------------------------------------------------


def become_worker(request: ForkRequest, fds: Sequence[int]) -> None:
    """Everything that the agent would have set up for a worker that it spawns."""
    stdout, stderr, page = fds
    process.redirect(stdout, stderr)
    try:
        os.environ.update(request.env)
        if request.cpus:
            os.sched_setaffinity(0, request.cpus)
        heartbeat.attach(page, request.slot, request.generation)
    except (PerdureError, OSError) as error:
        raise SystemExit(f"perdure: the worker in slot {request.slot} could not be set up: {error}") from None
    _close(fds)
    process.fresh_randomness()
    progress.count_optimizer_steps()


def wait_for_order(place: socket.socket) -> Order:
    """The order of a process that was forked ahead; it ends when the server does."""
    with place:
        data, fds, _ = _receive_packet(place, 0)
    if not data:
        os._exit(0)
    return Order(_decoder.decode(data), fds)


def run_child(child: Child, agent: int) -> None:
    """Become the worker or the store. What the user's program raises comes out."""
    os.setsid()
    process.default_signals()
    process.wait_for_adoption(child.between, agent)
    order = child.order if isinstance(child.order, Order) else wait_for_order(child.order.place)
    request, fds = order
    if isinstance(request, ForkRequest):
        become_worker(request, fds)
        worker.run_program(request.launch.entry.value, request.launch.target, request.launch.args)
    else:
        store.serve(request.host, request.port, fds[0])


# --- the program -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> tuple[Child, int] | None:
    """None when the server ends; in a forked process what it shall do, and the agent's pid."""
    started = time.monotonic()
    agent = os.getppid()
    parser = argparse.ArgumentParser(prog="perdure.trainer.forkserver")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--nproc", type=int, default=1, help="workers that will be asked for")
    parser.add_argument("--preload", default="", help="modules to import, with commas between")
    parser.add_argument("--script-kind", choices=(worker.SCRIPT, worker.MODULE), required=True)
    parser.add_argument("--target", required=True)
    options = parser.parse_args(argv)
    process.die_with(agent)
    process.default_signals()
    process.ignore_interrupts()
    process.close_inherited({options.fd})
    channel = socket.socket(fileno=options.fd)
    channel.set_inheritable(False)
    worker.set_first_path(options.script_kind, options.target)
    imported, notes = warm_up(options.script_kind, options.target, [m for m in options.preload.split(",") if m])
    refusal = process.unsafe_to_fork()
    note = "; ".join([refusal, *notes] if refusal else notes)
    seconds = time.monotonic() - started
    send(channel, ForkServerReady(warm=not refusal, seconds=seconds, imported=imported, note=note))
    ahead = options.nproc + (1 if "torch" in sys.modules else 0)  # the ranks of the next generation, and its store
    child = ForkServer(channel, refusal, ahead).serve()
    return None if child is None else (child, agent)


if __name__ == "__main__":
    _forked = main()
    if _forked is not None:  # out of the server's loop: the program runs with nothing of it on the stack
        run_child(*_forked)
