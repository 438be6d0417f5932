"""The servers of a router: a gRPC server for clients, one for the operator, one over HTTP for Prometheus."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from httpd.errors import HttpError, envelope, headers
from httpd.request_reader import Scope as HttpScope
from httpd.server import HttpServer, Receive, Send
from router.config import LOOPBACK
from router.ports.inference import InferenceApi
from router.ports.interceptors import ArrivalLimit, ErrorInterceptor, KeyInterceptor
from router.ports.operator import ClusterApi
from router.router import Router
from wire import errors
from wire.errors import ConfigError, Unavailable
from wire.pb import cluster_pb2, inference_pb2
from wire.pb.cluster_pb2_grpc import add_ClusterServicer_to_server
from wire.pb.inference_pb2_grpc import add_InferenceServicer_to_server
from wire.pools import Addresses
from wire.rpc import SERVER_OPTIONS, listen
from wire.trust.certificates import Certificates
from wire.trust.key_ring import KeyRing, Scope

STOP_GRACE_S = 1.0
MAX_SCRAPE_S = 5.0
"""Bound on a scraper's wait for its page, earlier scrapers' pages included."""
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_GENERATE = f"/{_INFERENCE}/Generate"
_CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name


class RouterServer:
    """The servers of a router, from `start` to `stop`, with health checks; the operator's port needs the token."""

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
        """Messages on their way to the public port."""
        return self._arrivals.messages.num_used

    async def start(self) -> Addresses:
        """Opens the ports. Raises ConfigError if a port is in use, and then leaves nothing running."""
        try:
            addresses = await self._bind()
        except ConfigError:
            await self.stop()
            raise
        router, config = self._router, self._router.config
        inference = InferenceApi(router.dispatcher, config.settings)
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
        """Refuses new requests, ends open requests with Unavailable, and closes the ports."""
        await self._health.enter_graceful_shutdown()
        await self._router.stop()
        await self._public.stop(STOP_GRACE_S)
        await self._operator.stop(STOP_GRACE_S)
        if self._metrics is not None:
            await self._metrics.stop()

    async def _bind(self) -> Addresses:
        config, settings = self._router.config, self._router.config.settings
        tls = None if config.tls is None else Certificates(config.tls)
        metrics = ""
        if isinstance(settings.metrics_port, int):
            self._metrics = MetricsServer(self._router.metrics_page, self._router.keys)
            metrics = await self._metrics.start(LOOPBACK if tls else settings.host, settings.metrics_port)
        public = listen(self._public, settings.host, settings.grpc_port, tls)
        return Addresses(
            public,
            public if tls is None else listen(self._public, LOOPBACK, config.local_port),
            listen(self._operator, LOOPBACK, config.operator_port),
            metrics,
        )

    def _server(self, service: str, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> grpc.aio.Server:
        settings = self._router.config.settings
        options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", settings.max_connections))
        server = grpc.aio.server(interceptors=interceptors, options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server


class MetricsServer:
    """The server of a registry's page, in Prometheus' formats; pages are made one at a time, on a separate thread.

    If there are keys, a scraper needs a key with the scope `metrics`.
    """

    def __init__(self, registry: CollectorRegistry, keys: KeyRing) -> None:
        self._registry = registry
        self._keys = keys
        self._server = HttpServer(self._answer)
        self._thread = ThreadPoolExecutor(1, "metrics")

    async def start(self, host: str, port: int) -> str:
        """Opens the port, for 0 a free port; returns the address. Raises ConfigError if the port is taken."""
        return await self._server.start(host, port)

    async def stop(self) -> None:
        """Closes the port."""
        await self._server.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, scope: HttpScope, _: Receive, send: Send) -> None:
        try:
            status, (kind, page), more = HTTPStatus.OK, await self._page(scope), []
        except Exception as failure:  # of whatever kind a collector may raise
            error = errors.known(failure)
            status, kind, page = HTTPStatus(error.status.http), "application/json", envelope(error)
            more = headers(error)
        head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(page)), *more]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": page, "more_body": False})

    async def _page(self, scope: HttpScope) -> tuple[str, bytes]:
        """Returns content type and text. Raises Unauthenticated, PermissionDenied, HttpError or Unavailable."""
        given = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        self._keys.admit([value for name, value in given if name == b"authorization"], Scope.METRICS)
        if scope["method"] not in ("GET", "HEAD"):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "this path wants GET", allow="GET, HEAD")
        encode, kind = _choose_encoder(dict(given).get(b"accept", ""))
        try:
            async with asyncio.timeout(MAX_SCRAPE_S):
                page = await asyncio.get_running_loop().run_in_executor(self._thread, encode, self._registry)
        except TimeoutError as error:
            raise Unavailable("the page of metrics has not come in time") from error
        return kind, page


def _choose_encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Chooses the format that a client asks for; plain text if its `accept` cannot be parsed."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        return choose_encoder("")
