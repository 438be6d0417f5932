"""The gateway as an actor: a plain class, whose calls carry text only."""

import asyncio
import gc
from pathlib import Path

from baton import AsyncClient
from baton.routers import Routers
from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.observe.metrics import Metrics
from gateway.observe.watch import ClusterWatch, OperatorClient
from httpd.server import HttpServer
from wire.pools import Addresses
from wire.trust.certificates import Certificates
from wire.trust.key_ring import KeyList, KeyRing
from wire.typed_reader import from_json, to_json

NUM_CHANNELS = 8
"""Number of connections to the router, which takes 512 calls on each."""


GC_THRESHOLD = 20_000
"""Connections make many objects and no garbage; at Python's 700 a burst of connections delays streams by 0.1 s."""


class GatewayActor:
    """The actor of a gateway: serves HTTP from `start` to `stop`."""

    def __init__(self, config_json: str) -> None:
        """Reads the configuration. Raises ConfigError."""
        self._config = from_json(GatewayConfig, config_json, "gateway")
        self._keys = KeyRing(self._config.keys)
        self._server: HttpServer | None = None
        self._clients: list[AsyncClient] = []
        self._sharing: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Begins to serve; returns the gateway's Addresses. Raises ConfigError if the port is taken."""
        config = self._config
        routers = Routers(config.address)
        self._clients = [AsyncClient(routers, api_key="") for _ in range(NUM_CHANNELS)]
        tls = None if config.tls is None else Certificates(config.tls)
        folder = Path(config.metrics_folder) if config.metrics_folder else None
        metrics = Metrics(config.name, folder, config.metrics_address)
        operator = OperatorClient(config.operator_address)
        app = Gateway(tuple(self._clients), self._keys, metrics, ClusterWatch(operator), config.cors_origins)
        self._clients.append(operator)  # that `stop` closes, too
        self._server = server = HttpServer(app, config.hosts, tls)
        if config.joined_port is None:
            address = await server.start(config.host, config.port)
        else:
            address = await server.join(config.host, config.joined_port)
        self._sharing = asyncio.create_task(metrics.share())
        gc.collect()
        gc.freeze()  # as the router does
        gc.set_threshold(GC_THRESHOLD)
        return to_json(Addresses(http=address))

    async def set_keys(self, keys_json: str) -> None:
        """Replaces the accepted keys by this KeyList."""
        self._keys.replace(from_json(KeyList, keys_json, "keys"))

    async def stop(self) -> None:
        """Closes the port and all connections, which ends their requests."""
        if self._sharing is not None:
            self._sharing.cancel()
        if self._server is not None:
            await self._server.stop()
        for client in self._clients:
            await client.close()
