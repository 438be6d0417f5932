"""Shared parts of a port's connections: the application, bounds on their number, and on new requests per iteration."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from httpd.errors import HttpError
from httpd.request_reader import Scope
from wire.errors import reached

if TYPE_CHECKING:
    from httpd.connection import Connection

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_AN_ADDRESS = 256
"""Bound per address of a client, loopback excepted: a proxy there speaks for many clients."""
LOOPBACK = ("127.0.0.1", "::1")
MAX_HEADS_A_TURN = 4
"""Bound on requests that begin in one iteration of the event loop: streams go on between two iterations of a burst."""
READ_BYTES = 16 << 10
"""Size of a read. asyncio's own 256 KiB would stay in memory for each connection that waits."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Turns:
    """A bound on the new work of a port in each iteration of its event loop."""

    def __init__(self) -> None:
        self._num_left = MAX_HEADS_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        """Takes a place in this iteration; False if none is free."""
        if not self._num_left:
            return False
        if self._num_left == MAX_HEADS_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_left -= 1
        return True

    def wait(self, work: Callable[[], None]) -> None:
        """Queues work for a later iteration, after `take` returned False."""
        self._waiting.append(work)

    def _begin(self) -> None:
        self._num_left = MAX_HEADS_A_TURN
        while self._waiting and self.take():
            self._waiting.popleft()()


class Port:
    """A port's application and open connections. All of them read into one buffer, and keep a copy of what came.

    knows_host: whether a request may name this host, without its port and in lower case.
    """

    def __init__(self, app: App, knows_host: Callable[[str], bool]) -> None:
        self.app = app
        self.knows_host = knows_host
        self.turns = Turns()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()

    def admit(self, connection: "Connection", address: str) -> None:
        """Counts a connection. Raises HttpError if it exceeds a bound; it is counted, too."""
        self.connections.add(connection)
        self._by_address[address] += 1
        if self._by_address[address] > MAX_CONNECTIONS_AN_ADDRESS and address not in LOOPBACK:
            raise _full(MAX_CONNECTIONS_AN_ADDRESS, "connections of this address are open")
        if len(self.connections) > MAX_CONNECTIONS:
            raise _full(MAX_CONNECTIONS, "connections are open")

    def discard(self, connection: "Connection", address: str) -> None:
        """Uncounts a connection."""
        self.connections.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task and keeps it in `tasks` until it is done."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _full(limit: int, what: str) -> HttpError:
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reached(limit, what))
