"""What the parsers of all commands have alike."""

import argparse
from collections.abc import Callable
from typing import Any

DEFAULT_NAME = "default"
Subparsers = Any
"""argparse keeps the type of what `add_subparsers` returns to itself."""


def add_command(
    commands: Subparsers, name: str, summary: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A parser for one command, which knows which cluster is meant and what to run."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster, if there are several (default: default)")
    parser.set_defaults(run=run)
    return parser
