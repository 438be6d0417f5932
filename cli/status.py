"""`baton status`: shows the state of a cluster."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from cli.terminal import NOT_KNOWN, Subparsers, add_command, escaped, render, repeat
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local import run_dir
from deploy.local.client import call_each, call_operator, find_cluster
from deploy.plan.byte_size import format_bytes
from deploy.processes.process import ProcessRef, recorded_gateways
from wire.convert import arenas_of, status_of, tiers_from_pb
from wire.errors import DeadlineExceeded, InvalidRequest, Unavailable
from wire.pb import cluster_pb2, worker_pb2
from wire.pools import Addresses, node_name
from wire.tier import BLOCK_STATES, COLD_TIERS, FAR_COUNTS, FAR_TIERS, NOUNS, Cause, Tier, advice

DESCRIPTION = """\
Shows the pools, their KV pages by state, the tiers, the queue and the last events.

With --check every part verifies its invariants (page states sum to the pool, references are those of requests, leases
and holds, nothing is left at rest), and the exit code is 1 if one is violated. With --watch it is drawn again and
again; without a terminal each is a line."""
CLUSTER_FIELDS = ("model", "address", "metrics_address", "num_running", "num_queued", "batch_invariant")
POOL_COUNTS, POOL_LIMIT = ("size", "num_ready"), ("limit", "last_order", "last_order_age_s")
WORKER_COUNTS = ("computed_prompt_tokens", "cached_prompt_tokens", "generated_tokens")
WORKER_STATE = ("num_running", "num_waiting", "num_preemptions", "engine_silent_s")
WORKER_MEMORY = ("load_s", "memory_bytes", "mapped_bytes")
WORKER_VERSION = ("release", "protocol_version")
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
WATCH_EVERY_S = 2.0
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "status", "show how a cluster is", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")
    parser.add_argument("--check", action="store_true", help="verify the invariants")
    told = f"show it every {WATCH_EVERY_S:g} s, until Ctrl-C; without --json and --check"
    parser.add_argument("--watch", action="store_true", help=told)


def run(args: argparse.Namespace) -> int:
    if args.watch and (args.json or args.check):
        raise InvalidRequest("--watch", "goes without --json and --check")
    return repeat(lambda: _show_again(args.name), WATCH_EVERY_S) if args.watch else _show_once(args)


def _show_again(name: str) -> bool:
    """Redraws the status in place; without a terminal prints it in one line.

    Shows a router's failure to answer, and asks again. Raises Unavailable when the cluster is gone.
    """
    state, is_drawn = find_cluster(name), sys.stdout.isatty()
    try:
        status = call_operator(state, "GetStatus", cluster_pb2.GetStatusRequest(), STATUS_IN_COMMAND_S)
        told = render_status(status, state.http_url) if is_drawn else "; ".join(_summary(status, "", {}))
    except (Unavailable, DeadlineExceeded) as error:
        told = error.message
    told = escaped(f"{time.strftime('%H:%M:%S')}  {told}")
    print(_drawn(told) if is_drawn else f"{' '.join(told.split())}\n", end="", flush=True)
    return True


def _drawn(text: str) -> str:
    """Returns the control codes and text that replace the last text, cut to the terminal's size."""
    columns, num_lines = shutil.get_terminal_size()
    lines = text.splitlines()[: num_lines - 1]
    return "\x1b[H" + "".join(f"{line[:columns]}\x1b[K\n" for line in lines) + "\x1b[J"


