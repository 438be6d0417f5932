"""Metrics of requests. docs/operating.md describes each metric."""

from collections.abc import Iterable, Mapping

import prometheus_client as prometheus

from router.disaggregation import PrefillReason
from router.observe.journal import CANCELLED, OK, RequestJournal, outcome_of
from wire.ids import tenant_of
from wire.journal import SpanPhase, row_of
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from wire.tier import Tier

NAMESPACE = "baton"
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_USERS = 1024
"""Bound on the keys whose usage is counted one by one, for the life of a router; further ones count together."""
OTHERS = ("others", "")
ABORT, ERROR = "abort", "error"
"""Finish reasons of a request that did not end well."""


USAGE = {
    "requests": "Requests that are over",
    "computed_tokens": "Tokens that workers computed for prompts",
    "cached_tokens": "Prompt tokens whose KV was found",
    "generated_tokens": "Tokens sent to clients",
    "worker_seconds": "Time that workers computed or generated for requests, which share steps",
}
WORK = (SpanPhase.COMPUTE, SpanPhase.GENERATE)


class RequestMetrics:
    """The metrics of requests, written on the event loop and read by scrapers' threads, in their own registry."""

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
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in a tier", "tier")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in a tier", "tier")
        self._pools = self._counter("prompt_pools", "Prompts by the pool that computes them, and why", "pool", "reason")
        self._replays = self._counter("request_replays", "Attempts at requests after their first, but for moves")
        self._moves = self._counter("prompt_moves", "Prompts returned from a queue because another worker was free")
        self._used = {
            name: self._counter(f"tenant_{name}", f"{text}, by tenant and key", "tenant", "key")
            for name, text in USAGE.items()
        }
        self._users: set[tuple[str, str]] = set()

    @property
    def prefix_cache(self) -> cluster_pb2.PrefixCache:
        """The number of prompt tokens so far, and the number that each tier had."""
        queries, found = _values(self._prompt_tokens)[()], _values(self._hits)
        hits = [pb.TierTokens(tier=tier, tokens=int(found.get((tier,), 0))) for tier in Tier]
        return cluster_pb2.PrefixCache(queries=int(queries), hits=hits)

    @property
    def usage(self) -> Iterable[cluster_pb2.TenantUsage]:
        """The usage of each tenant and key so far."""
        by_name = {name: _values(counter) for name, counter in self._used.items()}
        for tenant, key in sorted(self._users):
            values = {name: values[tenant, key] for name, values in by_name.items()}
            worker_s = values.pop("worker_seconds")
            counts = {name: int(value) for name, value in values.items()}
            yield cluster_pb2.TenantUsage(tenant=tenant, key=key, worker_s=worker_s, **counts)

    def gained(self, journal: RequestJournal, choice: int, num_tokens: int, now_s: float) -> None:
        """Counts gained tokens of a choice. Tokens that come together share the time since the last gain."""
        if not num_tokens:
            return
        is_first, last_s = journal.ttft_s is None, journal.gain(choice, num_tokens, now_s)
        self._generated.inc(num_tokens)
        if is_first and journal.ttft_s is not None:
            self._first_token.observe(journal.ttft_s)
        if last_s is not None:
            for _ in range(num_tokens):
                self._inter_token.observe((now_s - last_s) / num_tokens)

    def refused(self, error: Exception) -> None:
        """Counts a refused request."""
        self._requests.labels(outcome_of(error)).inc()

    def ended(self, journal: RequestJournal) -> None:
        """Counts an ended request."""
        self._requests.labels(journal.outcome).inc()
        for reason in journal.finish_reasons or (ABORT if journal.outcome == CANCELLED else ERROR,):
            self._choices.labels(reason).inc()
        self._moves.inc(journal.num_moves)
        self._replays.inc(journal.num_attempts - 1 - journal.num_moves)
        if reason := journal.timeline.prefill_reason:
            role = Role.PREFILL if PrefillReason(reason).uses_prefill else Role.DECODE
            self._pools.labels(role.value, reason).inc()
        waits_s = journal.waits_s
        self._queued.observe(sum(waits_s.values()))
        for gate, wait_s in waits_s.items():
            self._waits.labels(gate).inc(wait_s)
        if journal.outcome == OK:
            self._whole.observe(journal.timeline.total_ms / 1000)
        if journal.source is not None:
            self._prompt_tokens.inc(journal.num_prompt_tokens)
            self._count_tiers(journal.num_prompt_tokens, journal.cached)
        self._use(journal)

    def _use(self, journal: RequestJournal) -> None:
        """Counts what a request used as its tenant's and key's."""
        user = (tenant_of(journal.request_id), journal.key_id)
        user = user if user in self._users or len(self._users) < MAX_USERS else OTHERS
        self._users.add(user)
        used = {
            "requests": 1,
            "computed_tokens": journal.total("tokens_computed"),
            "cached_tokens": sum(journal.cached.values()),
            "generated_tokens": journal.num_output_tokens,
            "worker_seconds": sum(one.duration_ms for one in journal.spans if row_of(one.name).phase in WORK) / 1000,
        }
        for name, amount in used.items():
            self._used[name].labels(*user).inc(amount)

    def _count_tiers(self, num_sought: int, cached: Mapping[str, int]) -> None:
        """Counts lookups and hits of tiers; a tier is asked for tokens that no nearer tier had."""
        for tier in Tier:
            self._queries.labels(tier).inc(num_sought)
            self._hits.labels(tier).inc(cached.get(tier, 0))
            num_sought -= cached.get(tier, 0)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> prometheus.Histogram:
        return prometheus.Histogram(name, text, namespace=NAMESPACE, registry=self.registry, buckets=buckets_s)

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)


def _values(counter: prometheus.Counter) -> dict[tuple[str, ...], float]:
    """Returns the values of a counter by its labels' values."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {(*one.labels.values(),): one.value for one in samples if one.name.endswith("_total")}
