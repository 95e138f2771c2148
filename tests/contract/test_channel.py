"""The channel on real sockets: what a call and a stream promise, and what no peer can do to a server."""

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream

from perdure.errors import AccessDeniedError, ConfigError, HostError, WireError
from perdure.vocab.generation import Address
from perdure.wire import http_server
from perdure.wire.channel import (
    Channel,
    Handler,
    Listener,
    RefusedError,
    Request,
    Response,
    Streamed,
    client_tls,
    listen,
    serve,
    server_tls,
)
from perdure.wire.messages import Problem
from perdure.wire.tokens import make_token, parse_token, read_token, write_token

pytestmark = pytest.mark.anyio
TOKEN = make_token()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Note(msgspec.Struct, frozen=True):
    text: str


async def echo(request: Request) -> Response:
    return Response.of(request.read(Note))


@asynccontextmanager
async def serving(
    handler: Handler,
    *,
    listener: Listener | None = None,
    on_denied: Callable[[str], None] | None = None,
    errors: list[Exception] | None = None,
) -> AsyncIterator[Address]:
    """A server for the length of the block. Errors that no test asked for fail it."""
    unexpected: list[Exception] = []
    collected = unexpected if errors is None else errors
    listener = listener or await listen("127.0.0.1", 0, None)

    async def run() -> None:
        await serve(handler, listener, token=TOKEN, on_denied=on_denied, on_error=collected.append)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        try:
            yield listener.address
        finally:
            group.cancel_scope.cancel()
    assert not unexpected


@asynccontextmanager
async def calling(address: Address, token: str = TOKEN, **options: object) -> AsyncIterator[Channel]:
    channel = Channel(address, token, **options)  # type: ignore[arg-type]
    try:
        yield channel
    finally:
        await channel.aclose()


async def say(address: Address, data: bytes) -> bytes:
    """Send `data` and give everything that comes back until the server closes."""
    answer = b""
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        await stream.send(data)
        with anyio.fail_after(5):
            try:
                while True:
                    answer += await stream.receive()
            except anyio.EndOfStream:
                return answer


def raw_request(line: str, *headers: str, token: str | None = TOKEN, body: bytes = b"") -> bytes:
    lines = [f"{line} HTTP/1.1", "host: test", *headers]
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_call_goes_there_and_back_on_one_connection() -> None:
    peers = set()

    async def handler(request: Request) -> Response:
        peers.add(request.peer)
        return await echo(request)

    async with serving(handler) as address, calling(address) as channel:
        for text in ("one", "two", "größer"):
            assert await channel.call("POST", "/v1/note", Note(text), Note) == Note(text)
    assert len(peers) == 1


async def test_request_has_path_query_and_method_decoded() -> None:
    async def handler(request: Request) -> Response:
        query = ",".join(f"{k}={v}" for k, v in request.query.items())
        return Response.of(Note(f"{request.method} {request.path} {query} {len(request.body)}"))

    async with serving(handler) as address, calling(address) as channel:
        got = await channel.call("GET", "/a%20b?node=n%2F1&wait=2&empty=", None, Note)
    assert got.text == "GET /a b node=n/1,wait=2,empty= 0"


async def test_many_calls_at_once_all_come_back() -> None:
    async with serving(echo) as address, calling(address) as channel:
        got: list[str] = []

        async def one(number: int) -> None:
            got.append((await channel.call("POST", "/", Note(str(number)), Note)).text)

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, number)
    assert sorted(got, key=int) == [str(n) for n in range(40)]


async def test_large_body_comes_back_whole_and_one_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_LIMIT", 2_000_000)
    async with serving(echo) as address, calling(address) as channel:
        assert len((await channel.call("POST", "/", Note("x" * 1_500_000), Note)).text) == 1_500_000
        with pytest.raises(WireError):
            await channel.call("POST", "/", Note("x" * 3_000_000), Note)
        assert await channel.call("POST", "/", Note("still there"), Note) == Note("still there")


