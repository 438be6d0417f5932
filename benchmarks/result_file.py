"""A benchmark's figures in a file, beside the command and the machine that they came from."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import MachineState

FOLDER = Path(__file__).parent / "results"


def write_result(name: str, figures: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Prints the figures as a table, and writes them with the details to results/NAME.json and the table to .md."""
    machine = MachineState.measure()
    command = f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    rows = [f"| {key} | {_show(value)} |" for key, value in figures.items()]
    table = "\n".join(
        [f"`{command}`", "", f"{date}; {machine.describe()}", "", "| figure | value |", "|---|---|", *rows]
    )
    print(table)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.md").write_text(table + "\n")
    content = {
        "command": command,
        "date": date,
        "machine": asdict(machine),
        "figures": dict(figures),
        "details": dict(details),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
