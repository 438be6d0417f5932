import socket
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import prometheus_client as prometheus
import pytest

from router.ports.server import MetricsServer
from wire.errors import ConfigError

TIMEOUT_S = 10.0


@contextmanager
def serving() -> Iterator[str]:
    registry = prometheus.CollectorRegistry()
    prometheus.Counter("things", "Some", registry=registry).inc(3)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        yield server.address
    finally:
        server.stop()


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def test_a_registry_is_served() -> None:
    with serving() as address:
        assert "things_total 3.0" in scrape(address)
        assert "things_total 3.0" in scrape(address)


def test_a_stopped_server_refuses_connections() -> None:
    with serving() as address:
        pass
    with pytest.raises(OSError, match="refused"):
        connect(address)


def test_a_port_that_is_taken() -> None:
    with serving() as address, pytest.raises(ConfigError):
        MetricsServer(prometheus.CollectorRegistry(), "127.0.0.1", int(address.split(":")[1]))


def test_a_silent_scraper_delays_no_other_and_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ports.server.SCRAPER_TIMEOUT_S", 0.2)
    with serving() as address, closing(connect(address)) as silent:
        assert "things_total" in scrape(address)
        assert silent.recv(1) == b""
