"""Where the nodes of a job meet, and which of them start on this machine.

Knows torchrun's rules for them (torch 2.13, `torch.distributed.run`); resolves no name and opens no socket.
"""

import os
import re
import socket

import msgspec

from perdure.cli.command_line import Values
from perdure.cli.request import NodeToStart
from perdure.errors import ConfigError
from perdure.vocab.generation import Address
from perdure.vocab.ids import NodeId

C10D_PORT = 29400
STATIC_PORT = 29500
_HOST = re.compile(r"[\w.:%-]+")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes, and how many of them here."""

    low: int
    high: int
    spares: int
    here: int

    @property
    def total(self) -> int:
        return self.high + self.spares


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Address | None
    owner: bool | None = None
    master_addr: str | None = None
    master_port: int = 0
    notes: tuple[str, ...] = ()


def read_shape(values: Values) -> Shape:
    """--nnodes, --spares and --local-nodes. Raises ConfigError where they do not fit each other."""
    spares = values.integer("spares", 0) or 0
    here = values.integer("local_nodes", 1)
    text = values.text("nnodes")
    if text is not None:
        low, high = _read_range(values, text)
    elif here is None:
        low = high = 1
    elif here > spares:
        low = high = here - spares
    else:
        raise ConfigError(f"--local-nodes {here} leaves no node to work beside --spares {spares}; start more nodes")
    if here is not None and here > high + spares:
        raise ConfigError(
            f"--local-nodes {here} is more than --nnodes {high} and --spares {spares} need; "
            f"give --local-nodes {high + spares}, or --spares {here - high}"
        )
    return Shape(low=low, high=high, spares=spares, here=here or 1)


def _read_range(values: Values, text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < 1:
        raise values.wrong("nnodes", "a number of at least 1, or MIN:MAX as in 2:4")
    if numbers[0] > numbers[-1]:
        raise ConfigError(
            f"{values.source('nnodes')} is {text!r}, but the fewest come first; write {numbers[1]}:{numbers[0]}"
        )
    return numbers[0], numbers[-1]


def find_meeting(values: Values, shape: Shape, is_host: bool | None) -> Meeting:
    """Where control listens. Raises ConfigError where other nodes could not find it."""
    backend = values.text("rdzv_backend")
    backend = "static" if backend is None else backend
    if backend not in ("static", "c10d"):
        raise ConfigError(
            f"{values.source('rdzv_backend')} is {backend!r}, but Perdure brings its own control; "
            "use c10d or static with --rdzv-endpoint HOST:PORT"
        )
    standalone = values.switch("standalone")
    static = backend == "static" and not standalone
    addr, port = values.text("master_addr"), values.integer("master_port", 1, 65535)
    if addr is not None:
        _check_host(values, "master_addr", addr)
    text = (values.text("rdzv_endpoint") or "").strip()
    rank = values.integer("node_rank", 0)
    notes = []
    if standalone and text:
        notes.append(f"{values.source('rdzv_endpoint')} {text} is not used with --standalone, as in torchrun")
    endpoint = _endpoint(values, text, shape, static) if text and not standalone else None
    meant_by_master = static and not text and (addr is not None or port is not None)
    if meant_by_master and shape.total > shape.here:
        endpoint = Address(addr or "127.0.0.1", port or STATIC_PORT)
        addr = port = None
    elif (addr is not None or port is not None) and not meant_by_master and endpoint is not None:
        name = "master_addr" if addr is not None else "master_port"
        notes.append(f"{values.source(name)} is not used where there is an endpoint, as in torchrun")
        addr = port = None
    _check_reach(values, shape, endpoint, standalone)
    owner = rank == 0 if static and rank is not None else None
    return Meeting(
        endpoint=endpoint,
        owner=owner if is_host is None else is_host,
        master_addr=addr,
        master_port=port or 0,
        notes=tuple(notes),
    )


def _endpoint(values: Values, text: str, shape: Shape, static: bool) -> Address | None:
    host, port = split_endpoint(values.source("rdzv_endpoint"), text, STATIC_PORT if static else C10D_PORT)
    if port != 0:
        return Address(host, port)
    if host not in _LOOPBACK and shape.total > shape.here:
        raise ConfigError(
            f"{values.source('rdzv_endpoint')} {text} has port 0, which other machines cannot know; "
            f"give a port, as in {host}:{C10D_PORT}"
        )
    return None


def split_endpoint(source: str, text: str, default_port: int) -> tuple[str, int]:
    """Host and port of `text`: a name or address, IPv6 in brackets when a port follows."""
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?", text)
    plain = re.fullmatch(r"([^:\[\]/]+)(?::(\d{1,5}))?", text)
    match = bracketed or plain
    if match is None or not _HOST.fullmatch(match[1]) or int(match[2] or 0) > 65535:
        raise ConfigError(f"{source} is {text!r}, but must be HOST or HOST:PORT, as in head:29400 or [fd00::1]:29400")
    return match[1], default_port if match[2] is None else int(match[2])


def _check_host(values: Values, dest: str, host: str) -> None:
    if not _HOST.fullmatch(host.strip("[]")):
        raise values.wrong(dest, "a host name or an address")


def _check_reach(values: Values, shape: Shape, endpoint: Address | None, standalone: bool) -> None:
    """Without an endpoint nobody else can come: enough nodes must start here."""
    if endpoint is not None:
        return
    if values.text("local_nodes") is None:
        enough = shape.total == 1 or (standalone and shape.low == 1 and shape.spares == 0)
    else:
        enough = shape.here >= shape.low + shape.spares
    if not enough:
        spares = f" and {shape.spares} spare{'s' if shape.spares > 1 else ''}" if shape.spares else ""
        raise ConfigError(
            f"{shape.low if shape.low == shape.high else f'{shape.low} to {shape.high}'} "
            f"node{'s' if shape.high > 1 else ''}{spares} are asked for, but {shape.here} would start; "
            f"start all on this machine by --local-nodes {shape.total}, "
            f"or name the meeting point of several machines by --rdzv-endpoint HOST:PORT"
        )


def nodes_here(values: Values, shape: Shape, endpoint: Address | None) -> tuple[NodeToStart, ...]:
    """The nodes to start on this machine, spares last."""
    rank = values.integer("node_rank", 0)
    if rank is not None and rank + shape.here > shape.total:
        here = f" with --local-nodes {shape.here}" if shape.here > 1 else ""
        raise ConfigError(
            f"{values.source('node_rank')} {rank}{here} is beyond the last of {shape.total} nodes; "
            f"ranks go from 0 to {shape.total - 1}, spares last"
        )
    first = rank or 0
    if endpoint is None:
        names = [f"node-{first + i}" for i in range(shape.here)]
        workers = shape.here - shape.spares
    else:
        names = _names_on_this_host(values, shape, endpoint, rank)
        # Without a rank, who comes after --nnodes are full is a spare.
        workers = shape.here if rank is None else shape.high - first
    return tuple(NodeToStart(name=NodeId(name), order=first + i, standby=i >= workers) for i, name in enumerate(names))


def _names_on_this_host(values: Values, shape: Shape, endpoint: Address, rank: int | None) -> list[str]:
    """Stable over restarts, and different where several launchers share a machine as far as that can be seen."""
    host, local = socket.gethostname(), values.text("local_addr")
    if rank is not None:
        return [f"{host}-{rank + i}" for i in range(shape.here)]
    if local is not None:
        host = f"{host}-{local}"
    elif endpoint.host in _LOOPBACK:  # several launchers meet on one machine
        host = f"{host}-p{os.getpid()}"
    return [host] if shape.here == 1 else [f"{host}.{i}" for i in range(shape.here)]
