"""Metrics of several gateways: whichever is asked tells of all."""

import asyncio
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.observe import metrics
from gateway.observe.metrics import MAX_AGE_S, Metrics
from tests.harness.cluster import until


async def answered(gateway: Metrics) -> dict[str, float]:
    """The answers that its page tells of each gateway; the page has each metric once."""
    families = list(text_string_to_metric_families((await gateway.page("")).decode()))
    assert len({family.name for family in families}) == len(families)
    [counts] = [family for family in families if family.name == "baton_http_requests"]
    return {one.labels["gateway"]: one.value for one in counts.samples if one.name.endswith("_total")}


async def test_a_gateway_tells_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SHARE_EVERY_S", 0.001)
    gateways = [Metrics(f"gateway-{index}", tmp_path) for index in range(3)]
    sharing = [asyncio.create_task(gateway.share()) for gateway in gateways]
    for index, gateway in enumerate(gateways):
        for _ in range(index + 1):
            gateway.count("/health", 200)
    expected = {"gateway-0": 1, "gateway-1": 2, "gateway-2": 3}
    for gateway in gateways:
        async with asyncio.timeout(10):
            while await answered(gateway) != expected:
                pass
    for task in sharing:
        task.cancel()


async def test_a_gateway_that_died_is_left_out(tmp_path: Path) -> None:
    dead, gateway = Metrics("gateway-0", tmp_path), Metrics("gateway-1", tmp_path)
    sharing = asyncio.create_task(dead.share())
    for one in (dead, gateway):
        one.count("/health", 200)
    await until((tmp_path / "gateway-0.prom").exists)
    sharing.cancel()
    old_s = (tmp_path / "gateway-0.prom").stat().st_mtime - MAX_AGE_S
    os.utime(tmp_path / "gateway-0.prom", (old_s, old_s))
    assert await answered(gateway) == {"gateway-1": 1}


async def test_a_folder_that_cannot_be_written_costs_the_others_counts_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Metrics("gateway-0", tmp_path / "missing")
    gateway.count("/health", 200)
    sharing = asyncio.create_task(gateway.share())
    await until(lambda: caplog.records)
    assert not sharing.done()
    assert await answered(gateway) == {"gateway-0": 1}
    sharing.cancel()
