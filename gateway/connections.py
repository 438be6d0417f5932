"""The server's port: uvicorn over httptools, and bounds on what a connection may do before a request is one."""

import asyncio
import re
import socket
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors import RETRY_AFTER_S, HttpError, envelope
from wire.errors import Unavailable
from wire.rpc import port_taken
from wire.trust.certificates import Certificates

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_AN_ADDRESS = 256
"""Of one client's address, but for this machine's own: a proxy there speaks for many."""
LOOPBACK = ("127.0.0.1", "::1")
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer to another."""
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
MAX_HEAD_S = 10.0
"""How long a connection may take to send the head of a request, the wait for the first one included."""
MAX_IDLE_S = 30.0
"""How long a connection may stay open after an answer."""
MAX_STALL_S = 30.0
"""How long a reader may leave an answer waiting; uvicorn holds back 64 KiB of it, and then the application."""
STOP_GRACE_S = 1.0
BACKLOG = 1024
MAX_ACCEPTED = 16
"""Connections taken at a time: asyncio takes as many as its backlog, and streams wait meanwhile."""
MAX_HEADS_A_TURN = 4
"""Requests that begin in one turn of the event loop: in a burst of them, streams go on between two turns."""
MAX_READ_BYTES = 16 << 10
"""At a time, by each connection: asyncio's own 256 KiB would be in memory for each that waits for a turn."""
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
_KERNELS_BOUNDS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(MAX_IDLE_S)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(MAX_HEAD_S)),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MAX_STALL_S)),
)
"""For a client that vanished without a word: the kernel ends what it does not acknowledge."""


