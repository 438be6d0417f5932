"""A client of HTTP/2 that says whatever it is told, right or wrong. Source: RFC 9113, and RFC 7541 for headers."""

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum

import grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS = 0x1, 0x4
ACK = 0x1
MAX_WAIT_S = 10.0
GOAWAY_HEAD_BYTES = 8
_STATUS = re.compile(rb"\x0bgrpc-status[\x01\x02](\d+)")
_NAMES: dict[bytes, str] = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}


class Frame(IntEnum):
    """Kinds of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7


class RawHttp2:
    """One connection, on which stream 1 is a call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def begin_http2(self) -> None:
        self.write(PREFACE)
        self.send(Frame.SETTINGS)

    def send(self, kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
        self.write(head + payload)

    def ping(self) -> None:
        self.send(Frame.PING, bytes(8))

    def begin_call(
        self, path: str, headers: Sequence[tuple[str, bytes]] = (), flags: int = END_HEADERS, stream: int = 1
    ) -> None:
        """The headers of a gRPC call; those given take the place of the usual ones of their names."""
        usual = [(":method", b"POST"), (":scheme", b"http"), (":path", path.encode()), (":authority", b"test")]
        grpc_only = [("te", b"trailers"), ("content-type", b"application/grpc")]
        given = {name for name, _ in headers}
        kept = [(name, value) for name, value in usual + grpc_only if name not in given]
        block = b"".join(_literal(name, value) for name, value in sorted([*kept, *headers], key=_is_ordinary))
        self.send(Frame.HEADERS, block, flags, stream)

    def send_message(self, message: bytes, flags: int = 0) -> None:
        """One gRPC message on stream 1."""
        self.send(Frame.DATA, b"\0" + struct.pack(">I", len(message)) + message, flags, stream=1)

    async def answer(self) -> str:
        """What comes next: the name of the call's status, `reset`, `goaway: REASON`, `closed`; or `pong`."""
        async with asyncio.timeout(MAX_WAIT_S):
            async for kind, flags, payload in self._frames():
                if kind == Frame.HEADERS and flags & END_STREAM:
                    return status_of(payload)
                if kind == Frame.PING and flags & ACK:
                    return "pong"
                if kind == Frame.RST_STREAM:
                    return "reset"
                if kind == Frame.GOAWAY:
                    return f"goaway: {payload[GOAWAY_HEAD_BYTES:].decode()}"
        return "closed"

    async def closed(self) -> None:
        """Returns when the other side has hung up; TimeoutError if it does not."""
        async with asyncio.timeout(MAX_WAIT_S):
            async for _ in self._frames():
                pass

    async def _frames(self) -> AsyncIterator[tuple[int, int, bytes]]:
        """Kind, flags and payload of each frame until the other side has closed the connection."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                yield head[3], head[4], payload
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            return


@asynccontextmanager
async def raw_http2(address: str) -> AsyncIterator[RawHttp2]:
    """A connection on which nothing is said yet."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawHttp2(reader, writer)
    finally:
        writer.close()


def status_of(block: bytes) -> str:
    """The gRPC status in the first headers of a connection, where no name is known to both sides yet."""
    found = _STATUS.search(block)
    assert found is not None, block
    return _NAMES[found[1]]


def _is_ordinary(header: tuple[str, bytes]) -> bool:
    return not header[0].startswith(":")


def _literal(name: str, value: bytes) -> bytes:
    """A header that is not indexed, its name and value as they are."""
    return b"\0" + _sized(name.encode()) + _sized(value)


def _sized(data: bytes) -> bytes:
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + data
