"""Metrics of requests. docs/operating.md says what each one means."""

from collections.abc import Mapping

import prometheus_client as prometheus

from router.observe.record import RequestRecord
from wire.errors import BatonError, Cancelled, InvalidRequest, Unsupported
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from wire.tier import Tier

NAMESPACE = "baton"
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OK, CANCELLED = "OK", Cancelled.status.grpc
ABORT, ERROR = "abort", "error"
"""Finish reasons of a request that did not end well."""


def outcome_of(error: Exception) -> str:
    """The gRPC status that a client gets for an error; one that is none of ours is a bug."""
    return error.status.grpc if isinstance(error, BatonError) else BatonError.status.grpc


def described(error: BatonError) -> tuple[str, str, str]:
    """Returns the gRPC status, the reason and the message of an error.

    The message of one that may quote the request is the parameter alone.
    """
    may_quote = isinstance(error, InvalidRequest | Unsupported)
    return outcome_of(error), error.reason, error.ids.get("param", "") if may_quote else error.message


class PrefixCacheUse:
    """The tokens of prompts looked up and found, by tier: two counters, and `total`, the same as a message."""

    def __init__(self, queries: prometheus.Counter, hits: prometheus.Counter) -> None:
        self.total = cluster_pb2.PrefixCache(hits=[pb.TierTokens(tier=tier) for tier in Tier])
        self._queries = queries
        self._hits = hits

    def count(self, num_prompt_tokens: int, cached: Mapping[str, int]) -> None:
        """A tier is asked for what no nearer one had."""
        self.total.queries += num_prompt_tokens
        num_sought = num_prompt_tokens
        for hits in self.total.hits:
            num_found = cached.get(hits.tier, 0)
            self._queries.labels(hits.tier).inc(num_sought)
            self._hits.labels(hits.tier).inc(num_found)
            hits.tokens += num_found
            num_sought -= num_found


class RequestMetrics:
    """Written to on the event loop, read by scrapers' threads; a registry of its own, nothing global."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token of a choice to its next", INTER_TOKEN_BUCKETS_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end, if it ended well", REQUEST_BUCKETS_S
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Time that a request waited at any gate", FIRST_TOKEN_BUCKETS_S
        )
        self._waits = self._counter("gate_wait_seconds", "Time that requests waited, by gate", "gate")
        self._requests = self._counter("requests", "Requests that are over, by gRPC status", "outcome")
        self._choices = self._counter(
            "finished_choices", "Choices that are over: stop or length; abort or error for a request", "finish_reason"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were prefilled or found cached")
        self._generated = self._counter("generation_tokens", "Tokens sent to clients")
        self.prefix_cache = PrefixCacheUse(
            self._counter("prefix_cache_queries", "Prompt tokens looked up in a tier", "tier"),
            self._counter("prefix_cache_hits", "Prompt tokens found in a tier", "tier"),
        )
        self._pools = self._counter("prompt_pools", "Prompts by the pool that computes them, and why", "pool", "reason")
        self._replays = self._counter("request_replays", "Attempts at requests after their first")

    def first_token(self, after_s: float) -> None:
        self._first_token.observe(after_s)

    def tokens(self, num_tokens: int) -> None:
        self._generated.inc(num_tokens)

    def inter_token(self, gap_s: float) -> None:
        self._inter_token.observe(gap_s)

    def refused(self, error: Exception) -> None:
        """A request was not let in."""
        self._requests.labels(outcome_of(error)).inc()

    def ended(self, record: RequestRecord) -> None:
        self._requests.labels(record.outcome).inc()
        for reason in record.finish_reasons or (ABORT if record.outcome == CANCELLED else ERROR,):
            self._choices.labels(reason).inc()
        self._replays.inc(record.summary.num_attempts - 1)
        if (why := record.summary.prefill_reason) is not None:
            self._pools.labels((Role.PREFILL if why.uses_prefill else Role.DECODE).value, why).inc()
        waits_s = record.waits_s
        self._queued.observe(sum(waits_s.values()))
        for gate, wait_s in waits_s.items():
            self._waits.labels(gate).inc(wait_s)
        if record.outcome == OK:
            self._whole.observe(record.total_s)
        if record.summary.cached is not None:
            self._prompt_tokens.inc(record.summary.num_prompt_tokens)
            self.prefix_cache.count(record.summary.num_prompt_tokens, record.summary.cached)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> prometheus.Histogram:
        return prometheus.Histogram(name, text, namespace=NAMESPACE, registry=self.registry, buckets=buckets_s)

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)


class TokenTiming:
    """The times at which a request's tokens come, of one monotonic clock."""

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self.first_token_s: float | None = None
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._last_s: dict[int, float] = {}

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its first token; None before."""
        return None if self.first_token_s is None else self.first_token_s - self._arrived_s

    def gained(self, choice: int, num_tokens: int, now_s: float) -> None:
        """Counts tokens that a choice gained. Tokens that come together share the time since the one before."""
        if not num_tokens:
            return
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._metrics.first_token(now_s - self._arrived_s)
        last_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        self._metrics.tokens(num_tokens)
        if last_s is None:
            return
        for _ in range(num_tokens):
            self._metrics.inter_token((now_s - last_s) / num_tokens)
