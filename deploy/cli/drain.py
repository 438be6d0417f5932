"""`baton drain`: takes one worker, or a node with all of its workers, out of a live cluster."""

import argparse

from deploy.cli.command import Subparsers, add_command
from deploy.local.client import call_operator, find_cluster
from wire.pb import cluster_pb2

DESCRIPTION = """\
Takes one worker out: it gets no new requests, finishes or hands over what it has, and ends. Its pool is smaller by one
afterwards. Of a node, all workers go that way; it stays until decode workers elsewhere have fetched the prompts that it
holds and blocks that only it has are in Redis or files, for the workers' grace at most. Returns when all is gone."""
TIMEOUT_S = 600.0


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "drain", "take a worker or a node out", DESCRIPTION, run)
    parser.add_argument("worker", type=str, help="the worker's id, or the node's, as `baton status` shows it")


def run(args: argparse.Namespace) -> int:
    request = cluster_pb2.DrainRequest(worker_id=args.worker)
    call_operator(find_cluster(args.name), "Drain", request, TIMEOUT_S)
    print(f"{args.worker} is gone")
    return 0
