"""The status of a cluster as one object, for scripts.

Not protobuf's own JSON: that writes 64-bit counts as texts, and leaves out what is not set.
"""

from typing import Any

from google.protobuf.message import Message

from wire.block_counts import BLOCK_STATES
from wire.convert import tiers_from_pb
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import Tier

CLUSTER_FIELDS = ("model", "address", "metrics_address", "num_running", "num_queued")
WORKER_COUNTS = ("computed_prompt_tokens", "cached_prompt_tokens", "generated_tokens")
WORKER_STATE = ("num_running", "num_waiting", "num_preemptions", "engine_silent_s")
CONNECTION_COUNTS = ("hits", "misses", "errors", "corrupt", "written")


def to_object(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    roles = ("prefill", "decode")
    return {
        **_pick(status, *CLUSTER_FIELDS),
        "pools": {role: [_worker(worker) for worker in status.workers if worker.role == role] for role in roles},
        "prefix_cache": {"queries": status.prefix_cache.queries, **tiers_from_pb(status.prefix_cache.hits)},
        "tiers": {tier.tier: _tier(tier) for tier in status.tiers},
        "events": [_pick(event, "age_s", "text") for event in status.events],
        "problems": list(status.problems),
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    known = {"id": worker.worker_id, **_pick(worker, "pid", "state"), "blocks": _blocks(worker.blocks)}
    return known | _pick(worker, *WORKER_COUNTS, *WORKER_STATE)


def _tier(tier: worker_pb2.TierStatus) -> dict[str, Any]:
    """Describes a tier: a state, or the pages of a node under an epoch; its counts under names of their own."""
    if tier.tier != Tier.HOST:
        return {"state": tier.state, **{name: tier.counts[name] for name in CONNECTION_COUNTS}}
    pages = {"blocks": _blocks(tier.blocks), "block_bytes": tier.block_bytes, "epoch": tier.epoch}
    return pages | {"num_leases": tier.counts["leases"], "num_holds": tier.counts["holds"]}


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, Any]:
    return _pick(blocks, *BLOCK_STATES, "total")


def _pick(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}
