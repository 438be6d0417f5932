"""A server of HTTP/1.1 on one port, for an application of ASGI's form."""

import asyncio
import socket
from collections.abc import Callable

from httpd.connection import MAX_HEAD_S, MAX_IDLE_S, MAX_STALL_S, Connection
from httpd.port import App, Port
from wire.rpc import port_taken
from wire.trust.certificates import Certificates

STOP_GRACE_S = 1.0
BACKLOG = 1024
MAX_ACCEPTED = 16
"""Connections taken at a time: asyncio takes as many as its backlog, and streams wait meanwhile."""
_KERNELS_BOUNDS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(MAX_IDLE_S)),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(MAX_HEAD_S)),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * MAX_STALL_S)),
)
"""For a client that vanished without a word: the kernel ends what it does not acknowledge."""


class HttpServer:
    """Serves an application on one port, from `start` to `stop`. Belongs to the running event loop.

    knows_host: of `Port`. tls: None for none.
    """

    def __init__(
        self, app: App, knows_host: Callable[[str], bool] = lambda host: True, tls: Certificates | None = None
    ) -> None:
        self._port = Port(app, knows_host)
        self._tls = tls
        self._server: asyncio.Server | None = None

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
