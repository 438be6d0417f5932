"""`baton why`: tells why blocks of a request's prompt were computed, though they might have been cached."""

import argparse

from cli.requests import ID, find_request
from cli.terminal import Subparsers, add_command, escaped
from wire.convert import misses_from_pb
from wire.miss import words_of
from wire.pb import cluster_pb2

DESCRIPTION = """\
Shows why blocks of a prompt were not cached when its request came: runs of blocks with one cause each, of a request
among the router's last ones. Never a prompt or its tokens."""


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "why", "show why a prompt's blocks were not cached", DESCRIPTION, run)
    parser.add_argument("request_id", metavar="REQUEST_ID", type=str, help=ID)


def run(args: argparse.Namespace) -> int:
    print(escaped(render_misses(find_request(args.name, args.request_id))))
    return 0


def render_misses(ended: cluster_pb2.EndedRequest) -> str:
    """Renders the causes of a request's uncached blocks."""
    num_cached = sum(one.tokens for one in ended.cached_tokens)
    runs = [f"  {words_of(one)}" for one in misses_from_pb(ended.misses)]
    head = f"{ended.request_id}: {num_cached} of {ended.prompt_tokens} prompt tokens cached"
    return "\n".join([head, *(runs or ["  no uncached block has a cause: all were found, or it reached no worker"])])
