"""The status of a cluster, for people."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from cli.table import NOT_KNOWN, render
from deploy.plan.byte_size import format_bytes
from wire.convert import arenas_of, status_of
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import BLOCK_STATES, COLD_TIERS, FAR_COUNTS, FAR_TIERS, Tier, advice

NUM_EVENTS = 10
WORKER_TOLD = ("running", "waiting", "preempted", "computed", "cached", "hits", "generated")
WORKER_HEAD = ("worker", "pid", "state", *WORKER_TOLD, "node")
WORKER_NOTE = """\
(running, waiting, preempted: answers; computed, cached: tokens of prompts; hits: the share that was cached;
generated: tokens; since the start of each worker)"""
BLOCK_HEAD = ("KV blocks", "total", "in use", *BLOCK_STATES)
COLD_STATES = {
    "broken": "does not answer, and is left alone",
    "full": "full, and refuses blocks",
    "read-only": "refuses blocks, and is only read",
}
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def render_status(
    status: cluster_pb2.ClusterStatus, http_url: str = "", gateways: Mapping[str, bool] = MappingProxyType({})
) -> str:
    """Renders queue and hits, workers, blocks by state, tiers, last events, problems.

    gateways: whether each is alive.
    """
    events = status.events[-NUM_EVENTS:]
    parts = [
        "\n".join(_summary(status, http_url, gateways)),
        _render_workers(_sorted(status.workers)),
        _render_blocks(status),
        _render_tiers(status),
        "\n".join(["last events", *(f"  {_age(event.age_s):>10}  {event.text}" for event in events)]) if events else "",
        "\n".join(["problems", *(f"  {problem}" for problem in status.problems)]) if status.problems else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(status: cluster_pb2.ClusterStatus, http_url: str, gateways: Mapping[str, bool]) -> Iterator[str]:
    yield f"{status.model} at {status.address}"
    if http_url:
        yield f"http      {http_url}"
    if len(gateways) > 1:
        yield f"gateways  {', '.join(name if is_alive else f'{name} (gone)' for name, is_alive in gateways.items())}"
    yield f"requests  {status.num_running} running, {status.num_queued} waiting for their first token"
    if status.pools:
        ready = ", ".join(f"{pool.role} {pool.num_ready} of {pool.size}" for pool in status.pools)
        yield f"pools     {ready} workers ready"
    cache = status.prefix_cache
    by_tier = ", ".join(f"{hits.tier} {_share(hits.tokens, cache.queries)}" for hits in cache.hits)
    found = _share(sum(hits.tokens for hits in cache.hits), cache.queries)
    yield f"hits      {f'{found} of {cache.queries} prompt tokens ({by_tier})' if cache.queries else 'no prompts yet'}"
    if status.metrics_address:
        yield f"metrics   http://{status.metrics_address}/metrics"


def _render_workers(workers: Sequence[worker_pb2.WorkerStatus]) -> str:
    if not workers:
        return "no workers"
    # The last column is left out where all would have the same.
    num_columns = len(WORKER_HEAD) - (len({worker.node_id for worker in workers}) == 1)
    rows = [_worker_row(worker)[:num_columns] for worker in workers]
    return f"{render(WORKER_HEAD[:num_columns], rows)}\n{WORKER_NOTE}"


def _worker_row(worker: worker_pb2.WorkerStatus) -> tuple[str, ...]:
    computed, cached = worker.computed_prompt_tokens, worker.cached_prompt_tokens
    counts = (worker.num_running, worker.num_waiting, worker.num_preemptions, computed, cached)
    cells = (*map(str, counts), _share(cached, computed + cached), str(worker.generated_tokens))
    known = (worker.worker_id, str(worker.pid), worker.state or "no answer")
    told = cells if worker.HasField("blocks") else (NOT_KNOWN,) * len(cells)
    return (*known, *told, worker.node_id)


def _render_blocks(status: cluster_pb2.ClusterStatus) -> str:
    workers = [(worker.worker_id, worker.blocks) for worker in _sorted(status.workers) if worker.HasField("blocks")]
    arenas = [(name, arena.blocks) for name, arena in _named_arenas(status)]
    rows = [_block_row(name, blocks) for name, blocks in (*workers, *arenas) if blocks.total]
    return render(BLOCK_HEAD, rows) if rows else ""


def _block_row(name: str, blocks: worker_pb2.BlockCounts) -> tuple[str, ...]:
    in_use = _share(blocks.total - blocks.free - blocks.cached, blocks.total)
    return (name, str(blocks.total), in_use, *(str(getattr(blocks, state)) for state in BLOCK_STATES))


def _render_tiers(status: cluster_pb2.ClusterStatus) -> str:
    lines = [(name, _arena_line(arena)) for name, arena in _named_arenas(status)]
    far = {tier: status_of(tier, status.tiers) for tier in FAR_TIERS}
    lines += [(str(tier), _far_line(told)) for tier, told in far.items() if tier in COLD_TIERS or _is_on(told)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {line}" for name, line in lines)


def _named_arenas(status: cluster_pb2.ClusterStatus) -> list[tuple[str, worker_pb2.TierStatus]]:
    """Returns each arena with its node's id, unless there is but one."""
    if len(arenas := arenas_of(status.workers)) > 1:
        return [(f"arena of {node_id}", arena) for node_id, arena in sorted(arenas.items())]
    return [("arena", status_of(Tier.HOST, status.tiers))]


def _arena_line(host: worker_pb2.TierStatus) -> str:
    size = format_bytes(host.blocks.total * host.block_bytes)
    told = f"{size}, {host.counts['leases']} being read, {host.counts['holds']} prompts held for decode"
    return told if host.blocks.total else NOT_KNOWN


def _far_line(far: worker_pb2.TierStatus) -> str:
    counts = ", ".join(f"{far.counts[name]} {name.replace('_', ' ')}" for name in FAR_COUNTS)
    return f"{state_with_advice(far)}: {counts}" if _is_on(far) else far.state or NOT_KNOWN


def state_with_advice(far: worker_pb2.TierStatus) -> str:
    """Renders the state of a tier beyond the node, and the way out of it."""
    state, way_out = COLD_STATES.get(far.state, far.state), advice(far.tier, far.state)
    return f"{state} ({way_out})" if way_out else state


def _is_on(far: worker_pb2.TierStatus) -> bool:
    return far.state not in ("", "off")


def _sorted(workers: Sequence[worker_pb2.WorkerStatus]) -> list[worker_pb2.WorkerStatus]:
    """Sorts prefill workers first, then by number."""
    return sorted(workers, key=lambda worker: (worker.role != "prefill", len(worker.worker_id), worker.worker_id))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else NOT_KNOWN


def _age(age_s: float) -> str:
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"
