"""A line between two processes, with faults to order."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PassOn = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Line:
    """What becomes of bytes on their way, from now on.

    delay_s: the shortest and the longest time that a piece is late; drawn from `draw` for each.
    bytes_to_reset: after so many more bytes, wherever that is, the connection on which they came is reset; None, never.
    loses_answers: what the server says gets lost, and nobody is told.
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    max_piece_bytes: int = 1 << 16
    bytes_per_s: float = float("inf")
    bytes_to_reset: int | None = None
    loses_answers: bool = False
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def will_break(self) -> bool:
        """Whether it is yet to reset a connection."""
        return self.bytes_to_reset is not None

    async def pass_on(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        """Raises ConnectionResetError where the line breaks."""
        await asyncio.sleep(self.draw.uniform(*self.delay_s) + len(piece) / self.bytes_per_s)
        num_left, self.bytes_to_reset = self.bytes_to_reset, self._left_after(piece)
        writer.write(piece[:num_left])
        await writer.drain()
        if num_left is not None and num_left < len(piece):
            raise ConnectionResetError

    async def pass_answer_on(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        if not self.loses_answers:
            await self.pass_on(piece, writer)

    def _left_after(self, piece: bytes) -> int | None:
        if self.bytes_to_reset is None or self.bytes_to_reset < len(piece):
            return None
        return self.bytes_to_reset - len(piece)


class ToxicProxy:
    """Passes everything on to `target`, "host:port" or the path of a Unix socket, and back."""

    def __init__(self, target: str, line: Line) -> None:
        self._target = target
        self._line = line
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Returns the address at which it listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def stop(self) -> None:
        """All connections are closed."""
        assert self._server is not None
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, *here: asyncio.StreamReader | asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        reader, writer = here
        assert isinstance(reader, asyncio.StreamReader)
        assert isinstance(writer, asyncio.StreamWriter)
        with suppress(OSError, asyncio.CancelledError):
            await self._join((reader, writer), await self._dial())
        writer.transport.abort()

    async def _dial(self) -> Streams:
        if self._target.startswith("/"):
            return await asyncio.open_unix_connection(self._target)
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _join(self, here: Streams, there: Streams) -> None:
        """Until one side ends, or the line breaks; the other side is told at once."""
        there_and_back = (
            self._pump(here[0], there[1], self._line.pass_on),
            self._pump(there[0], here[1], self._line.pass_answer_on),
        )
        pumps = [asyncio.create_task(pump) for pump in there_and_back]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there[1].transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pass_on: PassOn) -> None:
        while piece := await reader.read(self._line.max_piece_bytes):
            await pass_on(piece, writer)


@asynccontextmanager
async def toxic_proxy(target: str, line: Line) -> AsyncIterator[str]:
    """The address of one that runs."""
    proxy = ToxicProxy(target, line)
    try:
        yield await proxy.start()
    finally:
        await proxy.stop()