async def test_server_that_came_back_on_its_port_is_called_as_if_nothing_had_been() -> None:
    async with serving(echo) as address, calling(address) as channel:
        await channel.call("POST", "/", Note("old"), Note)
        port = address.port
    again = await listen("127.0.0.1", port, None)
    async with serving(echo, listener=again):
        assert await channel.call("POST", "/", Note("new"), Note) == Note("new")
        await channel.aclose()


async def test_unreachable_server_is_a_wire_error_with_its_address() -> None:
    listener = await listen("127.0.0.1", 0, None)
    await listener.aclose()
    async with calling(listener.address) as channel:
        with pytest.raises(WireError, match=f"cannot reach {listener.address}: connection refused"):
            await channel.call("GET", "/", None, Note)
        with pytest.raises(WireError, match="cannot reach"):
            async with channel.stream("/", Note):
                pass


async def test_silent_server_is_a_wire_error_after_the_limit_and_the_next_call_works() -> None:
    async def handler(request: Request) -> Response:
        if request.path == "/never":
            await anyio.sleep_forever()
        return Response.of(Note("now"))

    async with serving(handler) as address, calling(address) as channel:
        with pytest.raises(WireError, match=r"did not answer GET /never within 0\.05 s"):
            await channel.call("GET", "/never", None, Note, timeout=0.05)
        assert await channel.call("GET", "/", None, Note) == Note("now")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nnot json!", "something else than Note"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{}", "not HTTP|broke off"),
        (b"HTTP/1.1 503 no\r\ncontent-length: 0\r\n\r\n", "status 503"),
        (b"", "broke off during GET /"),
    ],
)
async def test_answer_outside_the_protocol_is_a_wire_error(answer: bytes, says: str) -> None:
    asked = 0

    async def respond(stream: SocketStream) -> None:
        nonlocal asked
        async with stream:
            await stream.receive()
            asked += 1
            if answer:
                await stream.send(answer)

    listener = await listen("127.0.0.1", 0, None)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.doors[0].serve, respond)
        async with calling(listener.address) as channel:
            with pytest.raises(WireError, match=says):
                await channel.call("GET", "/", None, Note)
        group.cancel_scope.cancel()
    await listener.aclose()
    assert asked == 1  # only a used connection is worth a second try


async def test_errors_of_the_handler_reach_the_caller_and_the_callback() -> None:
    errors: list[Exception] = []

    async def handler(request: Request) -> Response:
        match request.path:
            case "/config":
                raise ConfigError("two launchers have the same id")
            case "/none":
                raise RefusedError(404, "no such page")
            case "/host":
                raise HostError("the disk is gone")
        raise KeyError("secret detail")

    async with serving(handler, errors=errors) as address, calling(address) as channel:
        for path, status, text in (
            ("/config", 409, "two launchers have the same id"),
            ("/none", 404, "no such page"),
            ("/host", 500, "the disk is gone"),
            ("/bug", 500, "internal error (KeyError), see the log"),
        ):
            with pytest.raises(RefusedError) as caught:
                await channel.call("GET", path, None, Note)
            assert (caught.value.status, str(caught.value)) == (status, text)
    assert [type(e) for e in errors] == [HostError, KeyError]


async def test_body_that_is_no_message_is_refused_with_the_place() -> None:
    async with serving(echo) as address, calling(address) as channel:
        with pytest.raises(RefusedError, match=r"is no Note: .*text") as caught:
            await channel.call("POST", "/", Problem("x"), Note)
    assert caught.value.status == 400


# --- who may, and who talks nonsense ---------------------------------------------------------------------------------


