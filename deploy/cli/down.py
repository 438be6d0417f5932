"""`baton down`: ends a cluster."""

import argparse
import sys

from deploy.cli.command import Subparsers, add_command
from deploy.local.shutdown import shut_down
from deploy.local.state import StateFile

DESCRIPTION = """\
Stops what `baton up` has started, and nothing else: workers, router, shared memory, Ray and Redis where they are its
own. A cluster that has crashed, or is still starting, is cleaned up as well."""


def add_parser(commands: Subparsers) -> None:
    add_command(commands, "down", "stop a cluster", DESCRIPTION, run)


def run(args: argparse.Namespace) -> int:
    file = StateFile(args.name)
    state = file.read()
    if state is None:
        print(f"no cluster named {args.name} is running")
        return 0
    if problems := shut_down(file, state):
        print(*(f"baton: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    print(f"stopped {args.name}: nothing is left of it")
    return 0
