"""The metrics of a page under vLLM's names, with the counts that Baton made."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from router.observe.journal import RequestJournal
from router.observe.vllm_names import SOURCES
from router.ports.server import RouterServer
from tests.harness.fake_cluster import CONFIG, FakeCluster
from tests.router.test_metrics_server import scrape
from tests.router.test_request_metrics import record
from tests.router.test_worker_metrics import worker
from wire.ids import QualifiedId
from wire.pb import cluster_pb2

Series = tuple[str, frozenset[tuple[str, str]]]
COMMON = {"model_name": CONFIG.model.name}
OF_ROUTER = {
    "num_requests_running": 8,
    "num_requests_waiting": 9,
    "prefix_cache_queries_total": 100,
    "prefix_cache_hits_total": 50,
    "external_prefix_cache_queries_total": 50,
    "external_prefix_cache_hits_total": 35,
    "prompt_tokens_total": 100,
    "generation_tokens_total": 3,
    "time_to_first_token_seconds_sum": 0.5,
    "inter_token_latency_seconds_sum": 1.0,
    "time_per_output_token_seconds_count": 2,
    "e2e_request_latency_seconds_sum": 2.0,
    "request_queue_time_seconds_count": 3,
}
OF_WORKERS = {
    "kv_cache_usage_perc": 0.25,
    "num_preemptions_total": 7,
    "spec_decode_num_drafts_total": 14,
    "spec_decode_num_draft_tokens_total": 16,
    "spec_decode_num_accepted_tokens_total": 15,
}


def series(name: str, **labels: str) -> Series:
    return f"vllm:{name}", frozenset({**COMMON, **labels}.items())


async def page_of(cluster: FakeCluster) -> str:
    server = RouterServer(cluster.router)
    addresses = await server.start()
    try:
        await cluster.router.watch.stop()  # no read replaces this status
        cluster.router.watch.last = cluster_pb2.ClusterStatus(
            num_running=8, num_queued=9, workers=[worker("d0"), worker("p0", "prefill")]
        )
        status, _, page = await scrape(addresses.metrics)
        assert status == 200
        return page
    finally:
        await server.stop()


async def test_each_of_vllms_metrics_has_batons_count() -> None:
    cluster = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=0, metrics_compat="vllm")))
    metrics = cluster.router.metrics
    journal = RequestJournal(QualifiedId("r"), 10.0)
    metrics.gained(journal, 0, 1, 10.5)
    metrics.gained(journal, 0, 2, 11.5)
    well = record(cached={"device": 50, "host": 30, "redis": 5})
    well.finish_reasons = ("stop", "length")
    metrics.ended(well)
    metrics.ended(record("CANCELLED"))
    metrics.ended(record("UNAVAILABLE"))
    page = await page_of(cluster)
    values: dict[Series, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, "no series stands twice"
            values[key] = sample.value
    expected = {series(name, engine="0"): value for name, value in OF_ROUTER.items()}
    expected |= {series(name, engine=one): value for name, value in OF_WORKERS.items() for one in ("d0", "p0")}
    for reason in ("stop", "length", "abort", "error"):
        expected[series("request_success_total", engine="0", finished_reason=reason)] = 1
    expected[series("time_to_first_token_seconds_bucket", engine="0", le="0.5")] = 1
    assert {key: values.get(key) for key in expected} == expected
    checked = {name for name, _ in expected}
    assert {name for name in SOURCES if not any(one.startswith(f"vllm:{name}") for one in checked)} == set()
    assert "baton_requests_total" in page


async def test_without_the_setting_there_are_no_names_of_others() -> None:
    page = await page_of(FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=0))))
    assert "baton_num_requests_running" in page
    assert "vllm" not in page