def _show_once(args: argparse.Namespace) -> int:
    state = find_cluster(args.name)
    asked = cluster_pb2.GetStatusRequest(check=args.check)
    status, routers = call_operator(state, "GetStatus", asked, STATUS_IN_COMMAND_S), dict[str, Any]()
    if "," in state.addresses.operator:
        routers = call_each(state, "GetStatus", asked, STATUS_IN_COMMAND_S)
        others = [problem for one in routers.values() if one is not None for problem in one.problems]
        status.problems.extend(problem for problem in dict.fromkeys(others) if problem not in status.problems)
    gateways = recorded_gateways(Path(state.run_dir))
    if args.json:
        print(json.dumps({**to_object(status, state.addresses, gateways), "routers": router_objects(routers)}))
    else:
        print(render_status(status, state.http_url, {name: one.is_alive for name, one in gateways.items()}))
        for address, one in routers.items():
            told = f"{one.num_running} running, {one.num_queued} waiting" if one else "does not answer"
            print(f"router    {one.address if one else address}: {told}")
        if state.head is not None:  # a Ray cluster that was joined keeps its logs elsewhere
            print(f"\nlogs in {run_dir.ray_logs(Path(state.run_dir))}")
    if args.check and status.problems:
        print(f"baton: {len(status.problems)} problems", file=sys.stderr)
        return 1
    if args.check and not args.json:
        print("\nall invariants hold")
    return 0


