import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import prometheus_client as prometheus
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.observe.metrics import Metrics
from router.ports import server
from router.ports.server import MetricsServer
from wire.errors import ConfigError
from wire.trust.key_ring import KeyRing

TIMEOUT_S = 10.0
BOUND_S = 0.5


@asynccontextmanager
async def serving(*collectors: Collector) -> AsyncIterator[str]:
    registry = prometheus.CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    prometheus.Counter("things", "Some", registry=registry).inc(3)
    server = MetricsServer(registry, KeyRing())
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop()


async def scrape(address: str, accept: str = "text/plain", method: str = "GET") -> tuple[int, str, str]:
    """Status, type and text of the page."""
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"accept": accept}, method=method)

    def read() -> tuple[int, str, str]:
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
                return response.status, response.headers["content-type"], response.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers["content-type"], refused.read().decode()

    return await asyncio.to_thread(read)


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address.split(":"))


async def test_a_registry_is_served_in_both_formats() -> None:
    async with serving() as address:
        for accept in ("text/plain", "application/openmetrics-text"):
            status, kind, text = await scrape(address, accept)
            assert (status, kind.split(";")[0]) == (200, accept)
            assert "things_total 3.0" in text
            assert text.endswith("# EOF\n") == ("openmetrics" in accept)
        assert (await scrape(address, method="HEAD"))[0::2] == (200, "")
        assert (await scrape(address, method="POST"))[0] == 405


async def test_a_format_that_cannot_be_read_is_answered_in_plain_text() -> None:
    async with serving() as address:
        for accept in ("application/openmetrics-text; version=abc", "text/plain; version=", ";;,;q=x"):
            status, kind, text = await scrape(address, accept)
            assert (status, kind.split(";")[0]) == (200, "text/plain")
            assert "things_total 3.0" in text


class Broken(Collector):
    """A collector that fails."""

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("a secret of the collector")


async def test_a_collector_that_fails_is_an_incident_without_its_words() -> None:
    async with serving(Broken()) as address:
        status, kind, text = await scrape(address)
    assert (status, kind) == (500, "application/json")
    assert "internal error, incident" in text
    assert "secret" not in text


async def test_a_stopped_server_refuses_connections() -> None:
    async with serving() as address:
        pass
    with pytest.raises(OSError, match="111"):
        await connect(address)


async def test_a_port_that_is_taken() -> None:
    async with serving() as address:
        with pytest.raises(ConfigError):
            await MetricsServer(prometheus.CollectorRegistry(), KeyRing()).start(
                "127.0.0.1", int(address.split(":")[1])
            )


async def test_slow_scrapers_shut_out_no_other_and_are_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("httpd.connection.MAX_HEAD_S", BOUND_S)
    async with serving() as address:
        slow = [await connect(address) for _ in range(32)]

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reading = asyncio.create_task(reader.read())
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            while not reading.done():
                writer.write(b"A: b\r\n")
                await asyncio.sleep(BOUND_S / 5)
            assert (await reading).startswith(b"HTTP/1.1 408")
            writer.close()

        holding = asyncio.gather(*(hold(*one) for one in slow))
        metrics = Metrics(router_address=address)
        for _ in range(3):
            assert "things_total 3.0" in (await scrape(address))[2]
            page = (await metrics.page("")).decode()
            assert "things_total 3.0" in page
            assert 'baton_http_router_metrics_up{gateway="gateway-0"} 1.0' in page
        async with asyncio.timeout(TIMEOUT_S):
            await holding
    assert capfd.readouterr().err == ""
    page = (await metrics.page("")).decode()
    assert "things_total" not in page
    assert 'baton_http_router_metrics_up{gateway="gateway-0"} 0.0' in page


class Slow(Collector):
    """A collector that tells nothing until it `may_end`."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self.num_begun += 1
        assert self.may_end.wait(TIMEOUT_S)
        return iter(())


async def test_pages_are_made_one_at_a_time_and_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_SCRAPE_S", BOUND_S)
    slow = Slow()
    async with serving(slow) as address:
        late = await asyncio.gather(*(scrape(address) for _ in range(3)))
        assert [status for status, _, _ in late] == [503] * 3
        assert slow.num_begun == 1
        slow.may_end.set()
        assert (await scrape(address))[0] == 200
