"""The servers of a router: a gRPC server for clients, one for the operator, one over HTTP for Prometheus."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from router.config import LOOPBACK
from router.ports.arrivals import ArrivalLimit
from router.ports.inference import InferenceApi
from router.ports.interceptors import ErrorInterceptor, KeyInterceptor
from router.ports.operator import Addresses, ClusterApi
from router.router import Router
from wire.errors import BatonError, ConfigError
from wire.pb import cluster_pb2, inference_pb2
from wire.pb.cluster_pb2_grpc import add_ClusterServicer_to_server
from wire.pb.inference_pb2_grpc import add_InferenceServicer_to_server
from wire.rpc import SERVER_OPTIONS, listen, port_taken
from wire.trust.certificates import Certificates
from wire.trust.key_ring import KeyRing, Scope

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
MAX_SCRAPERS = 8
SCRAPER_TIMEOUT_S = 5.0
"""How long a scraper may say nothing."""
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_GENERATE = f"/{_INFERENCE}/Generate"
_CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name


class RouterServer:
    """Serves from `start` to `stop`, with health and maybe reflection on both ports; the operator's wants the token."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._health = health.aio.HealthServicer()
        callers = KeyInterceptor(router.keys, Scope.GENERATE)
        operators = KeyInterceptor(router.keys, Scope.OPERATE, router.config.cluster.token)
        self._arrivals = ArrivalLimit(router.dispatcher, _GENERATE)
        self._public = self._server(_INFERENCE, [callers, ErrorInterceptor(self._arrivals.arriving)])
        self._operator = self._server(_CLUSTER, [operators, ErrorInterceptor()])
        self._metrics: MetricsServer | None = None

    @property
    def num_arriving(self) -> int:
        """Messages that are on their way to the public port."""
        return self._arrivals.num_arriving

    async def start(self) -> Addresses:
        """Raises ConfigError if a port is in use; nothing is left running then."""
        try:
            addresses = self._bind()
        except ConfigError:
            await self.stop()
            raise
        router, config = self._router, self._router.config
        inference = InferenceApi(config.model, router.dispatcher, config.streams, router.keys)
        cluster = ClusterApi(router, addresses)
        add_InferenceServicer_to_server(inference, self._public)
        add_ClusterServicer_to_server(cluster, self._operator)
        router.start()
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
        tls = None if listeners.tls is None else Certificates(listeners.tls)
        if listeners.metrics_port is not None:
            host = LOOPBACK if tls else listeners.host
            registry, keys = self._router.metrics.registry, self._router.keys
            self._metrics = MetricsServer(registry, keys, host, listeners.metrics_port)
        public = listen(self._public, listeners.host, listeners.grpc_port, tls)
        return Addresses(
            public,
            public if tls is None else listen(self._public, LOOPBACK, listeners.local_port),
            listen(self._operator, LOOPBACK, listeners.operator_port),
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


class MetricsServer:
    """Prometheus' own HTTP application over a registry, from its making to `stop`, on threads of its own.

    Wants a key with the scope `metrics`, where there are keys.
    """

    def __init__(self, registry: CollectorRegistry, keys: KeyRing, host: str, port: int) -> None:
        """Port 0 takes a free one. Raises ConfigError if the port is taken."""
        values = {"timeout": SCRAPER_TIMEOUT_S, "slots": threading.Semaphore(MAX_SCRAPERS)}
        scrape = type("Scrape", (_Scrape,), values)
        try:
            app = _guarded(make_wsgi_app(registry), keys)
            self._server = make_server(host, port, app, ThreadingWSGIServer, scrape)
        except OSError as error:
            raise port_taken(host, port) from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Closes the port. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _guarded(app: Any, keys: KeyRing) -> Any:
    def guarded(environ: Any, start_response: Any) -> Any:
        given = [environ["HTTP_AUTHORIZATION"]] if "HTTP_AUTHORIZATION" in environ else []
        try:
            keys.admit(given, Scope.METRICS)
        except BatonError as error:
            status = HTTPStatus(error.status.http)
            start_response(f"{status.value} {status.phrase}", [("WWW-Authenticate", "Bearer")])
            return [error.message.encode()]
        return app(environ, start_response)

    return guarded


class _Scrape(WSGIRequestHandler):
    """A scraper's connection. `slots` bounds how many of a server are served at a time; others are closed at once."""

    slots: threading.Semaphore

    def handle(self) -> None:
        if not self.slots.acquire(blocking=False):
            return
        try:
            super().handle()
        except OSError:
            log.info("a scrape broke off", exc_info=True)
        finally:
            self.slots.release()

    def log_message(self, *_: Any) -> None:
        """Scrapes are no events."""
