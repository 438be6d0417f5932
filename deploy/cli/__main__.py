"""The command line: `baton COMMAND`. Each command has a module; none imports torch or ray at its start."""

import argparse
import os
import sys
from collections.abc import Sequence

from deploy.cli import down, drain, generate, scale, status, up
from deploy.cli.command import Parser
from wire.errors import BatonError

COMMANDS = (up, generate, status, scale, drain, down)
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 done, 1 failed, 2 wrong usage, 78 wrong configuration, 130 interrupted."""
    parsed = make_parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        return code
    except BatonError as error:
        ids = ", ".join(f"{name} {value}" for name, value in error.ids.items() if name != "param")
        print(f"baton: {error.message}{f' ({ids})' if ids else ''}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has gone, and that is all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="baton",
        description="Serve a language model with prefill and decode on separate pools of workers.",
        epilog='Begin with `baton up`, then `baton generate "Once upon a time"`; `baton down` ends it.',
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
