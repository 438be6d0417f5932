"""Metrics of workers and tiers, from the router's last status: one scrape covers the whole cluster.

A worker that is gone is in no status and so in no metric; a scrape waits for no worker.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.config import LatencyBounds
from router.observe.metrics import NAMESPACE
from wire.convert import accounts_of, arenas_of
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import BLOCK_STATES, COLD_TIERS, READ_COUNTS, Tier

WORKER = ("role", "worker")
PLACED = (*WORKER, "node", "tier")
ROUTER = ("router", "router")
NODE = ("node", "node")
Row = tuple[Sequence[str], float]
NO_LIMITS = LatencyBounds()


class WorkerCollector(Collector):
    """The collector of worker metrics. read_last: returns the last status, on any thread, without blocking.

    limits: which the sizes of the pools follow.
    """

    def __init__(self, read_last: Callable[[], cluster_pb2.ClusterStatus], limits: LatencyBounds = NO_LIMITS) -> None:
        self._read_last = read_last
        self._slo_s = [((name,), ms / 1000) for name, ms in (("ttft", limits.ttft_ms), ("itl", limits.itl_ms)) if ms]

    def collect(self) -> Iterator[Metric]:
        status = self._read_last()
        answering = [worker for worker in status.workers if worker.HasField("blocks")]
        yield from _of_requests(status, answering)
        yield from _of_blocks(answering)
        yield from _of_tiers(answering)
        for name, field, text in (
            ("pool_size", "size", "Workers that a pool is to have"),
            ("pool_ready", "num_ready", "Workers of a pool that take work now"),
        ):
            yield _gauge(name, text, ("role",), [((pool.role,), getattr(pool, field)) for pool in status.pools])
        yield _gauge("slo_seconds", "Limit on a latency, which the sizes of the pools follow", ("limit",), self._slo_s)
        yield _gauge(
            "worker_up",
            "Whether a worker answered when it was last asked",
            WORKER,
            ((_ids(worker), float(worker.HasField("blocks"))) for worker in status.workers),
        )
        yield _gauge(
            "engine_silent_seconds",
            "Since a worker's engine last finished a step; without work it does so every second",
            WORKER,
            ((_ids(worker), worker.engine_silent_s) for worker in answering),
        )


def _of_requests(status: cluster_pb2.ClusterStatus, workers: Sequence[worker_pb2.WorkerStatus]) -> Iterator[Metric]:
    running = [(_ids(worker), worker.num_running) for worker in workers]
    waiting = [(_ids(worker), worker.num_waiting) for worker in workers]
    yield _gauge(
        "num_requests_running",
        "At the router: requests that have a first token. At a worker: choices that have pages",
        WORKER,
        [(ROUTER, status.num_running), *running],
    )
    yield _gauge(
        "num_requests_waiting",
        "At the router: requests without a first token yet. At a worker: choices that wait for pages or a slot",
        WORKER,
        [(ROUTER, status.num_queued), *waiting],
    )
    for name, field, text in (
        ("num_preemptions", "num_preemptions", "Choices that lost their pages to older ones"),
        ("worker_computed_prompt_tokens", "computed_prompt_tokens", "Tokens of prompts that a worker has computed"),
        ("worker_cached_prompt_tokens", "cached_prompt_tokens", "Tokens of prompts that a worker has found in a tier"),
        ("worker_generated_tokens", "generated_tokens", "Tokens that a worker has sampled"),
        ("spec_decode_num_drafts", "num_drafts", "Drafts: guesses of one choice in one step"),
        ("spec_decode_num_draft_tokens", "num_guessed_tokens", "Tokens that were guessed"),
        ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Guesses that came true"),
    ):
        yield _counter(name, text, [(_ids(worker), getattr(worker, field)) for worker in workers])


def _of_blocks(workers: Sequence[worker_pb2.WorkerStatus]) -> Iterator[Metric]:
    pools = [((*_ids(worker), worker.node_id, str(Tier.DEVICE)), worker.blocks) for worker in workers]
    arenas = {node_id: arena for node_id, arena in arenas_of(workers).items() if arena.blocks.total}
    pools += [((*NODE, node_id, str(Tier.HOST)), arena.blocks) for node_id, arena in arenas.items()]
    yield _gauge(
        "kv_cache_usage_perc",
        "Share of KV blocks that nobody else can have now: 1 is all. Cached blocks can be had",
        PLACED,
        ((ids, _usage(blocks)) for ids, blocks in pools),
    )
    yield _gauge(
        "kv_blocks",
        "KV blocks by their state",
        (*PLACED, "state"),
        (((*ids, state), getattr(blocks, state)) for ids, blocks in pools for state in BLOCK_STATES),
    )
    yield _gauge(
        "tier_holds",
        "Prompts that a tier keeps until decode has fetched them",
        ("node", "tier"),
        [((node_id, str(Tier.HOST)), arena.counts["holds"]) for node_id, arena in arenas.items()],
    )


def _of_tiers(workers: Sequence[worker_pb2.WorkerStatus]) -> Iterator[Metric]:
    """Yields the metrics of cold tiers; a tier that is off has none."""
    tiers = [((*_ids(worker), worker.node_id, tier.tier), tier) for worker in workers for tier in worker.tiers]
    tiers = [(ids, tier) for ids, tier in tiers if _is_on(tier)]
    if not tiers:
        return
    yield _gauge(
        "tier_up",
        "Whether a worker's tier answers; 0: its breaker is open",
        PLACED,
        [(ids, float(tier.state != "broken")) for ids, tier in tiers],
    )
    accounts = [
        ((*NODE, node_id, str(tier)), one) for tier in COLD_TIERS for node_id, one in accounts_of(tier, workers).items()
    ]
    services = [(ids, account) for ids, account in accounts if _is_on(account)]
    for name, text in (
        ("written", "Blocks that a node's service has written to a tier"),
        ("refused", "Blocks that a tier has refused from a node's service, being full or read-only"),
        ("write_errors", "Calls of a node's service to a tier that failed"),
    ):
        rows = [(ids, account.counts[name]) for ids, account in services]
        yield _counter(f"tier_{name}", text, rows, PLACED)
    for name in READ_COUNTS:
        rows = [(ids, tier.counts[name]) for ids, tier in tiers]
        yield _counter(f"tier_{name}", f"Blocks asked of a tier: {name}", rows, PLACED)


def _is_on(tier: worker_pb2.TierStatus) -> bool:
    return tier.state not in ("", "off")


def _counter(name: str, text: str, rows: Iterable[Row], labels: Sequence[str] = WORKER) -> Metric:
    return _filled(CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), rows)


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    return _filled(GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _ids(worker: worker_pb2.WorkerStatus) -> tuple[str, str]:
    return worker.role, worker.worker_id


def _usage(blocks: worker_pb2.BlockCounts) -> float:
    return (blocks.total - blocks.free - blocks.cached) / blocks.total if blocks.total else 0.0
