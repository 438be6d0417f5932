"""A benchmark's figures in a file, beside the command, the commit and the machine that they came from."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import MachineState, commit, processor

FOLDER = Path(__file__).parent / "results"


def write_result(
    name: str, figures: Mapping[str, Any], details: Mapping[str, Any], table: Sequence[Sequence[object]] = ()
) -> None:
    """Prints the figures as a table, and writes them with the details to results/NAME.json and the table to .md.

    table: rows of another one, to stand above it; the first is its head.
    """
    machine = MachineState.measure()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_named, sys.argv[1:])])
    date, made_by = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", commit()
    above = [*_rows(table[:1]), "|---" * len(table[0]) + "|", *_rows(table[1:]), ""] if table else []
    rows = ["| figure | value |", "|---|---|", *_rows(list(figures.items()))]
    text = "\n".join(
        [f"`{command}`", "", f"{date}, commit {made_by}; {processor()}, {machine.describe()}", "", *above, *rows]
    )
    print(text)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.md").write_text(text + "\n")
    content = {
        "command": command,
        "date": date,
        "commit": made_by,
        "machine": asdict(machine),
        "figures": dict(figures),
        "details": dict(details),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _named(argument: str) -> str:
    """Returns the name alone of a file or folder, which lies elsewhere on each machine."""
    return Path(argument).name if "/" in argument and Path(argument).exists() else argument


def _rows(rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(_show, row))} |" for row in rows]


def _show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
