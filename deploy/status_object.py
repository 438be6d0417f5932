"""The status of a cluster as one object, for scripts."""

from typing import Any

from wire.block_counts import BLOCK_STATES
from wire.convert import tiers_from_pb
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import Tier

CONNECTION_COUNTS = ("hits", "misses", "errors", "corrupt", "written")


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
        "tiers": {tier.tier: _tier(tier) for tier in status.tiers},
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


def _tier(tier: worker_pb2.TierStatus) -> dict[str, Any]:
    """What the tier has: a state, or the pages of a node under an epoch; its counts under names of their own."""
    if tier.tier != Tier.HOST:
        return {"state": tier.state, **{name: tier.counts[name] for name in CONNECTION_COUNTS}}
    pages = {"blocks": _blocks(tier.blocks), "block_bytes": tier.block_bytes, "epoch": tier.epoch}
    return pages | {"num_leases": tier.counts["leases"], "num_holds": tier.counts["holds"]}


def _prefix_cache(cache: cluster_pb2.PrefixCache) -> dict[str, int]:
    return {"queries": cache.queries, **tiers_from_pb(cache.hits)}


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, int]:
    return {name: getattr(blocks, name) for name in (*BLOCK_STATES, "total")}
