"""What a router listens with: a gRPC server for clients, one for the operator, one over HTTP for Prometheus."""

import asyncio
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.observe.metrics_server import MetricsServer
from router.ports.addresses import Addresses
from router.ports.door import Door
from router.ports.inference import InferenceApi
from router.ports.operator import ClusterApi
from router.router import Router
from wire.errors import ConfigError
from wire.interceptors import ErrorInterceptor, TokenInterceptor
from wire.pb import cluster_pb2, inference_pb2
from wire.pb.cluster_pb2_grpc import add_ClusterServicer_to_server
from wire.pb.inference_pb2_grpc import add_InferenceServicer_to_server
from wire.rpc import SERVER_OPTIONS

STOP_GRACE_S = 1.0
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_GENERATE = f"/{_INFERENCE}/Generate"
_CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name


class RouterServer:
    """Serves from `start` to `stop`, with health and maybe reflection on both ports; the operator's wants the token."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._health = health.aio.HealthServicer()
        token = TokenInterceptor(router.config.cluster.token)
        self._door = Door(router.dispatcher, _GENERATE)
        self._public = self._server(_INFERENCE, [ErrorInterceptor(self._door.arriving)])
        self._operator = self._server(_CLUSTER, [token, ErrorInterceptor()])
        self._metrics: MetricsServer | None = None

    @property
    def num_arriving(self) -> int:
        """Messages that are on their way to the public port."""
        return self._door.num_arriving

    async def start(self) -> Addresses:
        """Raises ConfigError if a port is in use; nothing is left running then."""
        try:
            addresses = self._bind()
        except ConfigError:
            await self.stop()
            raise
        router, config = self._router, self._router.config
        inference = InferenceApi(config.model, router.dispatcher, config.streams)
        cluster = ClusterApi(router, addresses)
        add_InferenceServicer_to_server(inference, self._public)
        add_ClusterServicer_to_server(cluster, self._operator)
        router.start()
        if self._metrics is not None:
            self._metrics.start()
        await self._public.start()
        await self._operator.start()
        for service in (_INFERENCE, _CLUSTER):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return addresses

    async def stop(self) -> None:
        """Takes no new requests, ends the open ones with Unavailable, and closes the ports."""
        await self._health.enter_graceful_shutdown()
        await self._router.stop()
        await self._public.stop(STOP_GRACE_S)
        await self._operator.stop(STOP_GRACE_S)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)

    def _bind(self) -> Addresses:
        listeners = self._router.config.listeners
        if listeners.metrics_port is not None:
            self._metrics = MetricsServer(self._router.metrics.registry, listeners.host, listeners.metrics_port)
        return Addresses(
            _listen(self._public, listeners.host, listeners.grpc_port),
            _listen(self._operator, listeners.host, listeners.operator_port),
            self._metrics.address if self._metrics is not None else "",
        )

    def _server(self, service: str, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> grpc.aio.Server:
        listeners = self._router.config.listeners
        options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", listeners.max_connections))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if listeners.reflection:
            reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server


def _listen(server: grpc.aio.Server, host: str, port: int) -> str:
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"port {port} of {host} cannot be had; is it in use?") from error
    return f"{host}:{bound}"
