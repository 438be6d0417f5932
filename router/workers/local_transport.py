"""A connection to a worker in this process, with faults to order: the in-memory twin of one over gRPC."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from wire.errors import Unavailable
from wire.pb import worker_pb2


class WorkerEnd(Protocol):
    """The worker's end of a line."""

    def take(self, request: worker_pb2.ConnectRequest) -> None: ...

    async def next(self) -> worker_pb2.ConnectResponse | None:
        """All that is new, once there is something; None after the end."""
        ...

    def close(self) -> None: ...


class WorkerPort(Protocol):
    """A worker, as far as routers connect to it."""

    def connect(self) -> WorkerEnd: ...


@dataclass
class Faults:
    """Faults from now on.

    delay_s: before each message from the worker.
    bytes_per_s: how fast messages to the worker go; None, at once.
    fail_after: the worker dies after so many more updates; None, never.
    drop: updates that never arrive, by their number on the connection, from 0.
    is_dead: the worker is no more, for this connection and later ones.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    fail_after: int | None = None
    drop: frozenset[int] = frozenset()
    is_dead: bool = False


class LocalTransport:
    """A Transport. `kill` is the death of the worker, as far as its line tells."""

    def __init__(self, worker: WorkerPort, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._line = worker.connect()
        self._num_updates = 0

    def kill(self) -> None:
        """Ends the connection as the end of the worker's process does."""
        self.faults.is_dead = True
        self._line.close()

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        rate = self.faults.bytes_per_s
        await asyncio.sleep(0 if rate is None else request.ByteSize() / rate)
        self._require_alive()
        self._line.take(request)

    async def read(self) -> worker_pb2.ConnectResponse | None:
        self._require_alive()
        response = await self._line.next()
        if response is not None:
            await asyncio.sleep(self.faults.delay_s)
        self._require_alive()
        if response is None:
            return None
        updates = self.survivors(response)
        return worker_pb2.ConnectResponse(updates=updates, answers=response.answers, ended_holds=response.ended_holds)

    async def close(self) -> None:
        self._line.close()

    def survivors(self, response: worker_pb2.ConnectResponse) -> Iterator[worker_pb2.Update]:
        """The updates that come through before the worker dies, if it does."""
        for update in response.updates:
            if self.faults.fail_after == 0:
                self.kill()
                return
            if self.faults.fail_after is not None:
                self.faults.fail_after -= 1
            if self._num_updates not in self.faults.drop:
                yield update
            self._num_updates += 1

    def _require_alive(self) -> None:
        if self.faults.is_dead:
            raise Unavailable("the worker died")
