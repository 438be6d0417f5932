"""The page of an operator's service on a port of its own, and the program that looks at it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.app import Gateway
from gateway.observe.metrics import Metrics
from gateway.observe.watch import ClusterWatch, OperatorClient
from httpd.server import HttpServer
from wire.trust.key_ring import NO_KEYS, KeyRing

PROGRAM = Path(__file__).with_name("browser_program.py")


@asynccontextmanager
async def served(operator: OperatorClient) -> AsyncIterator[str]:
    """Serves the page of an operator's service; yields its URL."""
    server = HttpServer(Gateway([operator], KeyRing(NO_KEYS), Metrics(), ClusterWatch(operator)))
    address = await server.start("127.0.0.1", 0)
    try:
        yield f"http://{address}/ui"
    finally:
        await server.stop()
        await operator.close()
