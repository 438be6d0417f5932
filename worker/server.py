"""A worker's service over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_status import rpc_status

from wire.errors import BatonError, InvalidRequest
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from wire.rpc import WORKER_SERVER_OPTIONS, ProofInterceptor, listen, to_status
from worker.config import ServerSettings
from worker.service import WorkerService

Context = grpc.aio.ServicerContext[Any, Any]

STOP_GRACE_S = 1.0
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServer:
    """The gRPC server of a worker, from `start` to `stop`. Lines prove the cluster's token; health needs none."""

    def __init__(self, service: WorkerService, settings: ServerSettings) -> None:
        self._service = service
        self._settings = settings
        self._health = health.HealthServicer()
        self._server = grpc.aio.server(interceptors=[ProofInterceptor(settings.token)], options=WORKER_SERVER_OPTIONS)

    async def start(self) -> str:
        """Opens the port and returns the address. Raises ConfigError if the port is taken."""
        address = listen(self._server, self._settings.host, self._settings.port, self._settings.identity)
        add_WorkerServicer_to_server(WorkerApi(self._service.connect), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._server.start()
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        return address

    async def refuse_new_work(self) -> None:
        """Sets health to NOT_SERVING."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Closes the port, and after a short grace the lines."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_S)


class ServedLine(Protocol):
    """A worker's end of a line, served by a call; see WorkerLine."""

    def take(self, request: worker_pb2.ConnectRequest) -> None: ...

    async def next(self) -> worker_pb2.ConnectResponse | None: ...

    def close(self) -> None: ...


class WorkerApi(WorkerServicer):
    """The servicer that gives each call a line, which `connect` makes."""

    def __init__(self, connect: Callable[[], ServedLine]) -> None:
        self._connect = connect

    async def Connect(self, requests: AsyncIterator[worker_pb2.ConnectRequest], context: Context) -> None:  # noqa: N802
        """Serves a line. Writes through its context, since gRPC may drop a generator without cleaning up."""
        line = self._connect()
        reading = asyncio.create_task(_read(requests, line))
        try:
            while (response := await line.next()) is not None:
                await context.write(response)
        finally:
            reading.cancel()
            line.close()
        (failure,) = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(failure, BatonError):
            await context.abort_with_status(rpc_status.to_status(to_status(failure)))
        elif isinstance(failure, Exception):
            raise failure


async def _read(requests: AsyncIterator[worker_pb2.ConnectRequest], line: ServedLine) -> None:
    """Passes messages to a line until its router closes. Raises InvalidRequest for another kind of message."""
    try:
        async for request in requests:
            line.take(request)
    except DecodeError as error:
        raise InvalidRequest("message", "not a ConnectRequest") from error
    finally:
        line.close()
