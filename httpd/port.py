"""Shared parts of a port's connections: the application, bounds on their number, and turns for what begins."""

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
"""Of one client's address, but for this machine's own: a proxy there speaks for many."""
LOOPBACK = ("127.0.0.1", "::1")
MAX_HEADS_A_TURN = 4
"""Requests that begin in one turn of the event loop: in a burst of them, streams go on between two turns."""
READ_BYTES = 16 << 10
"""At a time, by each connection: asyncio's own 256 KiB would be in memory for each that waits for a turn."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


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
        """Counts a connection. Raises HttpError for one that may not stay, which is counted, too."""
        self.connections.add(connection)
        self._by_address[address] += 1
        if self._by_address[address] > MAX_CONNECTIONS_AN_ADDRESS and address not in LOOPBACK:
            raise _full(MAX_CONNECTIONS_AN_ADDRESS, "connections of this address are open")
        if len(self.connections) > MAX_CONNECTIONS:
            raise _full(MAX_CONNECTIONS, "connections are open")

    def discard(self, connection: "Connection", address: str) -> None:
        """Counts a connection no more."""
        self.connections.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task, which `tasks` has until it is done."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _full(limit: int, what: str) -> HttpError:
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reached(limit, what))
