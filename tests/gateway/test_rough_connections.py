"""Rough connections to a gateway, byte by byte: each good request gets its answer, whatever stands around it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from httpd.server import HttpServer
from tests.gateway.local_gateway import LocalGateway, serving
from tests.harness.cluster import WAIT_S, until

BOUND_S = 0.2
ENDS_WITHIN_S = 3.0
HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
HEAD = GET.replace(b"GET", b"HEAD")


def post(body: object, *headers: bytes, version: bytes = b"1.1") -> bytes:
    """A completion's request; without headers of its own it tells its length."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = headers or (b"Content-Length: %d" % len(sent),)
    lines = (b"POST /v1/completions HTTP/" + version, b"Host: localhost", b"Content-Type: application/json", *told)
    return b"\r\n".join([*lines, b"", sent])


def chunked(rest: bytes) -> bytes:
    """A good beginning of a body in chunks, then the rest."""
    return post(b'10\r\n{"prompt": "a", \r\n' + rest, b"Transfer-Encoding: chunked")


WHOLE = post({"prompt": "hello", "max_tokens": 3})
STREAM = post({"prompt": "hello", "max_tokens": 3, "stream": True})
TOO_LONG = b"a" * (20 << 10)
BAD_HEADS = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "the rest of another body": (b"abc\r\n\r\n", 400),
    "lines that end in LF": (b"GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    "two lengths": (post(b"ab", b"Content-Length: 1", b"Content-Length: 2"), 400),
    "a length that is no number": (post(b"a", b"Content-Length: +1"), 400),
    "a negative length": (post(b"a", b"Content-Length: -1"), 400),
    "another coding": (post(b"{}", b"Transfer-Encoding: xchunked"), 400),
    "no coding": (post(b"{}", b"Transfer-Encoding: identity"), 400),
    "a coding with a weight": (post(b"{}", b"Transfer-Encoding: chunked;q=1"), 400),
    "another host": (GET.replace(b"localhost", b"evil/.example"), 400),
    "a space before the colon": (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    "a proxy's request": (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a long path": (b"GET /" + TOO_LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    "a header without end": (b"GET /health HTTP/1.1\r\nA: " + TOO_LONG * 2, 431),
    "many headers": (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
}
BAD_BODIES = {
    "a size that is no number": (chunked(b"xyz\r\nabc\r\n0\r\n\r\n"), 400),
    "a negative size": (chunked(b"-1\r\na\r\n0\r\n\r\n"), 400),
    "a size in C": (chunked(b"0x1\r\na\r\n0\r\n\r\n"), 400),
    "a size without end": (chunked(b"1" * 40 + b"\r\na\r\n0\r\n\r\n"), 400),
    "a size that ends in LF": (chunked(b"1\na\r\n0\r\n\r\n"), 400),
    "a chunk longer than its size": (chunked(b"1\r\nabc\r\n0\r\n\r\n"), 400),
    "a length in a trailer": (chunked(b"0\r\nContent-Length: 3\r\n\r\n"), 400),
    "many trailers": (chunked(b"0\r\n" + b"A: b\r\n" * 4000 + b"\r\n"), 431),
    "a long trailer": (chunked(b"0\r\nA: " + TOO_LONG + b"\r\n\r\n"), 431),
    "a trailer without end": (chunked(b"0\r\nA: " + TOO_LONG * 3), 431),
    "an extension without end": (chunked(b"1;a=" + TOO_LONG * 3), 431),
}


@dataclass
class Answered:
    """An answer as its bytes came: chunks are taken apart, and anything behind is left in the connection."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Client:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self, has_body: bool = True) -> Answered:
        """Reads one answer, and passes over those that only say to continue."""
        async with asyncio.timeout(WAIT_S):
            status = 100
            while status == 100:
                start, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
                status = int(start.split()[1])
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            return Answered(status, headers, await self._body(headers) if has_body else b"")

    async def rest(self) -> bytes:
        """Reads until the server closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    async def _body(self, headers: dict[bytes, bytes]) -> bytes:
        if b"content-length" in headers:
            return await self.reader.readexactly(int(headers[b"content-length"]))
        if b"transfer-encoding" not in headers:
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return body


class Door:
    """A gateway's port."""

    def __init__(self, gateway: LocalGateway, address: str) -> None:
        self.gateway = gateway
        self._place = address.split(":")
        self._clients: list[Client] = []

    async def connect(self, *sent: bytes) -> Client:
        """Sends pieces, with a pause between them."""
        client = Client(*await asyncio.open_connection(*self._place))
        self._clients.append(client)
        for index, piece in enumerate(sent):
            if index:
                await asyncio.sleep(0.02)
            client.writer.write(piece)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.writer.close()


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with serving() as gateway:
        server = HttpServer(gateway.app)
        door = Door(gateway, await server.start("127.0.0.1", 0))
        yield door
        door.close()
        await server.stop()


@pytest.mark.parametrize("what", BAD_HEADS)
async def test_bytes_that_are_no_head_cost_no_request_before_them_its_answer(door: Door, what: str) -> None:
    bad, status = BAD_HEADS[what]
    for good in (WHOLE, STREAM, GET, post(b"", b"Content-Length: 0"), WHOLE + STREAM):
        for sent in ((good + bad,), (good, bad), (good + bad[:9], bad[9:])):
            client = await door.connect(*sent)
            for _ in range(good.count(b"HTTP/1.1")):
                assert (await client.answer()).status == (400 if b"Length: 0" in good else 200), sent
            refused = await client.answer()
            assert (refused.status, refused.headers[b"connection"]) == (status, b"close"), sent
            assert json.loads(refused.body)["error"]["type"] == "invalid_request_error"
            assert await client.rest() == b""


@pytest.mark.parametrize("what", BAD_BODIES)
async def test_a_body_that_is_none_is_answered_as_such(door: Door, what: str) -> None:
    bad, status = BAD_BODIES[what]
    head = bad.index(b"\r\n\r\n") + 4
    for sent in ((bad,), (bad[:head], bad[head:]), (bad[: head + 25], bad[head + 25 :]), (WHOLE + bad,)):
        client = await door.connect(*sent)
        if sent[0].startswith(WHOLE):
            assert (await client.answer()).status == 200
        refused = await client.answer()
        assert (refused.status, refused.headers[b"connection"]) == (status, b"close"), sent
        assert await client.rest() == b""


IDLE_BYTES = (b"\r\n", b"\r", b"a", b"0", b"GET /health HT", b"POST", b"\0", b"1\r\n", b" ", b"A: b\r\n", b"\xff")
BEFORE = (
    b"",
    GET,
    GET + b"\r\n",
    GET[:-4],
    GET.replace(HOST, HOST + b"Content-Length: 500\r\n"),
    GET.replace(HOST, HOST + b"Transfer-Encoding: chunked\r\n") + b"5\r\n",
    HEAD,
    WHOLE,
    post(b"", b"Content-Length: 900000", b"Authorization: Bearer a"),
    post(b"", b"Content-Length: 900000", b"Content-Encoding: gzip"),
    b"\x16\x03\x01",
)


@pytest.mark.parametrize("seed", range(4))
async def test_a_connection_without_a_request_ends_whatever_bytes_come(
    door: Door, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for name in ("connection.MAX_HEAD_S", "connection.MAX_IDLE_S", "connection.MAX_STALL_S"):
        monkeypatch.setattr(f"httpd.{name}", BOUND_S)
    monkeypatch.setattr("gateway.exchange.MAX_BODY_S", BOUND_S)
    rng = random.Random(seed)

    async def hold(client: Client) -> None:
        """Goes on sending, and never closes."""
        reading = asyncio.create_task(client.reader.read())
        while not reading.done():
            client.writer.write(rng.choice(IDLE_BYTES))
            await asyncio.sleep(BOUND_S / 5)
        with suppress(ConnectionError):
            await reading

    async with asyncio.timeout(ENDS_WITHIN_S):
        await asyncio.gather(*[hold(await door.connect(before)) for before in 3 * BEFORE])


@pytest.mark.parametrize("sent", [WHOLE, STREAM, GET, WHOLE + STREAM + GET, STREAM + GET[:9]])
async def test_a_client_that_closes_its_writing_half_gets_its_answers(door: Door, sent: bytes) -> None:
    worker = door.gateway.cluster.workers["d0"]
    worker.may_go.clear()
    client = await door.connect(sent)
    client.writer.write_eof()
    await asyncio.sleep(0.1)
    worker.may_go.set()
    for _ in range(sent.count(b"\r\n\r\n")):
        assert (await client.answer()).status == 200
    if sent.endswith(GET[:9]):
        assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_a_body_cut_off_by_the_end_of_the_writing_half_is_refused(door: Door) -> None:
    client = await door.connect(WHOLE[:-1])
    client.writer.write_eof()
    assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_a_client_that_closes_both_halves_ends_its_request(door: Door) -> None:
    worker = door.gateway.cluster.workers["d0"]
    worker.may_go.clear()
    dispatcher = door.gateway.cluster.router.dispatcher
    client = await door.connect(WHOLE)
    await until(lambda: dispatcher.num_running)
    client.writer.close()
    await until(lambda: not dispatcher.num_running)


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_knows_no_chunks(door: Door, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": stream, "seed": 1}
    new = await (await door.connect(post(body))).answer()
    old = await (await door.connect(post(body, version=b"1.0"))).answer()
    assert (new.status, old.status) == (200, 200)
    assert old.headers[b"connection"] == b"close"
    assert b"transfer-encoding" not in old.headers
    assert len(old.body.split(b"\n\n")) == len(new.body.split(b"\n\n"))
    assert old.body.endswith(b"data: [DONE]\n\n" if stream else b"}")


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/v1/models", b"/v1/models/fake", b"/version", b"/metrics"])
async def test_head_is_get_without_a_body(door: Door, path: bytes) -> None:
    client = await door.connect(HEAD.replace(b"/health", path) + GET.replace(b"/health", path))
    head, got = await client.answer(has_body=False), await client.answer()
    assert (head.status, got.status) == (200, 200)
    assert head.headers[b"content-type"] == got.headers[b"content-type"]
    assert path == b"/metrics" or head.headers[b"content-length"] == got.headers[b"content-length"]


async def test_a_get_that_announces_a_body_is_answered_and_closed(door: Door) -> None:
    client = await door.connect(GET.replace(HOST, HOST + b"Content-Length: 5\r\n"))
    answer = await client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (200, b"close")
    client.writer.write(b"abcde" + GET)
    assert await client.rest() == b""