async def test_wrong_or_missing_token_is_denied_and_told_with_the_peer() -> None:
    denied: list[str] = []
    async with serving(echo, on_denied=denied.append) as address:
        async with calling(address, make_token()) as channel:
            with pytest.raises(AccessDeniedError, match=f"{address} refused our token"):
                await channel.call("POST", "/", Note("x"), Note)
            with pytest.raises(AccessDeniedError):
                async with channel.stream("/", Note):
                    pass
        answer = await say(address, raw_request("POST /", "content-length: 100000", token=None, body=b"x" * 100_000))
        assert answer.startswith(b"HTTP/1.1 401")
        assert b'{"error":"' in answer
    assert len(denied) == 3
    assert all(peer.startswith("127.0.0.1:") for peer in denied)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # a TLS hello
        b"hello?\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        raw_request("POST /", "transfer-encoding: chunked", body=b"zz\r\n\r\n"),
    ],
)
async def test_garbage_is_answered_with_400_and_harms_nobody(garbage: bytes) -> None:
    async with serving(echo) as address, calling(address) as channel:
        await channel.call("POST", "/", Note("before"), Note)
        answer = await say(address, garbage)
        assert answer.split(b"\r\n")[0].split()[1] in (b"400", b"431")
        assert await channel.call("POST", "/", Note("after"), Note) == Note("after")


async def test_request_that_is_never_completed_is_ended_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(http_server, "READ_TIMEOUT", 0.05)
    async with serving(echo) as address:
        assert await say(address, b"GET / HT") == b""
        assert await say(address, raw_request("POST /", "content-length: 10", body=b"half")) == b""


async def test_idle_connection_is_closed_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(http_server, "IDLE_TIMEOUT", 0.05)
    async with serving(echo) as address:
        assert await say(address, b"") == b""


async def test_two_requests_in_one_packet_are_both_answered() -> None:
    async def handler(request: Request) -> Response:
        return Response.of(Note(request.path))

    both = raw_request("GET /one") + raw_request("GET /two", "connection: close")
    async with serving(handler) as address:
        answer = await say(address, both)
    assert answer.index(b"/one") < answer.index(b"/two")


async def test_head_and_expect_are_served_as_http_demands() -> None:
    async with serving(echo) as address:
        body = b'{"text":"x"}'
        expecting = raw_request(
            "POST /", f"content-length: {len(body)}", "expect: 100-continue", "connection: close", body=b""
        )
        async with await anyio.connect_tcp(address.host, address.port) as stream:
            await stream.send(expecting)
            assert (await stream.receive()).startswith(b"HTTP/1.1 100")
            await stream.send(body)
            assert body in await stream.receive()
        head = raw_request("HEAD /", f"content-length: {len(body)}", "connection: close", body=body)
        answer = await say(address, head)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\n")


# --- streams ---------------------------------------------------------------------------------------------------------


class Source:
    """Lines on demand, and whether their generator has been closed."""

    def __init__(self) -> None:
        self.send, self._receive = anyio.create_memory_object_stream[bytes](10)
        self.closed = anyio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            async with self._receive:
                async for line in self._receive:
                    yield line
        finally:
            self.send.close()
            self.closed.set()

    async def handler(self, request: Request) -> Streamed:
        return Streamed(self.lines())


async def test_lines_arrive_one_by_one_when_they_are_made() -> None:
    source = Source()
    async with serving(source.handler) as address, calling(address) as channel:
        async with channel.stream("/v1/orders?node=a", Note) as notes:
            for text in ("one", "two", "x" * 300_000):
                await source.send.send(msgspec.json.encode(Note(text)))
                with anyio.fail_after(5):
                    assert await anext(notes) == Note(text)
            await source.send.send(b'{"text":"a"}\n{"text":"b"}\n')
            assert [(await anext(notes)).text, (await anext(notes)).text] == ["a", "b"]
        with anyio.fail_after(2):
            await source.closed.wait()


async def test_stream_that_ends_is_a_wire_error_for_its_reader() -> None:
    source = Source()
    async with serving(source.handler) as address, calling(address) as channel, channel.stream("/", Note) as notes:
        await source.send.send(b'{"text":"last"}')
        source.send.close()
        assert await anext(notes) == Note("last")
        with pytest.raises(WireError, match="ended the stream"):
            await anext(notes)


