"""The status of a cluster as one object, for scripts."""

from typing import Any

from wire.block_counts import BLOCK_STATES
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import TIERS


def to_object(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": status.model,
        "address": status.address,
        "metrics_address": status.metrics_address,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "pools": {
            role: [_worker(worker) for worker in status.workers if worker.role == role]
            for role in ("prefill", "decode")
        },
        "prefix_cache": _prefix_cache(status.prefix_cache),
        "tiers": {"host": _host(status.host), "redis": _redis(status.redis)},
        "events": [{"age_s": event.age_s, "text": event.text} for event in status.events],
        "problems": list(status.problems),
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "pid": worker.pid,
        "state": worker.state,
        "blocks": _blocks(worker.blocks),
        "computed_prompt_tokens": worker.computed_prompt_tokens,
        "cached_prompt_tokens": worker.cached_prompt_tokens,
        "generated_tokens": worker.generated_tokens,
        "num_running": worker.num_running,
        "num_waiting": worker.num_waiting,
        "num_preemptions": worker.num_preemptions,
        "engine_silent_s": worker.engine_silent_s,
    }


def _host(host: worker_pb2.HostTierStatus) -> dict[str, Any]:
    return {
        "blocks": _blocks(host.blocks),
        "block_bytes": host.block_bytes,
        "num_leases": host.num_leases,
        "num_holds": host.num_holds,
        "epoch": host.epoch,
    }


def _redis(redis: worker_pb2.RedisTierStatus) -> dict[str, Any]:
    counts = {name: getattr(redis, name) for name in ("hits", "misses", "errors", "corrupt", "written")}
    return {"state": redis.state, **counts}


def _prefix_cache(cache: cluster_pb2.PrefixCache) -> dict[str, int]:
    return {name: getattr(cache, name) for name in ("queries", *TIERS)}


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, int]:
    return {name: getattr(blocks, name) for name in (*BLOCK_STATES, "total")}
