"""An HTTP/1.1 server on one port, for an ASGI application; its connections, and bounds on them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

from httpd.answer import Message
from httpd.connection import MAX_HEAD_S, MAX_IDLE_S, MAX_STALL_S, Connection, HeadBudget
from httpd.errors import HttpError
from httpd.request_reader import Scope
from wire.errors import Overloaded
from wire.load.limit import Limit
from wire.rpc import port_taken
from wire.trust.certificates import Certificates

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_AN_ADDRESS = 256
"""Bound on a client address's connections, except for loopback, where a proxy may serve many clients."""
LOOPBACK = ("127.0.0.1", "::1")
READ_BYTES = 16 << 10
"""Size of a read. asyncio's own 256 KiB would stay in memory for each waiting connection."""
STOP_GRACE_S = 1.0
BACKLOG = 1024
MAX_ACCEPTED = 16
"""Connections accepted at a time: asyncio would accept its whole backlog while streams wait."""
_KERNELS_BOUNDS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(MAX_IDLE_S)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(MAX_HEAD_S)),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MAX_STALL_S)),
)
"""Socket options by which the kernel ends the connection of a client that vanished without a word."""

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Port:
    """A port's application and open connections. All connections read into one buffer and copy the bytes.

    hosts: names that a request may give, without ports and in lower case; None for any.
    """

    def __init__(self, app: App, hosts: Collection[str] | None) -> None:
        self.app = app
        self.hosts = hosts
        self.heads = HeadBudget()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.connections: dict[Connection, ExitStack] = {}
        """Open connections, each with the units of limits that it holds."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._open = Limit(MAX_CONNECTIONS, "connections are open")
        self._by_address: dict[str, Limit] = {}

    def admit(self, connection: Connection, address: str) -> None:
        """Adds a connection; it stays in `connections` until `discard`. Raises HttpError if it exceeds a limit."""
        taken = self.connections[connection] = ExitStack()
        try:
            if address not in LOOPBACK:
                new = Limit(MAX_CONNECTIONS_AN_ADDRESS, "connections of this address are open")
                taken.enter_context(self._by_address.setdefault(address, new).taken())
            taken.enter_context(self._open.taken())
        except Overloaded as refusal:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, refusal.message) from refusal

    def discard(self, connection: Connection, address: str) -> None:
        """Removes a connection."""
        self.connections.pop(connection).close()
        if address in self._by_address and not self._by_address[address].num_used:
            del self._by_address[address]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task and keeps it in `tasks` until it is done."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class HttpServer:
    """A server of an application on one port, from `start` to `stop`. Belongs to the running event loop.

    hosts: see `Port`. tls: None for no TLS.
    """

    def __init__(self, app: App, hosts: Collection[str] | None = None, tls: Certificates | None = None) -> None:
        self._port = Port(app, hosts)
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Returns the address; port 0 takes a free one. Raises ConfigError if the port is taken."""
        listener = _open_listener(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: others may join, but took nothing
        return await self._serve(listener)

    async def join(self, host: str, port: int) -> str:
        """Serves at a port shared with other servers of this user: the kernel gives each new connection to one of them.

        Returns the address. Raises ConfigError if another program has the port.
        """
        return await self._serve(_open_listener(host, port, (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)))

    async def _serve(self, listener: socket.socket) -> str:
        context = None if self._tls is None else self._tls.server_context()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._port),
            sock=listener,
            ssl=context,
            backlog=MAX_ACCEPTED,
            ssl_handshake_timeout=None if context is None else MAX_HEAD_S,
        )
        listener.listen(BACKLOG)  # asyncio has asked for its own
        return "{}:{}".format(*listener.getsockname())

    async def stop(self) -> None:
        """Closes port and connections; answers under way have STOP_GRACE_S to end."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._port.connections):
            connection.shut_down()
        if self._port.tasks:
            await asyncio.wait(self._port.tasks, timeout=STOP_GRACE_S)
        for connection in list(self._port.connections):
            connection.abort()
        if self._port.tasks:
            for task in self._port.tasks:
                task.cancel()
            await asyncio.wait(self._port.tasks)


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
