"""Figures of a run on a GPU: printed as they come, kept in a file, compared with the last run.

Steps are processes of their own. Each appends its figures to the file that GPU_FIGURES names, a line of JSON each, so
that a step that is stopped, hangs or crashes keeps what it found.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "GPU_FIGURES"
LAST = Path(__file__).parent / "results/gpu.json"
"""The last run whose figures are kept."""
HEADINGS = f"{'what':<30}{'of':<26}{'value':>11} {'unit':<6}{'over last':>10}{'of ceiling':>11} {'ceiling':<13}against"


@dataclass(frozen=True)
class Figure:
    """A value, with the share of its ceiling that was reached, and how many times faster than its peer it is."""

    name: str
    shape: str
    value: float
    unit: str
    ceiling: str = ""
    of_ceiling: float = 0.0
    peer: str = ""
    over_peer: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.shape, self.unit

    def describe(self, last: float | None = None) -> str:
        """Formats a line under HEADINGS. last: the same figure of the last run."""
        over_last = f"{self.value / last:.2f}" if last else ""
        of_ceiling = f"{self.of_ceiling:.2f}" if self.ceiling else ""
        against = f"{self.peer}: {self.over_peer:.2f}" if self.peer else ""
        value = f"{self.value:>11.4g} {self.unit:<6}{over_last:>10}{of_ceiling:>11} {self.ceiling:<13}"
        return f"{self.name:<30}{self.shape:<26}{value}{against}".rstrip()


def record(figure: Figure) -> None:
    """Prints a figure, and appends it to the run's file, if there is a run."""
    print(figure.describe(), flush=True)
    if file := os.environ.get(FILE):
        with open(file, "a") as lines:
            lines.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """Reads what steps have appended; a line that a killed step has not ended is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Figure(**json.loads(line)) for line in lines if line.endswith("}\n")]


def read_last(path: Path = LAST) -> dict[str, Any]:
    """Reads the last run: its head, and its figures by their keys; both empty where there was none."""
    if not path.exists():
        return {"head": {}, "values": {}}
    run = json.loads(path.read_text())
    figures = [Figure(**one) for one in run.pop("figures")]
    run.pop("steps", None)
    return {"head": run, "values": {one.key: one.value for one in figures}}


def write_run(path: Path, head: dict[str, str], steps: dict[str, str], figures: Sequence[Figure]) -> None:
    """Writes a run. steps: how each ended, by its name."""
    run = head | {"steps": steps, "figures": [asdict(one) for one in figures]}
    path.write_text(json.dumps(run, indent=1) + "\n")
