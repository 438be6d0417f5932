"""Bytes that no client library would send, to the clients' port, and how each call or connection ends."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.bad_input.ports import GENERATE, GOOD, MODEL, NUM_TOKENS, PROMPT, Metadata, Ports
from tests.bad_input.raw_http2 import END_HEADERS, END_STREAM, Frame, RawHttp2, raw_http2
from tests.bad_input.refusal import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OUR_ARRIVAL_S = 0.2
MAX_PINGS = 6
NUM_RESETS = 20_000
ALL = END_HEADERS | END_STREAM


@dataclass(frozen=True)
class Case:
    """What is said on a fresh connection, once HTTP/2 has begun, and how that ends; see `RawHttp2.answer`.

    `row` numbers the kind of bad input, as docs/faults.md lists them.
    """

    row: int
    what: str
    end: str
    say: Callable[[RawHttp2], None]

    def __str__(self) -> str:
        return f"{self.row} {self.what}"


def sent(path: str = GENERATE, message: bytes = GOOD, **headers: bytes) -> Callable[[RawHttp2], None]:
    """A call that is whole, with some headers: `_` for a hyphen, `__` for a colon."""

    def say(connection: RawHttp2) -> None:
        named = [(name.replace("__", ":").replace("_", "-"), value) for name, value in headers.items()]
        connection.begin_call(path, named)
        connection.send_message(message, END_STREAM)

    return say


def framed(data: bytes, flags: int = END_STREAM) -> Callable[[RawHttp2], None]:
    """A call whose message is these bytes, with its five bytes in front."""

    def say(connection: RawHttp2) -> None:
        connection.begin_call(GENERATE)
        connection.send(Frame.DATA, data, flags, stream=1)

    return say


def prefixed(flag: int, num_bytes: int, data: bytes = GOOD) -> bytes:
    return struct.pack(">BI", flag, num_bytes) + data


def two_messages(connection: RawHttp2) -> None:
    connection.begin_call(GENERATE)
    connection.send_message(GOOD)
    connection.send_message(GOOD, END_STREAM)


def compressed(encoding: bytes) -> Callable[[RawHttp2], None]:
    def say(connection: RawHttp2) -> None:
        connection.begin_call(GENERATE, [("grpc-encoding", encoding)])
        connection.send(Frame.DATA, prefixed(1, len(GOOD)), END_STREAM, stream=1)

    return say


LEN = len(GOOD)
CASES = [
    Case(0, "nothing wrong, to see that this client can be right", "OK", sent()),
    Case(2, "a message of no bytes", "INVALID_ARGUMENT", sent(message=b"")),
    Case(5, "bytes that are not UTF-8", "INVALID_ARGUMENT", sent(message=b"\x1a\x02\xff\xfe")),
    Case(18, "a body over 4 MiB", "RESOURCE_EXHAUSTED", framed(prefixed(0, (4 << 20) + 1), flags=0)),
    Case(18, "a body of 4 GiB, as its length says", "RESOURCE_EXHAUSTED", framed(prefixed(0, (1 << 32) - 1), flags=0)),
    Case(23, "an unknown method", "UNIMPLEMENTED", sent("/baton.v1.Inference/Unknown")),
    Case(23, "an unknown service", "UNIMPLEMENTED", sent("/baton.v2.Inference/Generate")),
    Case(23, "a path to a file", "UNIMPLEMENTED", sent("/../../etc/passwd")),
    Case(23, "a path of nothing", "UNIMPLEMENTED", sent("/")),
    Case(24, "GET", "reset", sent(__method=b"GET")),
    Case(70, "a deadline that is no number", "INTERNAL", sent(grpc_timeout=b"abc")),
    Case(70, "a deadline below 0", "INTERNAL", sent(grpc_timeout=b"-5S")),
    Case(70, "a deadline of nine digits", "OK", sent(grpc_timeout=b"999999999H")),
    Case(77, "base64 that is none", "INTERNAL", sent(x_bin=b"!!!")),
    Case(77, "a header in capitals", "INTERNAL", sent(X_Header=b"a")),
    Case(78, "a second message", "INVALID_ARGUMENT", two_messages),
    Case(78, "half-closed before the message", "INVALID_ARGUMENT", lambda it: it.begin_call(GENERATE, flags=ALL)),
    Case(78, "half-closed within the message", "INVALID_ARGUMENT", framed(prefixed(0, LEN + 50))),
    Case(78, "half-closed within the prefix", "INVALID_ARGUMENT", framed(b"\0\0")),
    Case(78, "a length that is too small", "INVALID_ARGUMENT", framed(prefixed(0, 1))),
    Case(78, "compressed, without saying how", "INTERNAL", framed(prefixed(1, LEN))),
    Case(78, "compressed in an unknown way", "INTERNAL", compressed(b"unheard-of")),
    Case(78, "compressed with gzip, as is not true", "INTERNAL", compressed(b"gzip")),
    Case(78, "a frame of a MiB", "closed", lambda it: it.send(Frame.DATA, bytes(1 << 20), stream=1)),
    Case(78, "headers that do not decode", "INTERNAL", lambda it: it.send(Frame.HEADERS, b"\xff" * 20, ALL, stream=1)),
    Case(80, "reflection asked with bytes that are no message", "INVALID_ARGUMENT", sent(REFLECT, b"\xff\xff")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_ends(ports: Ports, case: Case) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        case.say(connection)
        assert await connection.answer() == case.end
    await ports.require_unharmed()


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), bytes(1000)],
    ids=["23 HTTP/1.1", "23 TLS", "23 zeros"],
)
async def test_other_protocols_are_hung_up_on(ports: Ports, data: bytes) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.write(data)
        assert await connection.answer() in ("closed", "goaway: ")
    await ports.require_unharmed()


METADATA: dict[str, Metadata] = {
    "20 of 20 KiB": [("x-long", "a" * (20 << 10))],
    "20 just over 16 KiB": [("x-long", "a" * (16 << 10))],
    "20 of 1 MiB": [("x-long", "a" * (1 << 20))],
    "77 of 1,000 keys": [(f"x-{number}", "v") for number in range(1000)],
    "77 of 1,000 values of one key": [("x-same", "v")] * 1000,
    "77 in bytes, of 20 KiB": [("x-bin", b"\xff" * (20 << 10))],
}


@pytest.mark.parametrize("what", METADATA)
async def test_metadata_over_16_kib_is_refused(ports: Ports, what: str) -> None:
    assert (await refused(ports.generate(GOOD, metadata=METADATA[what]))).code == "RESOURCE_EXHAUSTED"
    await ports.require_unharmed()


async def test_metadata_below_16_kib_is_taken(ports: Ports) -> None:
    metadata = (("x-long", "a" * (15 << 10)), ("x-bin", bytes(range(256))))
    assert len([one async for one in ports.generate(GOOD, metadata=metadata)])
    await ports.require_unharmed()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may take but a moment to send their message."""
    monkeypatch.setattr("router.ports.interceptors.MAX_ARRIVAL_S", OUR_ARRIVAL_S)


