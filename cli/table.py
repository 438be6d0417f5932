"""Text in columns, drawn where a terminal is there."""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

NOT_KNOWN = "-"
COLORS = ("auto", "always", "never")
_STYLES = {"ok": "green", "wrong": "bold red", "skipped": "dim"}


def is_drawn(color: str, stream: TextIO) -> bool:
    """Tells whether a stream gets colours and lines. `auto`: on a terminal, unless NO_COLOR is set."""
    return color == "always" or (color == "auto" and stream.isatty() and not os.environ.get("NO_COLOR"))


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
    """Aligns columns to their widest cell, and columns of numbers to the right. Does not pad the last one."""
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
