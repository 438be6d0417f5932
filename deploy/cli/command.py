"""The part that the parsers of all commands share."""

import argparse
import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from wire.errors import InvalidRequest

DEFAULT_NAME = "default"
MAX_MESSAGE_CHARS = 300
MAX_ECHO_CHARS = 64
_WHOLE = re.compile(r"[+-]?\d{1,19}")
Subparsers = Any
"""argparse keeps the type of what `add_subparsers` returns to itself."""


class Parser(argparse.ArgumentParser):
    """A parser that tells wrong usage in one line, and reads `type=int`, `float` and `str` as the functions below."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for kind, read in ((int, read_whole), (float, read_number), (str, read_text)):
            self.register("type", kind, read)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes as the commands do; argparse's own passes over words that cannot be written."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        told = "".join(char if char.isprintable() else "?" for char in message)[:MAX_MESSAGE_CHARS]
        self.exit(InvalidRequest.exit_code, f"baton: {told}: see `{self.prog} --help`\n")


def read_whole(text: str, num_bits: int = 32) -> int:
    """Reads a whole number that a signed field of so many bits holds. Raises ArgumentTypeError."""
    bound = 1 << num_bits - 1
    if _WHOLE.fullmatch(text) and -bound <= int(text) < bound:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number below {bound}, not {text[:MAX_ECHO_CHARS]!r}")


def read_count(text: str) -> int:
    """Reads a whole number from 1. Raises ArgumentTypeError."""
    if (number := read_whole(text)) >= 1:
        return number
    raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")


def read_number(text: str) -> float:
    """Reads a finite number. Raises ArgumentTypeError."""
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"must be a number, not {text[:MAX_ECHO_CHARS]!r}")


def read_text(text: str) -> str:
    """Returns a text that can be sent: arguments that are not UTF-8 have surrogates. Raises ArgumentTypeError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("must be UTF-8") from None
    return text


def add_command(
    commands: Subparsers, name: str, summary: str, description: str, run: Callable[[argparse.Namespace], int]
) -> Parser:
    """Adds a parser for one command, with `--name` and the function to run."""
    parser: Parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster, if there are several (default: default)")
    parser.set_defaults(run=run)
    return parser
