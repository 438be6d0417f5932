"""A connection to a worker in this process: the in-memory twin of GrpcTransport."""

import asyncio
from typing import Protocol

from wire.errors import Unavailable
from wire.pb import worker_pb2


class WorkerEnd(Protocol):
    """The worker's end of a line."""

    def take(self, request: worker_pb2.ConnectRequest) -> None: ...

    async def next(self) -> worker_pb2.ConnectResponse | None:
        """Returns the new messages, once there are some; None after the end."""
        ...

    def close(self) -> None: ...


class WorkerPort(Protocol):
    """A worker that routers can connect to."""

    def connect(self) -> WorkerEnd: ...


class LocalTransport:
    """A Transport, until `close` or the worker's death."""

    def __init__(self, worker: WorkerPort) -> None:
        self._line = worker.connect()
        self._is_dead = False

    def kill(self) -> None:
        """Ends the connection as the death of the worker's process would."""
        self._is_dead = True
        self._line.close()

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        await asyncio.sleep(0)
        self._require_alive()
        self._line.take(request)

    async def read(self) -> worker_pb2.ConnectResponse | None:
        self._require_alive()
        response = await self._line.next()
        self._require_alive()
        return response

    async def close(self) -> None:
        self._line.close()

    def _require_alive(self) -> None:
        if self._is_dead:
            raise Unavailable("the worker died")