class _Parser(httptools.HttpRequestParser):
    """Stays with HTTP/1.1 where a client offers another protocol: reads the head again, without the offer."""

    def __init__(self, protocol: "BoundedProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds nothing else
        while data:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.has_offer():
                    raise
                data = self._protocol.plain_head() + data[offer.args[0] :]
            else:
                return

    def has_offer(self) -> bool:
        return self.should_upgrade() and self.get_method() != b"CONNECT"


class Turns:
    """Places for new work of a port in each turn of its event loop."""

    def __init__(self) -> None:
        self._num_left = MAX_HEADS_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Takes a place in this turn; False without one."""
        if not self._num_left:
            return False
        if self._num_left == MAX_HEADS_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_left -= 1
        return True

    def wait(self, work: Callable[[], None]) -> None:
        """Does the work in a later turn, behind all that waits. To be called where `take` gave no place."""
        self._waiting.append(work)

    def _begin(self) -> None:
        self._num_left = MAX_HEADS_A_TURN
        while self._waiting and self.take():
            self._waiting.popleft()()


class BoundedProtocol(HttpToolsProtocol):
    """A connection. Each bound that is passed ends it, with a word to the client where one can still be said.

    by_address: open connections of a port by their client's address. turns: of the port, shared by its connections.
    knows_host: of `HttpServer`.
    """

    def __init__(self, by_address: Counter[str], turns: Turns, knows_host: Callable[[str], bool], **parts: Any) -> None:
        super().__init__(**parts)
        self._by_address = by_address
        self._turns = turns
        self._knows_host = knows_host

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]
        self.parser: _Parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._in_head = True
        self._num_head_bytes = 0
        self._cycles: list[RequestResponseCycle] = []
        self._refusal: HttpError | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._late = self.loop.call_later(MAX_HEAD_S, self._end_late)
        self._address = self.client[0] if self.client else ""
        self._by_address[self._address] += 1
        is_greedy = self._by_address[self._address] > MAX_CONNECTIONS_AN_ADDRESS and self._address not in LOOPBACK
        if is_greedy or len(self.connections) > MAX_CONNECTIONS:
            self._refuse(HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "as many connections are open as may be"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        if self._stalled is not None:
            self._stalled.cancel()
        self._by_address[self._address] -= 1
        if not self._by_address[self._address]:
            del self._by_address[self._address]
        for cycle in self._cycles:  # uvicorn tells the last one only, and another may be the one that is answered
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on; a request that begins waits for a place in a turn, and bytes behind it wait in the kernel."""
        is_under_way = self.cycle is not None and not self.cycle.response_complete
        if is_under_way or self._turns.take():
            self._read(data)
        else:
            self.transport.pause_reading()
            self._turns.wait(partial(self._read_later, data))

    def _read_later(self, data: bytes) -> None:
        self._read(data)
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_MUCH)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_parsed_bytes = True, 0
        self._late.cancel()
        self._late = self.loop.call_later(MAX_HEAD_S, self._end_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts trailers with headers: they come through here, too."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_headers_complete(self) -> None:
        if self.parser.has_offer():
            return
        self._require_host()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HttpError(HTTPStatus.TOO_MANY_REQUESTS, "as many requests wait on this connection as may")
            raise httptools.HttpParserError("too many")
        self._in_head, self._num_head_bytes = False, 0
        self._late.cancel()
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        if not self.parser.has_offer():
            super().on_message_complete()

    def plain_head(self) -> bytes:
        """Writes the head as it came, but for the offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _require_host(self) -> None:
        """Ends a request of no host, of several, or of one that is not known; HTTP/1.0 needs none."""
        given = [value for name, value in self.headers if name == b"host"]
        if not given and self.parser.get_http_version() == "1.0":
            return
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None or not self._knows_host(found[1].decode().lower()):
            self._refusal = _OTHER_HOST
            raise httptools.HttpParserError("another host")

    def _count(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if len(self.headers) > MAX_HEADERS or self._num_parsed_bytes > MAX_HEAD_BYTES:
            self._refusal = _TOO_MUCH
            raise httptools.HttpParserError("too much")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(MAX_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, and an answer that its client has not read."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or HttpError(HTTPStatus.BAD_REQUEST, "not a valid HTTP/1.1 request"))

    def _end_late(self) -> None:
        if self._num_head_bytes:
            self._refuse(HttpError(HTTPStatus.REQUEST_TIMEOUT, "the head of the request has not come in time"))
        else:
            self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """Answers without the application, and closes; an answer under way is broken off."""
        body = envelope(error)
        head = STATUS_LINE[error.status.http] + b"content-type: application/json\r\nconnection: close\r\n"
        if error.status.http == HTTPStatus.SERVICE_UNAVAILABLE:
            head += b"retry-after: %d\r\n" % RETRY_AFTER_S
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
        self._late.cancel()
        self._late = self.loop.call_later(MAX_STALL_S, self.transport.abort)


_TOO_MUCH = HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")

_OTHER_HOST = HttpError(
    HTTPStatus.BAD_REQUEST, "no host of this server: ask for 127.0.0.1 or localhost, or list it in http.host_names"
)


class _Server(uvicorn.Server):
    """A server that leaves the signals of its process alone."""

    capture_signals = nullcontext  # type: ignore[assignment]


class HttpServer:
    """Serves an application on one port, from `start` to `stop`. Belongs to the running event loop.

    knows_host: whether a request may name this host, without its port and in lower case. tls: None for none.
    """

    def __init__(
        self, app: Any, knows_host: Callable[[str], bool] = lambda host: True, tls: Certificates | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(BoundedProtocol, Counter(), Turns(), knows_host),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs; uvicorn would log a line for each bad request
            access_log=False,
            backlog=MAX_ACCEPTED,
            server_header=False,
            proxy_headers=False,
            ssl_context_factory=None if tls is None else lambda *_: tls.server_context(),
            timeout_keep_alive=MAX_IDLE_S,  # type: ignore[arg-type]
            timeout_graceful_shutdown=STOP_GRACE_S,  # type: ignore[arg-type]
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Returns the address; port 0 takes a free one. Raises ConfigError if the port is taken."""
        listener = _open_listener(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: others may join, but took nothing
        return await self._serve(listener)

    async def join(self, host: str, port: int) -> str:
        """Serves at the port of other servers of this user, living or dead: each new connection comes to one of them.

        Returns the address. Raises ConfigError if another program has the port.
        """
        return await self._serve(_open_listener(host, port, (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)))

    async def _serve(self, listener: socket.socket) -> str:
        self._listener = listener
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise Unavailable("the HTTP server has not started")
            await asyncio.sleep(0.001)
        listener.listen(BACKLOG)  # asyncio has asked for its own
        host, port = listener.getsockname()
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Closes port and connections; answers under way have STOP_GRACE_S to end."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._listener.close()


def _open_listener(host: str, port: int, *options: tuple[int, int, int]) -> socket.socket:
    """Binds and listens. Raises ConfigError."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio turns Nagle's delay off only where that is said
    for option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *options, *_KERNELS_BOUNDS):
        listener.setsockopt(*option)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise port_taken(host, port) from error
    return listener
