from collections.abc import Mapping

import pytest

from router.disaggregation import PrefillReason
from router.observe import metrics as metrics_module
from router.observe.journal import RequestJournal, outcome_of
from router.observe.metrics import RequestMetrics
from wire.convert import tiers_from_pb, tiers_to_pb
from wire.errors import InvalidRequest, Overloaded
from wire.ids import QualifiedId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2


def value(metrics: RequestMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", labels)


def record(
    outcome: str = "OK", cached: Mapping[str, int] | None = None, num_attempts: int = 1, spans: Mapping[str, float] = {}
) -> RequestJournal:
    """A request with a prompt of 100 tokens that took two seconds; `spans` by name, in ms."""
    journal = RequestJournal(QualifiedId("r-1"), 0.0)
    journal.outcome, journal.num_prompt_tokens, journal.num_output_tokens, journal.ttft_s = outcome, 100, 7, 0.5
    journal.attempts_ms = [0.0] * num_attempts
    if cached is not None:
        journal.source = worker_pb2.PromptSource(cached_tokens=tiers_to_pb(cached))
    journal.timeline.MergeFrom(pb.Timeline(total_ms=2000.0, prefill_worker="p0", decode_worker="d0"))
    journal.spans.extend(pb.Span(name=name, duration_ms=duration_ms) for name, duration_ms in spans.items())
    return journal


def test_tokens_are_timed_by_choice() -> None:
    metrics, journal = RequestMetrics(), RequestJournal(QualifiedId("r-1"), 10.0)
    for choice, num_tokens, now_s in ((0, 1, 10.5), (1, 1, 10.75), (0, 2, 11.5), (0, 0, 20.0), (1, 1, 11.75)):
        metrics.gained(journal, choice, num_tokens, now_s)
    assert (journal.ttft_s, journal.num_output_tokens) == (0.5, 5)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "inter_token_latency_seconds_count") == 3, "each choice's first token has none before it"
    assert value(metrics, "inter_token_latency_seconds_sum") == 2.0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 2, "two that came together share a second"


def test_requests_are_counted_by_what_they_came_to() -> None:
    metrics = RequestMetrics()
    metrics.ended(record())
    metrics.ended(record("UNAVAILABLE"))
    metrics.refused(Overloaded("full"))
    metrics.refused(InvalidRequest("top_p", "too much"))
    metrics.refused(ZeroDivisionError())
    for outcome in ("OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "INTERNAL"):
        assert value(metrics, "requests_total", outcome=outcome) == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0


def test_usage_is_counted_by_tenant_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_USERS", 2)
    metrics = RequestMetrics()
    for request_id, key in (
        ("r", ""),
        ("acme/r", "12345678"),
        ("acme/s", "12345678"),
        ("more/r", "87654321"),
        ("and/r", "1"),
    ):
        one = record(
            cached={"host": 60}, spans={"prefill.compute": 1500.0, "prefill.queue": 800.0, "decode.generate": 500.0}
        )
        one.request_id, one.key_id = QualifiedId(request_id), key
        one.spans[-3].counts["tokens_computed"] = 40
        metrics.ended(one)
    rows = {(one.tenant, one.key): one for one in metrics.usage}
    assert set(rows) == {("default", ""), ("acme", "12345678"), ("others", "")}
    acme = rows["acme", "12345678"]
    assert (acme.requests, acme.computed_tokens, acme.cached_tokens, acme.generated_tokens) == (2, 80, 120, 14)
    assert acme.worker_s == 4.0
    assert rows["others", ""].requests == 2
    assert value(metrics, "tenant_cached_tokens_total", tenant="default", key="") == 60


def test_prompts_are_counted_by_pool_and_reason() -> None:
    metrics = RequestMetrics()
    for why in (None, PrefillReason.BUSY, PrefillReason.SOONER, PrefillReason.BUSY):
        one = record()
        one.timeline.prefill_reason = why or ""
        metrics.ended(one)
    assert value(metrics, "prompt_pools_total", pool="decode", reason="busy") == 2
    assert value(metrics, "prompt_pools_total", pool="prefill", reason="sooner") == 1


def test_a_tier_is_asked_for_what_no_nearer_one_had() -> None:
    metrics = RequestMetrics()
    metrics.ended(record(cached={"device": 50, "host": 30, "redis": 5}))
    metrics.ended(record("CANCELLED"))
    asked = [value(metrics, "prefix_cache_queries_total", tier=tier) for tier in ("device", "host", "redis")]
    found = [value(metrics, "prefix_cache_hits_total", tier=tier) for tier in ("device", "host", "redis")]
    assert asked == [100, 50, 20]
    assert found == [50, 30, 5]
    assert value(metrics, "prompt_tokens_total") == 100, "the other one was never looked up"
    use = metrics.prefix_cache
    assert (use.queries, tiers_from_pb(use.hits)) == (
        100,
        {"device": 50, "host": 30, "peers": 0, "redis": 5, "files": 0},
    )


def test_waiting_is_told_by_gate() -> None:
    metrics = RequestMetrics()
    metrics.ended(record(spans={"router.wait_room": 250.0, "prefill.compute": 500.0, "decode.wait_pages": 500.0}))
    metrics.ended(record(num_attempts=3, spans={"router.wait_room": 250.0, "a name from nowhere": 9.0}))
    assert value(metrics, "gate_wait_seconds_total", gate="router.wait_room") == 0.5
    assert value(metrics, "gate_wait_seconds_total", gate="decode.wait_pages") == 0.5
    assert value(metrics, "gate_wait_seconds_total", gate="prefill.compute") is None
    assert value(metrics, "request_queue_time_seconds_sum") == 1.0
    assert value(metrics, "request_queue_time_seconds_count") == 2
    assert value(metrics, "request_replays_total") == 2


def test_two_routers_in_a_process_have_nothing_in_common() -> None:
    first, second = RequestMetrics(), RequestMetrics()
    first.gained(RequestJournal(QualifiedId("r-1"), 0.0), 0, 3, 1.0)
    assert value(second, "generation_tokens_total") == 0


def test_what_the_log_says_of_a_request() -> None:
    spans = {"prefill.queue": 5.0, "decode.wait_pages": 20.04}
    assert record(cached={"host": 32}, num_attempts=2, spans=spans).values == {
        "request_id": "r-1",
        "outcome": "OK",
        "prompt_tokens": 100,
        "output_tokens": 7,
        "cached_device": 0,
        "cached_host": 32,
        "cached_peers": 0,
        "cached_redis": 0,
        "cached_files": 0,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "prefill_reason": None,
        "attempts": 2,
        "ttft_ms": 500.0,
        "total_ms": 2000.0,
        "waited_ms": 25.0,
        "longest_wait": "decode.wait_pages",
    }


def test_an_error_that_is_none_of_ours_is_internal() -> None:
    assert outcome_of(KeyError("a bug")) == "INTERNAL"
