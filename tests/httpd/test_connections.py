"""The port itself: rough connections over real sockets, before an application that answers every request."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, cast

import httptools
import pytest

from gateway.config import GatewayConfig
from httpd.connection import MAX_HEADS_AN_ITERATION, Connection
from httpd.request_reader import MAX_PIPELINED
from httpd.server import HttpServer
from tests.harness.cluster import WAIT_S, until
from wire.errors import ConfigError

KERNELS_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
)
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Reads each request whole, then answers with as many bytes as its path asks for. `left` counts clients gone."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.left = 0
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_requests += 1
        more = True
        while more:
            message = await receive()
            self.body, more = self.body + message.get("body", b""), message.get("more_body", False)
        path = scope["raw_path"].decode()
        if path == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            self.left += 1
            return
        if path == "/slow":
            await asyncio.sleep(0.2)
        if path == "/stream":
            await self._stream(receive, send)
            return
        num_bytes = int(path[1:]) if path[1:].isdecimal() else 2
        status = 499 if path == "/ended" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        for _ in range(num_bytes // 65536):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async def _stream(self, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"token", "more_body": True})
            await asyncio.sleep(0.01)
        self.left += 1


class Client:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.body = b""

    async def status(self) -> int:
        """Reads an answer to its end."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length: "):
                    self.body = await self.reader.readexactly(int(line[16:]))
                if line == b"transfer-encoding: chunked":
                    await self.reader.readuntil(b"0\r\n\r\n")
        return int(head.split()[1])

    async def is_closed(self) -> bool:
        """Waits for the end of the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionResetError:
                pass
        return True


class Served:
    def __init__(self, app: App, port: int) -> None:
        self.app, self._port = app, port
        self._clients: list[Client] = []

    async def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port, local_addr=(source, 0)))
        client.writer.write(sent)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()

    async def require_unharmed(self) -> None:
        assert await (await self.connect(GET)).status() == 200


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    app = App()
    server = HttpServer(app)
    address = await server.start("127.0.0.1", 0)
    served = Served(app, int(address.rpartition(":")[2]))
    yield served
    await served.close()
    await server.stop()


class OtherTransport:
    """A transport as another event loop's: it has all methods of asyncio's, and is no subclass."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_an_event_loop_with_transports_of_its_own_serves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", lambda self, one: made(self, cast(Any, OtherTransport(one))))
    await served.require_unharmed()


async def test_a_request_that_was_ended_has_a_status(served: Served) -> None:
    client = await served.connect(GET.replace(b"/a", b"/ended"))
    assert await client.status() == 499


