"""`baton status`: how a cluster is."""

import argparse
import json
import sys
from pathlib import Path

from deploy.cli.command import Subparsers, add_command
from deploy.cli.status_object import to_object
from deploy.cli.status_view import render_status
from deploy.local import run_dir
from deploy.local.client import call_operator, find_cluster
from deploy.local.state import ClusterState
from wire.pb import cluster_pb2

DESCRIPTION = """\
Shows the pools, their KV pages by state, the tiers, the queue and the last events.

With --check every part verifies its invariants (page states sum to the pool, references are those of requests, leases
and holds, nothing is left at rest), and the exit code is 1 if one is violated."""
TIMEOUT_S = 30.0


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "status", "show how a cluster is", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="print one object, for scripts")
    parser.add_argument("--check", action="store_true", help="verify the invariants")


def run(args: argparse.Namespace) -> int:
    state = find_cluster(args.name)
    status = call_operator(state, "GetStatus", cluster_pb2.GetStatusRequest(check=args.check), TIMEOUT_S)
    if args.json:
        print(json.dumps(to_object(status)))
    else:
        print(render_status(status))
        _show_logs(state)
    if not args.check:
        return 0
    if status.problems:
        print(f"baton: {len(status.problems)} problems", file=sys.stderr)
        return 1
    if not args.json:
        print("\nall invariants hold")
    return 0


def _show_logs(state: ClusterState) -> None:
    """Prints where the logs are, which only a Ray cluster of our own lets us know."""
    if state.head is not None:
        print(f"\nlogs in {run_dir.ray_logs(Path(state.run_dir))}")
