"""The page of metrics, from every gateway of a cluster and from its router."""

import asyncio
import http.client
import logging
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from wire.rpc import MAX_MESSAGE_BYTES

SHARE_EVERY_S = 1.0
MAX_AGE_S = 10.0
"""Bound on the age of a gateway's file: an older file belongs to a gateway that died and was not replaced."""
ROUTER_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Metrics:
    """The counts of one gateway. A scrape may reach any gateway, so each writes its counts to a common folder.

    name: the label of its counts. folder: None for a single gateway. router_address: the router's metrics page, or "".
    """

    def __init__(self, name: str = "gateway-0", folder: Path | None = None, router_address: str = "") -> None:
        self._name = name
        self._folder = folder
        self._router_address = router_address
        self._registry = CollectorRegistry()
        self._answered = Counter(
            "baton_http_requests", "Answered", ["gateway", "path", "status"], registry=self._registry
        )
        self._ignored = Counter("baton_http_ignored_fields", "Left out", ["gateway", "field"], registry=self._registry)
        self._reaches_router = Gauge(
            "baton_http_router_metrics_up", "The router's page came with the last", ["gateway"], registry=self._registry
        ).labels(name)
        self.open = Gauge("baton_http_open_requests", "Under way", ["gateway"], registry=self._registry).labels(name)

    def count(self, path: str, status: int, ignored: Iterable[str] = ()) -> None:
        """Counts an answer. ignored: fields of its request that were left out, by name."""
        self._answered.labels(self._name, path, status).inc()
        for field in ignored:
            self._ignored.labels(self._name, field).inc()

    async def page(self, key: str) -> bytes:
        """Returns the counts of all gateways, then the router's metrics, fetched with the key, if it answers.

        Counts of other gateways are up to SHARE_EVERY_S old.
        """
        routers = await asyncio.to_thread(self._routers, key)
        self._reaches_router.set(bool(routers))
        own = generate_latest(self._registry).decode()
        return merge([own, *await asyncio.to_thread(lambda: list(self._others()))]).encode() + routers

    def _routers(self, key: str) -> bytes:
        """Fetches the page of the first router that answers; blocks. Returns an empty page if none does."""
        for address in filter(None, self._router_address.split(",")):
            try:
                return _fetch(f"http://{address}/metrics", key)
            except (OSError, http.client.HTTPException) as error:
                log.warning("the router's metrics are missing from the page: %s", error)
        return b""

    async def share(self) -> None:
        """Writes the counts to the folder again and again, until cancelled."""
        while self._folder is not None:
            await asyncio.to_thread(self._write, self._folder, generate_latest(self._registry))
            await asyncio.sleep(SHARE_EVERY_S)

    def _write(self, folder: Path, page: bytes) -> None:
        try:
            draft = folder / f".{self._name}.prom"
            draft.write_bytes(page)
            draft.replace(folder / f"{self._name}.prom")
        except OSError as error:
            log.warning("the metrics of %s cannot be shared: %s", self._name, error)

    def _others(self) -> Iterator[str]:
        """Reads the files of other gateways; blocks."""
        for path in sorted(self._folder.glob("[!.]*.prom") if self._folder is not None else ()):
            with suppress(OSError):
                if path.stem != self._name and time.time() - path.stat().st_mtime < MAX_AGE_S:
                    yield path.read_text()


def merge(pages: Iterable[str]) -> str:
    """Joins pages in Prometheus' format: each metric once, with the samples of all pages."""
    samples: dict[str, list[str]] = {}
    for page in pages:
        for metric in page.split("# HELP ")[1:]:
            described, kind, *values = metric.splitlines(keepends=True)
            samples.setdefault(f"# HELP {described}{kind}", []).extend(values)
    return "".join(head + "".join(values) for head, values in samples.items())


def _fetch(url: str, key: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the router is never behind a proxy
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with opener.open(request, timeout=ROUTER_TIMEOUT_S) as answer:
        content: bytes = answer.read(MAX_MESSAGE_BYTES)
    return content
