"""A worker's service over gRPC."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from wire.errors import ConfigError
from wire.interceptors import ErrorInterceptor, TokenInterceptor
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from wire.rpc import SERVER_OPTIONS
from worker.config import ServerSettings
from worker.service import MAX_REQUEST_S, WorkerService

Context = grpc.aio.ServicerContext[Any, Any]

STOP_GRACE_S = 1.0
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServer:
    """Serves from `start` to `stop`, to callers that know the cluster's token; health is for everybody."""

    def __init__(self, service: WorkerService, settings: ServerSettings) -> None:
        self._service = service
        self._settings = settings
        self._health = health.HealthServicer()
        interceptors = [TokenInterceptor(settings.token), ErrorInterceptor()]
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)

    async def start(self) -> str:
        """Returns the address. Raises ConfigError if the port cannot be had."""
        host, port = self._settings.host, self._settings.port
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"port {port} of {host} cannot be had; is it in use?") from error
        add_WorkerServicer_to_server(_Calls(self._service, self), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._server.start()
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{bound}"

    async def refuse_new_work(self) -> None:
        """From now on health says that this worker is not to be chosen."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Closes the port, and ends what is still under way after a short grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_S)


class _Calls(WorkerServicer):
    """Each call to the method of the service that has its name; a call's deadline is the request's."""

    def __init__(self, service: WorkerService, server: WorkerServer) -> None:
        self._service = service
        self._server = server

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:  # noqa: N802
        return await self._service.get_info(request)

    async def GetStatus(  # noqa: N802
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.WorkerStatus:
        return await self._service.get_status(request)

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> worker_pb2.PrefillResponse:  # noqa: N802
        return await self._service.prefill(request, _time_left_s(context))

    async def Decode(  # noqa: N802
        self, request: worker_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.DecodeUpdate]:
        async with aclosing(self._service.decode(request, _time_left_s(context))) as updates:
            async for update in updates:
                yield update

    async def Renew(self, request: worker_pb2.RenewRequest, context: Context) -> worker_pb2.RenewResponse:  # noqa: N802
        return await self._service.renew(request)

    async def Release(self, request: worker_pb2.ReleaseRequest, context: Context) -> worker_pb2.ReleaseResponse:  # noqa: N802
        return await self._service.release(request)

    async def StartDrain(  # noqa: N802
        self, request: worker_pb2.StartDrainRequest, context: Context
    ) -> worker_pb2.StartDrainResponse:
        await self._server.refuse_new_work()
        return await self._service.start_drain(request)


def _time_left_s(context: Context) -> float:
    left_s = context.time_remaining()
    return MAX_REQUEST_S if left_s is None else left_s
