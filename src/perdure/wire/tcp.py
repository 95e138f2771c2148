"""Sockets and TLS: listening, connecting, and the options that make a cut network seen in seconds.

Knows addresses and certificates; does not know HTTP, tokens or messages.
"""

import errno
import os
import socket
import ssl

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener
from anyio.streams.tls import TLSStream

from perdure.errors import ConfigError, HostError, UntrustedError, WireError
from perdure.vocab.generation import Address

DEAD_AFTER_MS = 10_000
"""Sent or probing bytes that nobody acknowledged for as long end a connection (TCP_USER_TIMEOUT, tcp(7))."""
BACKLOG = 1024


class GoneError(Exception):
    """The connection has ended. Private to this room: callers make a WireError of it, or nothing."""


class Listener:
    """Bound and listening sockets. `address` can be published: connections queue until `serve` accepts them."""

    def __init__(self, address: Address, doors: list[SocketListener], tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.doors = doors
        self.tls = tls

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):  # else a cancelled caller would leave at the first door
            for door in self.doors:
                await anyio.aclose_forcefully(door)


async def listen(host: str, port: int, tls: ssl.SSLContext | None = None) -> Listener:
    """Listen on every address that `host` has here (empty: all, IPv4 and IPv6); port 0: any free one.

    Raises HostError when the port is taken or the address is not one of this machine's.
    """
    sockets: list[socket.socket] = []
    try:
        for family, local in await _local_addresses(host, port):
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets += _bind(family, (local[0], chosen, *local[2:]), dual=host == "::")
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as exc:
        for made in sockets:
            made.close()
        raise HostError(_cannot_listen(Address(host, port), exc)) from exc
    address = Address(host, sockets[0].getsockname()[1])
    return Listener(address, [await SocketListener.from_socket(made) for made in sockets], tls)


async def _local_addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    found = await anyio.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bind(family: int, local: tuple[str | int, ...], dual: bool) -> list[socket.socket]:
    """A listening socket, or none where this machine lacks the address family (IPv6 that is switched off)."""
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        if exc.errno == errno.EAFNOSUPPORT:
            return []
        raise
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # A name may stand for 0.0.0.0 and :: at once, so each socket takes its own family; a plain :: means both.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        made.bind(local)
        made.listen(BACKLOG)
    except OSError as exc:
        made.close()
        if exc.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6 and not dual:
            return []
        raise
    return [made]


def _cannot_listen(address: Address, exc: OSError) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"port {address.port} on {address.host or 'this machine'} is taken; choose another one, or 0 for a free one"
        )
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: {address.host or 'it'} is not an address of this machine"
    if exc.errno == errno.EACCES:
        return f"cannot listen on {address}: ports below 1024 need privileges; choose a higher one"
    return f"cannot listen on {address}: {why(exc)}"


async def connect(address: Address, tls: ssl.SSLContext | None) -> ByteStream:
    """A connection to `address`. The caller bounds the time. Raises WireError."""
    try:
        stream = await anyio.connect_tcp(address.host, address.port)
    except OSError as exc:
        raise WireError(f"cannot reach {address}: {why(exc)}") from exc
    try:
        tune(stream)
        if tls is None:
            return stream
        return await TLSStream.wrap(stream, hostname=address.host, ssl_context=tls, standard_compatible=False)
    except BaseException as exc:
        await anyio.aclose_forcefully(stream)
        if _is_final(exc):
            raise UntrustedError(
                f"cannot speak TLS with {address} ({why(exc)}); give this machine its certificate by --tls-ca"
            ) from exc
        if isinstance(exc, OSError | anyio.EndOfStream | anyio.BrokenResourceError):
            raise WireError(f"cannot speak TLS with {address}: {why(exc)}") from exc
        raise


def _is_final(exc: BaseException) -> bool:
    """A certificate that is not accepted, or a peer that does not speak TLS; not a connection that broke off."""
    return isinstance(exc, ssl.SSLError) and not isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def tune(stream: ByteStream) -> None:
    """No delay for small messages, and an end within about ten seconds when the network is cut, also when idle.

    TCP_USER_TIMEOUT alone sees only unacknowledged data; with keep-alive probes it covers idle connections too, and
    then decides instead of the number of probes (tcp(7)).
    """
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_MS)


async def receive(stream: ByteStream) -> bytes:
    """The next bytes, b"" at the end. Raises GoneError when the connection broke."""
    try:
        return await stream.receive()
    except anyio.EndOfStream:
        return b""
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as exc:
        raise GoneError(why(exc)) from exc


async def send(stream: ByteStream, data: bytes) -> None:
    """Hand `data` to the kernel. Raises GoneError when the connection broke."""
    try:
        await stream.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as exc:
        raise GoneError(why(exc)) from exc


def why(exc: BaseException) -> str:
    """The operating system's or TLS's own words for what failed, from the innermost cause."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    if isinstance(exc, ExceptionGroup):
        return why(exc.exceptions[0])
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc.verify_message
    if isinstance(exc, OSError):
        # asyncio puts "Connect call failed (address)" in place of the reason; the number still tells it.
        known = exc.errno in errno.errorcode and not isinstance(exc, socket.gaierror | ssl.SSLError)
        return os.strerror(exc.errno or 0).lower() if known else exc.strerror or str(exc)
    return "the connection was closed" if isinstance(exc, anyio.EndOfStream) else str(exc) or type(exc).__name__


def server_tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    """Context of a server that shows `cert_file` (PEM, with its chain). Raises ConfigError naming the file."""
    for path in (cert_file, key_file):
        _must_be_readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"certificate {cert_file} with key {key_file} cannot be used ({why(exc)}); give a PEM certificate and key"
        ) from exc
    return context


def client_tls(ca_file: str) -> ssl.SSLContext:
    """Context of a client that trusts only `ca_file` (PEM). Raises ConfigError naming the file."""
    _must_be_readable(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"certificate {ca_file} cannot be used ({why(exc)}); give a PEM certificate") from exc
    return context


def _must_be_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as exc:
        raise ConfigError(f"cannot read certificate or key {path}: {why(exc)}") from exc