def router_objects(routers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describes each of several routers by its operator's address."""
    counts = ("num_running", "num_queued")
    return [
        {"operator_address": address, "is_alive": one is not None} | (_pick(one, "address", *counts) if one else {})
        for address, one in routers.items()
    ]


def to_object(
    status: cluster_pb2.ClusterStatus, addresses: Addresses, gateways: Mapping[str, ProcessRef]
) -> dict[str, Any]:
    """Returns the object that `--json` prints; protobuf's own JSON writes 64-bit counts as strings and omits zeros."""
    roles = ("prefill", "decode")
    return {
        **_pick(status, *CLUSTER_FIELDS),
        "pools": {role: [_worker(worker) for worker in status.workers if worker.role == role] for role in roles},
        "nodes": [_node(node_id, arena, status) for node_id, arena in arenas_of(status.workers).items()],
        "sizes": {pool.role: _pick(pool, *POOL_COUNTS, *(POOL_LIMIT if pool.limit else ())) for pool in status.pools},
        "prefix_cache": {"queries": status.prefix_cache.queries, **tiers_from_pb(status.prefix_cache.hits)},
        "uncached_blocks": dict(status.uncached_blocks),
        "tiers": {tier.tier: _tier(tier) for tier in status.tiers},
        "events": [_pick(event, "age_s", "text") for event in status.events],
        "problems": list(status.problems),
        "http_address": addresses.http,
        "operator_address": addresses.operator,
        "gateways": [{"id": name, "pid": one.pid, "is_alive": one.is_alive} for name, one in gateways.items()],
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    known = {"id": worker.worker_id, "node": node_name(worker.node_id), **_pick(worker, "pid", "state")}
    others = _pick(worker, *WORKER_COUNTS, *WORKER_STATE, *WORKER_MEMORY, *WORKER_VERSION)
    return known | {"blocks": _blocks(worker.blocks)} | others


def _node(node_id: str, arena: worker_pb2.TierStatus, status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    workers = [worker.worker_id for worker in status.workers if worker.node_id == node_id]
    return {"id": node_id, "node": node_name(node_id), "workers": workers, "tiers": {"host": _tier(arena)}}


def _tier(tier: worker_pb2.TierStatus) -> dict[str, Any]:
    """Describes a tier: its state or, for pages, the epoch and node; and its counts by name."""
    if tier.tier != Tier.HOST:
        return {"state": tier.state, **{name: tier.counts[name] for name in FAR_COUNTS}}
    pages = {"blocks": _blocks(tier.blocks), "block_bytes": tier.block_bytes, "epoch": tier.epoch}
    return pages | {f"num_{name}": tier.counts[name] for name in ("leases", "holds", "kept")}


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, Any]:
    return _pick(blocks, *BLOCK_STATES, "total")


def _pick(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


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


def memory_lines(workers: Sequence[worker_pb2.WorkerStatus]) -> Iterator[str]:
    """Describes each worker's load time and memory, and the memory of nodes."""
    for worker in _sorted(workers):
        parts = [f"loaded in {worker.load_s:.1f} s", f"{format_bytes(worker.memory_bytes)} of its own"]
        parts += [f"{format_bytes(worker.mapped_bytes)} of weights shared on its node"] if worker.mapped_bytes else []
        yield f"{worker.worker_id}: {', '.join(parts)}"
    for name in dict.fromkeys(node_name(worker.node_id) for worker in workers):
        here = [worker for worker in workers if node_name(worker.node_id) == name]
        num_bytes = sum(worker.memory_bytes for worker in here) + max(worker.mapped_bytes for worker in here)
        yield f"node {name}: {format_bytes(num_bytes)} for {len(here)} workers, without the arena"


def _summary(status: cluster_pb2.ClusterStatus, http_url: str, gateways: Mapping[str, bool]) -> Iterator[str]:
    yield f"{status.model} at {status.address}"
    if status.HasField("batch_invariant") and not status.batch_invariant:
        yield "tokens    may depend on other requests: a failover goes on, and does not promise the very same tokens"
    if http_url:
        yield f"http      {http_url}"
    if len(gateways) > 1:
        yield f"gateways  {', '.join(name if is_alive else f'{name} (gone)' for name, is_alive in gateways.items())}"
    yield f"requests  {status.num_running} running, {status.num_queued} waiting for their first token"
    if status.pools:
        ready = ", ".join(f"{pool.role} {pool.num_ready} of {pool.size}" for pool in status.pools)
        yield f"pools     {ready} workers ready"
    for pool in status.pools:
        last = f"{_age(pool.last_order_age_s)} {pool.last_order}" if pool.last_order else "no order yet"
        if pool.limit:
            yield f"{pool.role:<9} follows {pool.limit}; {last}"
    if len(releases := _by_release(status.workers)) > 1:
        told = (f"{release}: {', '.join(names)}" for release, names in sorted(releases.items()))
        yield f"releases  {'; '.join(told)}"
    cache = status.prefix_cache
    by_tier = ", ".join(f"{hits.tier} {_share(hits.tokens, cache.queries)}" for hits in cache.hits)
    found = _share(sum(hits.tokens for hits in cache.hits), cache.queries)
    yield f"hits      {f'{found} of {cache.queries} prompt tokens ({by_tier})' if cache.queries else 'no prompts yet'}"
    if status.uncached_blocks:
        sums = sorted(status.uncached_blocks.items(), key=lambda one: (-one[1], one[0]))
        causes = ", ".join(f"{num_blocks} {NOUNS[Cause(cause)]}" for cause, num_blocks in sums)
        yield f"uncached  blocks in the last hour: {causes}"
    if status.metrics_address:
        yield f"metrics   http://{status.metrics_address}/metrics"


def _by_release(workers: Sequence[worker_pb2.WorkerStatus]) -> dict[str, list[str]]:
    """Maps each release to its workers; workers that do not answer have none."""
    releases: dict[str, list[str]] = {}
    for worker in _sorted(workers):
        if worker.release or worker.HasField("blocks"):
            releases.setdefault(worker.release or "an earlier one", []).append(worker.worker_id)
    return releases


def _render_workers(workers: Sequence[worker_pb2.WorkerStatus]) -> str:
    if not workers:
        return "no workers"
    # The last column is left out where all would have the same.
    num_columns = len(WORKER_HEAD) - (len({node_name(worker.node_id) for worker in workers}) == 1)
    rows = [_worker_row(worker)[:num_columns] for worker in workers]
    return f"{render(WORKER_HEAD[:num_columns], rows)}\n{WORKER_NOTE}"


def _worker_row(worker: worker_pb2.WorkerStatus) -> tuple[str, ...]:
    computed, cached = worker.computed_prompt_tokens, worker.cached_prompt_tokens
    counts = (worker.num_running, worker.num_waiting, worker.num_preemptions, computed, cached)
    cells = (*map(str, counts), _share(cached, computed + cached), str(worker.generated_tokens))
    known = (worker.worker_id, str(worker.pid), worker.state or "no answer")
    told = cells if worker.HasField("blocks") else (NOT_KNOWN,) * len(cells)
    return (*known, *told, node_name(worker.node_id))


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
    """Returns each arena, with its node's id if there are several."""
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
    """Renders the state of a cold tier, and the way out of a bad state."""
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
