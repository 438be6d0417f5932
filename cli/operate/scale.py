"""`baton scale`: resizes the pools of a live cluster."""

import argparse

from cli.terminal import Subparsers, add_command
from deploy.deadlines import ORDER_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from deploy.plan.rules import range_problem
from wire.errors import ConfigError, InvalidRequest
from wire.pb import cluster_pb2

DESCRIPTION = """\
Changes the number of workers while the cluster serves, and returns when the pools named have their size. Workers that
go finish or hand over their requests first; no request fails. Where workers do not start, the pool goes back to the
size that it has reached; a later order for the same pool ends this one with an error."""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "scale", "change the number of workers", DESCRIPTION, run)
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers, 0 for none (default: as it is)")
    parser.add_argument("--decode", type=int, metavar="M", help="decode workers, at least 1 (default: as it is)")


def run(args: argparse.Namespace) -> int:
    if args.prefill is None and args.decode is None:
        raise InvalidRequest("scale", "give --prefill N, --decode M or both")
    for role, size in (("prefill", args.prefill), ("decode", args.decode)):
        if problem := range_problem(f"pools.{role}", size):
            raise ConfigError(f"--{role} {problem}")
    request = cluster_pb2.ScaleRequest(prefill=args.prefill, decode=args.decode)
    sizes = call_operator(find_cluster(args.name), "Scale", request, ORDER_IN_COMMAND_S)
    print(f"{sizes.prefill} prefill and {sizes.decode} decode workers")
    return 0
