"""`baton drain`: takes one worker, or a node with all of its workers, out of a live cluster."""

import argparse

from cli.terminal import Subparsers, add_command
from deploy.deadlines import ORDER_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from wire.pb import cluster_pb2

DESCRIPTION = """\
Takes a worker, or a node with all its workers, out of the cluster. A worker gets no new requests, finishes or hands
over its own, and ends; its pool is smaller afterwards. In the places of a node's workers others start on other nodes.
A node stays until the prompts that it holds are fetched elsewhere and blocks that only it has are in Redis or files, at
most `worker.drain_grace_s`. Returns when all of it is gone."""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "drain", "take a worker or a node out", DESCRIPTION, run)
    parser.add_argument(
        "worker", metavar="WORKER_OR_NODE", type=str, help="the worker's id, or the node's, as `baton status` shows it"
    )


def run(args: argparse.Namespace) -> int:
    request = cluster_pb2.DrainRequest(worker_id=args.worker)
    call_operator(find_cluster(args.name), "Drain", request, ORDER_IN_COMMAND_S)
    print(f"{args.worker} is gone")
    return 0