async def test_stream_whose_server_goes_is_a_wire_error_for_its_reader() -> None:
    source = Source()
    async with serving(source.handler) as address:
        channel = Channel(address, TOKEN)
        context = channel.stream("/", Note)
        notes = await context.__aenter__()
        await source.send.send(b'{"text":"x"}')
        assert await anext(notes) == Note("x")
    with pytest.raises(WireError, match="broke off"), anyio.fail_after(2):
        await anext(notes)
    await context.__aexit__(None, None, None)
    assert source.closed.is_set()


async def test_stream_whose_source_fails_ends_and_is_reported() -> None:
    errors: list[Exception] = []

    async def lines() -> AsyncIterator[bytes]:
        yield b'{"text":"x"}'
        raise ValueError("a bug")

    async def handler(request: Request) -> Streamed:
        return Streamed(lines())

    async with (
        serving(handler, errors=errors) as address,
        calling(address) as channel,
        channel.stream("/", Note) as notes,
    ):
        assert await anext(notes) == Note("x")
        with pytest.raises(WireError, match="broke off"):
            await anext(notes)
    assert [str(e) for e in errors] == ["a bug"]


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
async def test_source_is_closed_at_once_when_the_client_goes_while_it_is_idle(how: str) -> None:
    source = Source()
    async with serving(source.handler) as address:
        stream = await anyio.connect_tcp(address.host, address.port)
        await stream.send(raw_request("GET /"))
        await source.send.send(b'{"text":"x"}')
        received = b""
        while b'"x"' not in received:
            received += await stream.receive()
        await leave(stream, how)
        with anyio.fail_after(2):
            await source.closed.wait()
        await stream.aclose()


async def leave(stream: SocketStream, how: str) -> None:
    if how == "half-close":
        await stream.send_eof()
        return
    if how == "rst":
        raw = stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


async def test_source_is_closed_when_the_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(http_server, "SEND_TIMEOUT", 0.1)
    closed = anyio.Event()

    async def lines() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1_000_000
        finally:
            closed.set()

    async def handler(request: Request) -> Streamed:
        return Streamed(lines())

    async with serving(handler) as address, await anyio.connect_tcp(address.host, address.port) as stream:
        await stream.send(raw_request("GET /"))
        with anyio.fail_after(10):
            await closed.wait()