SLOW: dict[str, Callable[[RawHttp2], None]] = {
    "no message": lambda it: it.begin_call(GENERATE),
    "half a message": framed(prefixed(0, LEN, GOOD[:9]), flags=0),
    "no end after the message": framed(prefixed(0, LEN), flags=0),
    "no question to reflection": lambda it: it.begin_call(REFLECT),
    "no question to health": lambda it: it.begin_call("/grpc.health.v1.Health/Watch"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", SLOW)
async def test_a_call_that_does_not_send_its_message_is_ended(ports: Ports, what: str) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        SLOW[what](connection)
        assert await connection.answer() == "DEADLINE_EXCEEDED"
    await ports.require_unharmed()


@pytest.mark.usefixtures("impatient")
async def test_a_message_that_comes_byte_by_byte_has_no_more_time(ports: Ports) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        connection.begin_call(GENERATE)
        ending = asyncio.create_task(connection.answer())
        for byte in prefixed(0, 1 << 20):
            connection.send(Frame.DATA, bytes([byte]), stream=1)
            await asyncio.wait([ending], timeout=OUR_ARRIVAL_S / 10)
        assert await ending == "DEADLINE_EXCEEDED"
    await ports.require_unharmed()


@pytest.mark.parametrize("data", [b"", prefixed(0, LEN, GOOD[:9]), prefixed(0, LEN)], ids=["at once", "half", "after"])
async def test_a_call_reset_amid_its_message_leaves_nothing(ports: Ports, data: bytes) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        framed(data, flags=0)(connection)
        connection.send(Frame.RST_STREAM, struct.pack(">I", 8), stream=1)
    await ports.require_unharmed()


@pytest.mark.parametrize("data", [b"", prefixed(0, LEN, GOOD[:9]), prefixed(0, LEN)], ids=["at once", "half", "after"])
async def test_a_connection_lost_amid_a_message_leaves_nothing(ports: Ports, data: bytes) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        framed(data, flags=0)(connection)
    await ports.require_unharmed()


async def test_a_flood_of_pings_is_hung_up_on(ports: Ports) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        heard: list[str] = []
        while len(heard) < MAX_PINGS and heard[-1:] in ([], ["pong"]):
            connection.ping()
            heard.append(await connection.answer())
        assert heard[-1] == "goaway: too_many_pings"
    await ports.require_unharmed()


async def test_calls_that_are_opened_and_reset_harm_no_other(ports: Ports) -> None:
    """Without a bound on the calls of a connection gRPC cancels most calls of all clients meanwhile."""
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        answers = []
        for number in range(NUM_RESETS):
            connection.begin_call(GENERATE, stream=2 * number + 1)
            connection.send(Frame.RST_STREAM, struct.pack(">I", 8), stream=2 * number + 1)
            if not number % (NUM_RESETS // 10):
                answers.append(asyncio.create_task(ports.answer(GOOD)))
                await asyncio.sleep(0)
        for [choice] in await asyncio.gather(*answers):
            assert choice.token_ids == MODEL.oracle(PROMPT, NUM_TOKENS)
    await ports.require_unharmed()


async def test_unknown_frames_are_ignored(ports: Ports) -> None:
    async with raw_http2(ports.addresses["public"]) as connection:
        connection.begin_http2()
        connection.send(99, b"whatever")
        sent()(connection)
        assert await connection.answer() == "OK"
    await ports.require_unharmed()
