"""`baton drain`: takes one worker out of a live cluster."""

import argparse
import asyncio

from deploy.cli.command import Subparsers, add_command
from deploy.local.client import find_cluster, metadata, operator
from deploy.local.state import ClusterState
from wire.pb import cluster_pb2

DESCRIPTION = """\
Takes one worker out: it gets no new requests, finishes or hands over what it has, and ends. Its pool is smaller by one
afterwards. Returns when it is gone."""
TIMEOUT_S = 600.0


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "drain", "take one worker out", DESCRIPTION, run)
    parser.add_argument("worker", help="its id, as `baton status` shows it")


def run(args: argparse.Namespace) -> int:
    asyncio.run(_drain(find_cluster(args.name), args.worker))
    print(f"{args.worker} is gone")
    return 0


async def _drain(state: ClusterState, worker_id: str) -> None:
    async with operator(state) as stub:
        request = cluster_pb2.DrainRequest(worker_id=worker_id)
        await stub.Drain(request, metadata=metadata(state), timeout=TIMEOUT_S)