# --- listening, and leaving nothing behind ---------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_cancelled_server_leaves_no_socket_and_no_task() -> None:
    await anyio.wait_all_tasks_blocked()
    before = descriptors()
    source, entered = Source(), anyio.Event()

    async def handler(request: Request) -> Response | Streamed:
        if request.path == "/stream":
            return await source.handler(request)
        if request.path == "/wait":
            entered.set()
            await anyio.sleep_forever()
        return await echo(request)

    async def wait(channel: Channel) -> None:
        with pytest.raises(WireError):
            await channel.call("GET", "/wait", None, Note)

    async with anyio.create_task_group() as group, serving(handler) as address:
        channel = Channel(address, TOKEN)
        await channel.call("POST", "/", Note("idle connection"), Note)
        streaming = channel.stream("/stream", Note)
        await streaming.__aenter__()
        group.start_soon(wait, channel)
        await entered.wait()
    assert source.closed.is_set()
    await streaming.__aexit__(None, None, None)
    await channel.aclose()
    await anyio.wait_all_tasks_blocked()
    assert descriptors() == before


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "", "0.0.0.0", "::"])
async def test_listener_has_the_real_port_and_takes_calls(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    listener = await listen(host, 0, None)
    assert listener.address.host == host
    assert listener.address.port > 0
    reach = {"": ["127.0.0.1"], "0.0.0.0": ["127.0.0.1"], "::": ["127.0.0.1", "::1"]}.get(host, [host])
    async with serving(echo, listener=listener):
        for to in reach:
            async with calling(Address(to, listener.address.port)) as channel:
                assert await channel.call("POST", "/", Note("x"), Note) == Note("x")


async def test_taken_port_and_foreign_address_are_host_errors_in_one_sentence() -> None:
    listener = await listen("127.0.0.1", 0, None)
    with pytest.raises(HostError, match=f"port {listener.address.port} on 127.0.0.1 is taken; choose another"):
        await listen("127.0.0.1", listener.address.port, None)
    await listener.aclose()
    with pytest.raises(HostError, match=r"192\.0\.2\.1 is not an address of this machine"):
        await listen("192.0.2.1", 0, None)
    with pytest.raises(HostError, match=r"cannot listen on nowhere\.invalid"):
        await listen("nowhere.invalid", 0, None)


# --- TLS -------------------------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    new = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=control", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*new, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("other-tls"))


async def test_calls_and_streams_work_under_tls(certificate: tuple[str, str]) -> None:
    source = Source()

    async def handler(request: Request) -> Response | Streamed:
        return await (source.handler(request) if request.path == "/stream" else echo(request))

    listener = await listen("127.0.0.1", 0, server_tls(*certificate))
    tls = client_tls(certificate[0])
    async with serving(handler, listener=listener) as address, calling(address, tls=tls) as channel:
        for text in ("one", "x" * 500_000):
            assert await channel.call("POST", "/", Note(text), Note) == Note(text)
        async with channel.stream("/stream", Note) as notes:
            await source.send.send(b'{"text":"x"}')
            assert await anext(notes) == Note("x")
        with anyio.fail_after(2):
            await source.closed.wait()


async def test_peers_without_the_right_tls_are_told_and_the_server_lives(
    certificate: tuple[str, str], other_certificate: tuple[str, str]
) -> None:
    listener = await listen("127.0.0.1", 0, server_tls(*certificate))
    async with serving(echo, listener=listener) as address:
        async with calling(address) as plain:
            with pytest.raises(WireError):
                await plain.call("POST", "/", Note("x"), Note)
        async with calling(address, tls=client_tls(other_certificate[0])) as distrustful:
            with pytest.raises(WireError, match=r"cannot speak TLS with .*self-signed"):
                await distrustful.call("POST", "/", Note("x"), Note)
        async with calling(address, make_token(), tls=client_tls(certificate[0])) as unknown:
            with pytest.raises(AccessDeniedError):
                await unknown.call("POST", "/", Note("x"), Note)
        async with calling(address, tls=client_tls(certificate[0])) as channel:
            assert await channel.call("POST", "/", Note("x"), Note) == Note("x")
    async with serving(echo) as address, calling(address, tls=client_tls(certificate[0])) as channel:
        with pytest.raises(WireError, match="cannot speak TLS with"):
            await channel.call("POST", "/", Note("x"), Note)


def test_unusable_certificate_files_are_config_errors_with_their_names(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    for make in (
        lambda: server_tls(str(tmp_path / "missing.pem"), key),
        lambda: server_tls(cert, str(tmp_path / "missing.pem")),
        lambda: client_tls(str(tmp_path / "missing.pem")),
    ):
        with pytest.raises(ConfigError, match=r"cannot read .*missing\.pem: no such file"):
            make()
    with pytest.raises(ConfigError, match=r"broken\.pem .*cannot be used"):
        server_tls(str(broken), key)
    with pytest.raises(ConfigError, match=r"broken\.pem cannot be used"):
        client_tls(str(broken))


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_token_is_written_for_its_owner_only_and_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "token")
    previous = os.umask(0)
    try:
        for token in (make_token(), make_token()):
            write_token(path, token)
            assert read_token(path) == token
            assert os.stat(path).st_mode & 0o777 == 0o600
    finally:
        os.umask(previous)
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_token_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    write_token(str(path), make_token())
    path.chmod(mode)
    with pytest.raises(ConfigError, match="is open to other users; run: chmod 600"):
        read_token(str(path))


def test_token_file_without_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for text in ("", "\n", "short", "two words of it", "päßword-long"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="holds no token"):
            read_token(str(path))
    with pytest.raises(ConfigError, match="no such file"):
        read_token(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"directory|regular"):
        read_token(str(tmp_path))
    with pytest.raises(HostError, match="cannot write token file"):
        write_token(str(tmp_path / "missing" / "token"), make_token())
    with pytest.raises(ConfigError):
        write_token(str(path), "")
    assert parse_token("  abcdefgh\n") == "abcdefgh"
