from collections.abc import Mapping

from router.disaggregation import PrefillReason
from router.observe.metrics import RequestMetrics, TokenTiming, outcome_of
from router.observe.record import RequestRecord, RequestSummary
from wire.convert import tiers_from_pb
from wire.errors import InvalidRequest, Overloaded
from wire.ids import QualifiedId, WorkerId
from wire.pb import inference_pb2 as pb


def value(metrics: RequestMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", labels)


def record(
    outcome: str = "OK", cached: Mapping[str, int] | None = None, num_attempts: int = 1, spans: Mapping[str, float] = {}
) -> RequestRecord:
    """A request with a prompt of 100 tokens that took two seconds; `spans` by name, in ms."""
    summary = RequestSummary(100, 7, cached, WorkerId("p0"), WorkerId("d0"), num_attempts)
    timeline = pb.Timeline(total_ms=2000.0)
    for name, duration_ms in spans.items():
        timeline.spans.add(name=name, duration_ms=duration_ms)
    return RequestRecord(QualifiedId("r-1"), outcome, summary, 0.5, timeline)


def test_tokens_are_timed_by_choice() -> None:
    metrics = RequestMetrics()
    assert TokenTiming(metrics, arrived_s=10.0).ttft_s is None
    timing = TokenTiming(metrics, arrived_s=10.0)
    for choice, num_tokens, now_s in ((0, 1, 10.5), (1, 1, 10.75), (0, 2, 11.5), (0, 0, 20.0), (1, 1, 11.75)):
        timing.gained(choice, num_tokens, now_s)
    assert timing.ttft_s == 0.5
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


def test_prompts_are_counted_by_pool_and_reason() -> None:
    metrics = RequestMetrics()
    for why in (None, PrefillReason.BUSY, PrefillReason.SOONER, PrefillReason.BUSY):
        one = record()
        one.summary.prefill_reason = why
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
    use = metrics.prefix_cache.total
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
    first.tokens(3)
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
