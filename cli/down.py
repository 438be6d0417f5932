"""`baton down`: ends a cluster."""

import argparse
import sys

from cli.terminal import Subparsers, add_command
from deploy.local.shutdown import shut_down
from deploy.local.state import ClusterState, StateFile, command_line
from deploy.processes.interrupts import Interrupts

DESCRIPTION = """\
Stops what `baton up` has started, and nothing else: workers, router, shared memory, Ray and Redis where they are its
own. A cluster that has crashed, or is still starting, is cleaned up as well."""


def add_parser(commands: Subparsers) -> None:
    add_command(commands, "down", "stop a cluster", DESCRIPTION, run)


def run(args: argparse.Namespace) -> int:
    file = StateFile(args.name)
    if (reason := file.set_aside()) is not None:
        left = f"`bash deploy/nothing_left.sh {args.name}` shows what is left of it"
        print(f"baton: {reason}. It is set aside as {args.name}.json.broken; {left}", file=sys.stderr)
        return 1
    state = file.read()
    if state is None:
        print(f"no cluster named {args.name} is running")
        return 0
    return _stop(file, state)


def _stop(file: StateFile, state: ClusterState) -> int:
    try:
        with Interrupts() as interrupts, interrupts.awaited():
            problems = shut_down(file, state)
    except KeyboardInterrupt:
        again = command_line("down", file.name)
        print(f"baton: interrupted, so some of {file.name} may be left: `{again}` goes on", file=sys.stderr)
        raise
    if problems:
        print(*(f"baton: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    print(f"stopped {file.name}: nothing is left of it")
    return 0
