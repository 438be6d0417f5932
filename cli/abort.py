"""`baton abort`: ends one request of a live cluster."""

import argparse

from cli.terminal import Subparsers, add_command
from deploy.deadlines import STATUS_IN_COMMAND_S
from deploy.local.client import call_operator, find_cluster
from wire.pb import inference_pb2 as pb

DESCRIPTION = """\
Ends one running request; its client gets CANCELLED, over HTTP 499, and what it has is freed. Returns when its id is
free again."""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "abort", "end one request", DESCRIPTION, run)
    told = "its id as the log has it: TENANT/ID, and ID alone for a request of the default tenant"
    parser.add_argument("request_id", metavar="REQUEST_ID", type=str, help=told)


def run(args: argparse.Namespace) -> int:
    request = pb.AbortRequest(request_id=args.request_id)
    call_operator(find_cluster(args.name), "Abort", request, STATUS_IN_COMMAND_S)
    print(f"{args.request_id} is aborted")
    return 0
