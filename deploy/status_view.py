"""The status of a cluster: as one object for scripts, and as text for people."""

from typing import Any

from deploy.byte_size import format_bytes
from deploy.table import render
from wire.pb import cluster_pb2, worker_pb2

BLOCK_STATES = ("free", "owned", "published", "cached", "draining")
NUM_EVENTS = 10


def to_object(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": status.model,
        "address": status.address,
        "num_running": status.num_running,
        "num_queued": status.num_queued,
        "pools": {
            role: [_worker(worker) for worker in status.workers if worker.role == role]
            for role in ("prefill", "decode")
        },
        "tiers": {"host": _host(status.host), "redis": _redis(status.redis)},
        "events": [{"age_s": event.age_s, "text": event.text} for event in status.events],
        "problems": list(status.problems),
    }


def render_status(status: cluster_pb2.ClusterStatus) -> str:
    """Pools and their pages, tiers, queue, last events."""
    parts = [
        f"{status.model} at {status.address}: {status.num_running} requests running, {status.num_queued} queued",
        _render_workers(status),
        _render_tiers(status),
        *(["events:\n" + _render_events(status)] if status.events else []),
        *(["problems:\n" + "\n".join(f"  {problem}" for problem in status.problems)] if status.problems else []),
    ]
    return "\n\n".join(parts)


def _render_workers(status: cluster_pb2.ClusterStatus) -> str:
    head = ("worker", "pid", "state", "running", "waiting", *BLOCK_STATES, "total", "computed", "cached", "generated")
    rows = [
        (
            worker.worker_id,
            str(worker.pid),
            worker.state,
            str(worker.num_running),
            str(worker.num_waiting),
            *(str(count) for count in _blocks(worker.blocks).values()),
            str(worker.computed_prompt_tokens),
            str(worker.cached_prompt_tokens),
            str(worker.generated_tokens),
        )
        for worker in sorted(status.workers, key=lambda worker: (worker.role != "prefill", worker.worker_id))
    ]
    return render(head, rows) + "\n(free to total: KV pages; computed, cached and generated: tokens since its start)"


def _render_tiers(status: cluster_pb2.ClusterStatus) -> str:
    host, redis = status.host, status.redis
    blocks = ", ".join(f"{count} {state}" for state, count in _blocks(host.blocks).items() if state != "total")
    size = format_bytes(host.blocks.total * host.block_bytes)
    counts = ", ".join(f"{count} {name}" for name, count in _redis(redis).items() if name != "state")
    lines = [
        f"host   {host.blocks.total} blocks ({size}): {blocks}; {host.num_leases} leases, {host.num_holds} holds",
        "redis  off" if redis.state == "off" else f"redis  {redis.state or 'unknown'}: {counts}",
    ]
    return "\n".join(lines)


def _render_events(status: cluster_pb2.ClusterStatus) -> str:
    return "\n".join(f"  {event.age_s:8.0f} s ago  {event.text}" for event in status.events[-NUM_EVENTS:])


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


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, int]:
    return {name: getattr(blocks, name) for name in (*BLOCK_STATES, "total")}
