"""Text in columns."""

from collections.abc import Sequence

NOT_KNOWN = "-"


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
