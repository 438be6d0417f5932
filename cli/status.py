"""`baton status`: shows the state of a cluster."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from cli.command import Subparsers, add_command
from cli.status_view import render_status
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local import run_dir
from deploy.local.client import call_operator, find_cluster
from deploy.processes.process import recorded_gateways
from wire.convert import arenas_of, tiers_from_pb
from wire.pb import cluster_pb2, worker_pb2
from wire.tier import BLOCK_STATES, FAR_COUNTS, Tier

DESCRIPTION = """\
Shows the pools, their KV pages by state, the tiers, the queue and the last events.

With --check every part verifies its invariants (page states sum to the pool, references are those of requests, leases
and holds, nothing is left at rest), and the exit code is 1 if one is violated."""
CLUSTER_FIELDS = ("model", "address", "metrics_address", "num_running", "num_queued")
WORKER_COUNTS = ("computed_prompt_tokens", "cached_prompt_tokens", "generated_tokens")
WORKER_STATE = ("num_running", "num_waiting", "num_preemptions", "engine_silent_s")


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "status", "show how a cluster is", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")
    parser.add_argument("--check", action="store_true", help="verify the invariants")


def run(args: argparse.Namespace) -> int:
    state = find_cluster(args.name)
    status = call_operator(state, "GetStatus", cluster_pb2.GetStatusRequest(check=args.check), STATUS_IN_COMMAND_S)
    gateways = recorded_gateways(Path(state.run_dir))
    if args.json:
        told = [{"id": name, "pid": one.pid, "is_alive": one.is_alive} for name, one in gateways.items()]
        print(json.dumps(to_object(status) | {"http_address": state.addresses.http, "gateways": told}))
    else:
        print(render_status(status, state.http_url, {name: one.is_alive for name, one in gateways.items()}))
        if state.head is not None:  # a Ray cluster that was joined keeps its logs elsewhere
            print(f"\nlogs in {run_dir.ray_logs(Path(state.run_dir))}")
    if args.check and status.problems:
        print(f"baton: {len(status.problems)} problems", file=sys.stderr)
        return 1
    if args.check and not args.json:
        print("\nall invariants hold")
    return 0


def to_object(status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    """Returns the object that `--json` prints; protobuf's own JSON has 64-bit counts as texts, and omits unset ones."""
    roles = ("prefill", "decode")
    return {
        **_pick(status, *CLUSTER_FIELDS),
        "pools": {role: [_worker(worker) for worker in status.workers if worker.role == role] for role in roles},
        "nodes": [_node(node_id, arena, status) for node_id, arena in arenas_of(status.workers).items()],
        "sizes": {pool.role: _pick(pool, "size", "num_ready") for pool in status.pools},
        "prefix_cache": {"queries": status.prefix_cache.queries, **tiers_from_pb(status.prefix_cache.hits)},
        "tiers": {tier.tier: _tier(tier) for tier in status.tiers},
        "events": [_pick(event, "age_s", "text") for event in status.events],
        "problems": list(status.problems),
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    known = {"id": worker.worker_id, "node": worker.node_id, **_pick(worker, "pid", "state")}
    return known | {"blocks": _blocks(worker.blocks)} | _pick(worker, *WORKER_COUNTS, *WORKER_STATE)


def _node(node_id: str, arena: worker_pb2.TierStatus, status: cluster_pb2.ClusterStatus) -> dict[str, Any]:
    workers = [worker.worker_id for worker in status.workers if worker.node_id == node_id]
    return {"id": node_id, "workers": workers, "tiers": {"host": _tier(arena)}}


def _tier(tier: worker_pb2.TierStatus) -> dict[str, Any]:
    """Describes a tier: a state, or the pages of a node under an epoch; its counts under names of their own."""
    if tier.tier != Tier.HOST:
        return {"state": tier.state, **{name: tier.counts[name] for name in FAR_COUNTS}}
    pages = {"blocks": _blocks(tier.blocks), "block_bytes": tier.block_bytes, "epoch": tier.epoch}
    return pages | {"num_leases": tier.counts["leases"], "num_holds": tier.counts["holds"]}


def _blocks(blocks: worker_pb2.BlockCounts) -> dict[str, Any]:
    return _pick(blocks, *BLOCK_STATES, "total")


def _pick(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}
