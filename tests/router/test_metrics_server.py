import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import prometheus_client as prometheus
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.ports.server import MetricsServer
from wire.errors import ConfigError
from wire.trust.key_ring import KeyRing

TIMEOUT_S = 10.0


@contextmanager
def serving(*collectors: Collector) -> Iterator[str]:
    registry = prometheus.CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    prometheus.Counter("things", "Some", registry=registry).inc(3)
    server = MetricsServer(registry, KeyRing(), "127.0.0.1", 0)
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
        MetricsServer(prometheus.CollectorRegistry(), KeyRing(), "127.0.0.1", int(address.split(":")[1]))


def test_a_silent_scraper_delays_no_other_and_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.ports.server.SCRAPER_TIMEOUT_S", 0.2)
    with serving() as address, closing(connect(address)) as silent:
        assert "things_total" in scrape(address)
        assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


class Slow(Collector):
    """A collector that tells nothing until it `may_end`."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        return iter(())


def test_only_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ports.server.MAX_SCRAPERS", 1)
    slow = Slow()
    with serving(slow) as address, closing(connect(address)) as first:
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert slow.has_begun.wait(TIMEOUT_S)
        with closing(connect(address)) as second:
            assert second.recv(1) == b""
        slow.may_end.set()
        assert first.recv(1 << 16).startswith(b"HTTP/1.0 200")