REFUSED = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "20 a header over 16 KiB": (b"GET / HTTP/1.1\r\nA: " + b"a" * (17 << 10) + b"\r\n\r\n", 431),
    "20 a header without end": (b"GET / HTTP/1.1\r\nA: " + b"a" * (17 << 10), 431),
    "20 a path over 16 KiB": (b"GET /" + b"a" * (17 << 10) + b" HTTP/1.1\r\n\r\n", 431),
    "20 many headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
    "77 a thousand headers": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000, 431),
    "30 a key of a megabyte": (b"GET / HTTP/1.1\r\nAuthorization: Bearer " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
    "30 a NUL in a key": (b"GET / HTTP/1.1\r\nAuthorization: Bearer a\0b\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "a length and chunks": (
        b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunks that are not the last coding": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400),
    "a length that is no number": (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\na", 400),
    "a length without end": (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\na", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400),
    "a line that ends in LF": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_bytes_that_are_no_request(served: Served, what: str) -> None:
    sent, status = REFUSED[what]
    client = await served.connect(sent)
    assert await client.status() == status
    assert await client.is_closed()
    await served.require_unharmed()


async def test_an_offer_of_another_protocol_is_passed_over(served: Served) -> None:
    offer = (
        b"POST /a HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
        b"Host: x\r\nContent-Length: 2\r\n\r\n{}"
    )
    client = await served.connect(offer[:-1])
    await until(lambda: served.app.num_requests)
    client.writer.write(offer[-1:])
    await until(lambda: served.app.body == b"{}")
    client.writer.write(offer)
    await until(lambda: served.app.body == b"{}{}")
    assert await client.status() == 200
    await served.require_unharmed()


HOSTS = {
    b"x/?": 400,
    b"x/#": 400,
    b"[::": 400,
    b"x y": 400,
    b"": 400,
    b"x:99999999": 400,
    b"a@localhost": 400,
    b"evil.example": 400,
    b"localhost.evil.example": 400,
    b"localhost\r\nHost: localhost": 400,
    b"localhost\r\nHost: evil.example": 400,
    b"192.0.2.7": 400,
    b"localhost": 200,
    b"LocalHost:8000": 200,
    b"127.0.0.1:1": 200,
    b"[::1]:8000": 200,
    b"llm.example.org": 200,
}


@pytest.mark.parametrize("host", HOSTS)
async def test_hosts_that_a_request_may_ask_for(host: bytes) -> None:
    app = App()
    server = HttpServer(app, GatewayConfig(host_names=("LLM.example.org",)).hosts)
    served = Served(app, int((await server.start("127.0.0.1", 0)).rpartition(":")[2]))
    client = await served.connect(b"GET /a HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert (await client.status(), app.num_requests) == (HOSTS[host], int(HOSTS[host] == 200))
    if HOSTS[host] == 400:
        assert b"list it in http.host_names (--host-names of `baton up`)" in client.body
        assert await client.is_closed()
    await served.close()
    await server.stop()


async def test_only_http_1_0_may_do_without_a_host(served: Served) -> None:
    assert await (await served.connect(b"GET /a HTTP/1.0\r\n\r\n")).status() == 200
    assert await (await served.connect(b"GET /a HTTP/1.1\r\n\r\n")).status() == 400


async def test_trailers_are_counted_too(served: Served) -> None:
    trailers = b"A: b\r\n" * 200
    client = await served.connect(
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + trailers + b"\r\n"
    )
    assert await client.is_closed()
    await served.require_unharmed()


async def test_heads_that_do_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpd.connection.MAX_HEAD_S", 0.5)
    silent, half, again = [await served.connect(sent) for sent in (b"", GET[:20], GET)]
    assert await silent.is_closed()
    assert await half.status() == 408
    assert await half.is_closed()
    assert await again.status() == 200
    again.writer.write(GET[:20])  # the bound holds for a later request as for the first
    assert await again.is_closed()


async def test_an_idle_connection_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    monkeypatch.setattr("httpd.connection.MAX_IDLE_S", 0.05)
    server = HttpServer(app)
    address = await server.start("127.0.0.1", 0)
    other = Served(app, int(address.rpartition(":")[2]))
    client = await other.connect(GET)
    assert await client.status() == 200
    assert await client.is_closed()
    await other.close()
    await server.stop()


async def test_more_connections_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    monkeypatch.setattr("httpd.server.MAX_CONNECTIONS", 2)
    server = HttpServer(app)
    served = Served(app, int((await server.start("127.0.0.1", 0)).rpartition(":")[2]))
    first, second, third = [await served.connect() for _ in range(3)]
    assert await third.status() == 503
    assert b'"2 connections are open, the limit (fixed)"' in third.body
    assert await third.is_closed()
    for client in (first, second):
        client.writer.write(GET)
        assert await client.status() == 200
    first.writer.close()
    async with asyncio.timeout(WAIT_S):
        while await (await served.connect(GET)).status() != 200:
            pass
    await served.close()
    await server.stop()


async def test_one_address_has_no_more_connections_than_it_may(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpd.server.MAX_CONNECTIONS_AN_ADDRESS", 2)
    first, _, third = [await served.connect(source="127.0.0.2") for _ in range(3)]
    assert await third.status() == 503
    assert b'"2 connections of this address are open, the limit (fixed)"' in third.body
    assert await third.is_closed()
    for source in ("127.0.0.3", "127.0.0.1", "127.0.0.1", "127.0.0.1"):  # this machine's own address has no such bound
        assert await (await served.connect(GET, source)).status() == 200
    first.writer.close()
    async with asyncio.timeout(WAIT_S):
        while await (await served.connect(GET, "127.0.0.2")).status() != 200:
            pass


async def test_the_kernel_bounds_a_client_that_vanished_and_delays_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    class Noted(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            peer = transport.get_extra_info("socket")
            taken.extend(peer.getsockopt(*one) for one in KERNELS_OPTIONS)

    monkeypatch.setattr("httpd.server.Connection", Noted)
    server = HttpServer(app)
    address = await server.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*address.split(":"))
    await until(lambda: taken)
    assert taken == [1, 30, 30_000, 1]
    writer.close()
    await server.stop()


async def test_a_connection_that_ended_leaves_no_cycles(served: Served) -> None:
    def num_parsers() -> int:
        return sum(type(one) is httptools.HttpRequestParser for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = num_parsers()
        for sent in (b"", GET, GET[:9], b"\x16\x03\r\n\r\n"):
            client = await served.connect(sent)
            await asyncio.sleep(0.02)
            client.writer.close()
        await until(lambda: num_parsers() == before)
    finally:
        gc.enable()


async def test_a_reader_that_stalls_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpd.connection.MAX_STALL_S", 0.05)
    client = await served.connect(b"GET /1000000000 HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.2)
    assert await client.is_closed()
    await served.require_unharmed()


@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
async def test_a_client_that_goes_is_noticed(served: Served, path: bytes) -> None:
    client = await served.connect(GET.replace(b"/a", path))
    await until(lambda: served.app.num_requests)
    client.writer.close()
    await until(lambda: served.app.left)


async def test_a_client_that_goes_is_noticed_behind_a_large_body(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("httpd.connection.PROBE_EVERY_S", 0.02)
    behind = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n" + bytes(400_000)
    client = await served.connect(GET.replace(b"/a", b"/wait") + behind)
    await until(lambda: served.app.num_requests)
    client.writer.transport.abort()
    await until(lambda: served.app.left)
    await served.require_unharmed()


async def test_a_large_body_behind_a_request_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpd.connection.PROBE_EVERY_S", 0.02)
    behind = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 400000\r\n\r\n" + bytes(400_000)
    client = await served.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + behind)
    statuses = [await client.status()]
    while statuses[-1] == 100:  # what the client is asked by
        statuses.append(await client.status())
    assert len(statuses) > 1
    assert [statuses[-1], await client.status()] == [200, 200]
    assert len(served.app.body) == 400_000


async def test_requests_in_one_write_are_answered_in_turn(served: Served) -> None:
    client = await served.connect(GET * 3)
    assert [await client.status() for _ in range(3)] == [200] * 3


async def test_a_burst_of_requests_begins_a_few_in_a_turn(served: Served) -> None:
    clients = [await served.connect() for _ in range(10 * MAX_HEADS_AN_ITERATION)]
    begun = [0]

    async def watch() -> None:
        while True:
            begun.append(served.app.num_requests)
            await asyncio.sleep(0)  # a turn

    watching = asyncio.create_task(watch())
    for num_bursts in (1, 2):
        for client in clients:
            client.writer.write(GET)
        assert {await client.status() for client in clients} == {200}
        assert served.app.num_requests == num_bursts * len(clients)
    watching.cancel()
    # Between two looks lie the end of one turn and the beginning of another.
    assert max(later - earlier for earlier, later in pairwise(begun)) <= 2 * MAX_HEADS_AN_ITERATION


async def test_a_body_that_came_while_its_head_waited_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpd.connection.MAX_HEADS_AN_ITERATION", 1)
    clients = [await served.connect() for _ in range(5)]
    for client in clients:
        client.writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000))
    assert [await client.status() for client in clients] == [200] * 5
    assert len(served.app.body) == 5 * 200_000


async def test_requests_that_wait_on_a_connection_are_bounded(served: Served) -> None:
    client = await served.connect(GET * (MAX_PIPELINED + 2))
    assert [await client.status() for _ in range(MAX_PIPELINED + 1)] == [200] * MAX_PIPELINED + [429]
    assert b'"16 requests wait on this connection, the limit (fixed)"' in client.body
    assert await client.is_closed()
    waiting = await served.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + GET * (100 * MAX_PIPELINED))
    await until(lambda: served.app.num_requests == MAX_PIPELINED + 1)
    waiting.writer.close()
    await until(lambda: served.app.left)
    await served.require_unharmed()


async def test_servers_share_a_port() -> None:
    one, other = App(), App()
    first, second = HttpServer(one), HttpServer(other)
    port = int((await first.start("127.0.0.1", 0)).rpartition(":")[2])
    assert await second.join("127.0.0.1", port) == f"127.0.0.1:{port}"
    served = Served(one, port)
    async with asyncio.timeout(WAIT_S):
        while not (one.num_requests and other.num_requests):
            await served.require_unharmed()
    with pytest.raises(ConfigError):  # another cluster's would share its requests, too
        await HttpServer(App()).start("127.0.0.1", port)
    await first.stop()
    before = other.num_requests
    for _ in range(20):
        await served.require_unharmed()
    assert other.num_requests == before + 20
    again = HttpServer(one)
    await again.join("127.0.0.1", port)
    await served.close()
    await again.stop()
    await second.stop()


async def test_the_port_of_another_program_cannot_be_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError):
        await HttpServer(App()).join("127.0.0.1", other.getsockname()[1])


async def test_a_port_in_use_is_a_matter_of_configuration(served: Served) -> None:
    first = HttpServer(App())
    port = int((await first.start("127.0.0.1", 0)).rpartition(":")[2])
    with pytest.raises(ConfigError):
        await HttpServer(App()).start("127.0.0.1", port)
    await first.stop()
