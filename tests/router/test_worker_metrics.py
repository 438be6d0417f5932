import prometheus_client as prometheus
import pytest

from router.config import LatencyBounds
from router.observe.worker_metrics import WorkerCollector
from wire.pb import cluster_pb2, worker_pb2

BLOCKS = worker_pb2.BlockCounts(free=50, owned=10, published=10, cached=25, draining=5, total=100)


ARENA = worker_pb2.BlockCounts(free=60, published=20, cached=20, total=100)
ON_A = {"node": "a", "tier": "host"}


def worker(name: str, role: str = "decode", redis: str = "up", node: str = "a") -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        worker_id=name,
        role=role,
        state="ready",
        blocks=BLOCKS,
        num_running=3,
        num_waiting=2,
        num_preemptions=7,
        num_drafts=14,
        num_guessed_tokens=16,
        num_accepted_tokens=15,
        computed_prompt_tokens=11,
        cached_prompt_tokens=12,
        generated_tokens=13,
        engine_silent_s=0.5,
        node_id=node,
        tiers=[
            worker_pb2.TierStatus(tier="host", blocks=ARENA, counts={"holds": 6}),
            worker_pb2.TierStatus(
                tier="redis",
                state=redis,
                counts={"hits": 4, "misses": 5, "errors": 6, "written": 10, "refused": 3},
            ),
        ],
    )


class Cluster:
    """A status that changes, and the metrics made of it."""

    def __init__(self, *workers: worker_pb2.WorkerStatus) -> None:
        self.status = cluster_pb2.ClusterStatus(num_running=8, num_queued=9, workers=workers)
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(WorkerCollector(lambda: self.status))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"baton_{name}", labels)

    def text(self) -> str:
        return prometheus.generate_latest(self._registry).decode()


def test_limits_that_pools_follow_are_told_in_seconds() -> None:
    registry = prometheus.CollectorRegistry()
    registry.register(WorkerCollector(cluster_pb2.ClusterStatus, LatencyBounds(ttft_ms=2500.0)))
    assert registry.get_sample_value("baton_slo_seconds", {"limit": "ttft"}) == 2.5
    assert registry.get_sample_value("baton_slo_seconds", {"limit": "itl"}) is None


def test_requests_are_told_by_role_and_worker() -> None:
    cluster = Cluster(worker("d0"), worker("p0", "prefill"))
    assert cluster.value("num_requests_running", role="router", worker="router") == 8
    assert cluster.value("num_requests_waiting", role="router", worker="router") == 9
    assert cluster.value("num_requests_running", role="prefill", worker="p0") == 3
    assert cluster.value("num_requests_waiting", role="decode", worker="d0") == 2
    assert cluster.value("num_preemptions_total", role="decode", worker="d0") == 7
    assert cluster.value("worker_computed_prompt_tokens_total", role="decode", worker="d0") == 11
    assert cluster.value("worker_cached_prompt_tokens_total", role="decode", worker="d0") == 12
    assert cluster.value("worker_generated_tokens_total", role="decode", worker="d0") == 13
    assert cluster.value("spec_decode_num_drafts_total", role="decode", worker="d0") == 14
    assert cluster.value("spec_decode_num_accepted_tokens_total", role="decode", worker="d0") == 15
    assert cluster.value("spec_decode_num_draft_tokens_total", role="decode", worker="d0") == 16


def test_cached_blocks_can_be_had_and_do_not_count_as_used() -> None:
    cluster = Cluster(worker("d0"))
    assert cluster.value("kv_cache_usage_perc", role="decode", worker="d0", node="a", tier="device") == 0.25
    assert cluster.value("kv_cache_usage_perc", role="node", worker="node", **ON_A) == 0.2
    assert cluster.value("kv_blocks", role="decode", worker="d0", node="a", tier="device", state="draining") == 5
    assert cluster.value("tier_holds", **ON_A) == 6


def test_each_node_has_its_own_arena_and_writer() -> None:
    cluster = Cluster(worker("d0"), worker("d1"), worker("d2", node="b"))
    cluster.status.workers[2].tiers[0].counts["holds"] = 7
    cluster.status.workers[1].tiers[1].counts["written"] = 9  # an older account of the same node's service
    cluster.status.workers[2].tiers[1].counts["written"] = 11
    assert [cluster.value("tier_holds", node=node, tier="host") for node in "ab"] == [6, 7]
    written = [
        cluster.value("tier_written_total", role="node", worker="node", node=node, tier="redis") for node in "ab"
    ]
    assert written == [10, 11]
    arenas = [line for line in cluster.text().splitlines() if line.startswith("baton_kv_cache_usage_perc{")]
    assert sum('tier="host"' in line for line in arenas) == 2


def test_a_worker_that_does_not_answer_is_down_and_tells_nothing_else() -> None:
    cluster = Cluster(worker("d0"), worker_pb2.WorkerStatus(worker_id="d1", role="decode", problems=["no answer"]))
    assert cluster.value("worker_up", role="decode", worker="d0") == 1
    assert cluster.value("worker_up", role="decode", worker="d1") == 0
    assert cluster.value("engine_silent_seconds", role="decode", worker="d0") == 0.5
    assert cluster.value("engine_silent_seconds", role="decode", worker="d1") is None
    assert cluster.value("num_requests_running", role="decode", worker="d1") is None


def test_a_pool_without_workers_still_tells_its_size() -> None:
    cluster = Cluster()
    cluster.status.pools.add(role="decode", size=2, num_ready=0)
    assert cluster.value("pool_size", role="decode") == 2
    assert cluster.value("pool_ready", role="decode") == 0


def test_a_worker_that_is_gone_is_gone_from_here() -> None:
    cluster = Cluster(worker("d0"), worker("d1"))
    assert 'worker="d1"' in cluster.text()
    del cluster.status.workers[1]
    assert 'worker="d1"' not in cluster.text()


@pytest.mark.parametrize(("state", "up"), [("up", 1.0), ("full", 1.0), ("broken", 0.0)])
def test_each_worker_has_its_own_line_to_redis(state: str, up: float) -> None:
    cluster = Cluster(worker("d0", redis=state))
    assert cluster.value("tier_up", role="decode", worker="d0", node="a", tier="redis") == up
    assert cluster.value("tier_hits_total", role="decode", worker="d0", node="a", tier="redis") == 4
    assert cluster.value("tier_errors_total", role="decode", worker="d0", node="a", tier="redis") == 6
    assert cluster.value("tier_written_total", role="node", worker="node", node="a", tier="redis") == 10
    assert cluster.value("tier_refused_total", role="node", worker="node", node="a", tier="redis") == 3


def test_without_redis_nothing_is_said_of_it() -> None:
    cluster = Cluster(worker("d0", redis="off"))
    assert "redis" not in cluster.text()


def test_before_anything_is_known() -> None:
    cluster = Cluster()
    cluster.status = cluster_pb2.ClusterStatus()
    assert cluster.value("num_requests_running", role="router", worker="router") == 0
    assert "kv_blocks{" not in cluster.text()
