"""The common part of commands: arguments, and text in columns, with colours and lines on a terminal."""

import argparse
import difflib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from deploy.processes.interrupts import Interrupts
from wire.errors import InvalidRequest

DEFAULT_NAME = "default"
MAX_MESSAGE_CHARS = 300
MAX_ECHO_CHARS = 64
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_CONTROLS = re.compile(
    r"[^\t\n -~\u00a0-\U0010ffff]|[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""C0 and C1 except tabs and line ends, DEL, and characters that reorder or hide text."""
Subparsers = Any
"""The type of `add_subparsers`' result, which argparse does not export."""
NOT_KNOWN = "-"
COLORS = ("auto", "always", "never")
_STYLES = {"ok": "green", "wrong": "bold red", "skipped": "dim"}


class Parser(argparse.ArgumentParser):
    """A parser that prints wrong usage in one line, and reads `int`, `float` and `str` by the functions below.

    Accepts no abbreviated flags: a later flag could change their meaning. others: other programs' flags, with ours in
    their place.
    """

    others: Mapping[str, str] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for kind, read in ((int, read_whole), (float, read_number), (str, read_text)):
            self.register("type", kind, read)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a message and raises if that fails; argparse's own method ignores failures."""
        (file or sys.stderr).write(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses unknown flags, with the usage of the command that got them."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._instead_of(unknown[0].partition('=')[0])}")
        return parsed, unknown

    def _instead_of(self, flag: str) -> str:
        """Suggests the flag that may have been meant."""
        near = difflib.get_close_matches(flag, [one for one in self._option_string_actions if len(one) > 2], 1)
        meant = self.others.get(flag) or "".join(near)
        return f" (did you mean {meant}?)" if meant else ""

    def error(self, message: str) -> NoReturn:
        told = "".join(char if char.isprintable() else "?" for char in message)[:MAX_MESSAGE_CHARS]
        self.exit(InvalidRequest.exit_code, f"baton: {told}: see `{self.prog} --help`\n")


def read_whole(text: str, num_bits: int = 32) -> int:
    """Reads a whole number that fits a signed field of `num_bits`. Raises ArgumentTypeError."""
    bound = 1 << num_bits - 1
    if _WHOLE.fullmatch(text) and -bound <= int(text) < bound:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number below {bound}, not {text[:MAX_ECHO_CHARS]!r}")


def read_count(text: str) -> int:
    """Reads a whole number of at least 1. Raises ArgumentTypeError."""
    if (number := read_whole(text)) >= 1:
        return number
    raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")


def read_number(text: str) -> float:
    """Reads a finite number. Raises ArgumentTypeError."""
    if _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    raise argparse.ArgumentTypeError(f"must be a number, not {text[:MAX_ECHO_CHARS]!r}")


def read_above_0(text: str) -> float:
    """Reads a finite number above 0. Raises ArgumentTypeError."""
    if (number := read_number(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"must be above 0, not {number:g}")


def read_limits(text: str, known: Mapping[str, float], example: str) -> dict[str, float]:
    """Reads `name=number`, with commas between, over the limits that are known. Raises ArgumentTypeError."""
    given = dict(known)
    for part in text.split(","):
        name, _, limit = part.partition("=")
        if name not in known:
            raise argparse.ArgumentTypeError(f"must be like {example}")
        given[name] = read_above_0(limit)
    return given


def read_text(text: str) -> str:
    """Returns a text that is valid UTF-8. Raises ArgumentTypeError."""
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


def is_drawn(color: str, stream: TextIO) -> bool:
    """Tells whether a stream gets colours and lines. `auto`: on a terminal, unless NO_COLOR is set."""
    return color == "always" or (color == "auto" and stream.isatty() and not os.environ.get("NO_COLOR"))


def escaped(text: str) -> str:
    """Escapes control characters except line ends and tabs, so that a text cannot control a terminal."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def repeat(look: Callable[[], bool], pause_s: float) -> int:
    """Calls `look` until it returns False or a SIGINT, SIGTERM or SIGHUP comes; returns the exit status 0."""
    with suppress(KeyboardInterrupt), Interrupts() as interrupts, interrupts.awaited():
        while look():
            time.sleep(pause_s)
    return 0


def show(head: Sequence[str], rows: Sequence[Sequence[str]], color: str) -> None:
    """Prints a table after an empty line."""
    if not is_drawn(color, sys.stdout):
        print("\n" + render(head, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_header=any(head), header_style="bold")
    for column, name in enumerate(head):
        numbers = all(_is_number(row[column]) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", style="" if column else "cyan")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console(force_terminal=True).print(table)


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns to their widest cell, numbers to the right. Does not pad the last column."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _is_number(cell: str) -> bool:
    return cell == NOT_KNOWN or cell.removesuffix(" %").replace(".", "", 1).replace("-", "", 1).isdigit()
