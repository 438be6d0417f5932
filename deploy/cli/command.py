"""The part that the parsers of all commands share."""

import argparse
from collections.abc import Callable
from typing import Any

DEFAULT_NAME = "default"
Subparsers = Any
"""argparse keeps the type of what `add_subparsers` returns to itself."""


def add_command(
    commands: Subparsers, name: str, summary: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Adds a parser for one command, with `--name` and the function to run."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster, if there are several (default: default)")
    parser.set_defaults(run=run)
    return parser
