"""The page of smaller KV caches, docs/quality.md, and the figures behind it, benchmarks/results/quality.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import MachineState, commit, processor
from benchmarks.quality_real import RealRow, figures_of, format_section, read_real
from benchmarks.result_file import FOLDER
from benchmarks.techniques import FULL, FULL_BFLOAT16, LOAD, TECHNIQUES, Decoding, Technique

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
RESULTS = FOLDER / "quality.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/quality.py --write"
PLAN = {150: 50, 300: 100, 900: 30}
"""Lengths of prompts, and how many of each depth."""
MAIN_LEN = 300
"""The length at which agreement is measured, on as many prompts as of one depth, and as many English pages."""

_INTRODUCTION = """\
# Smaller KV caches, measured

What each technique saves, and what it costs the answers of the [demo model](demo-model.md), and
[of a real one](#on-a-real-model). This command makes the first table, and the page:

    {command}

Recall, perplexity and agreement count only what is sampled on the reduced cache: a prompt ends before its question's
last three tokens, an English page after two thirds. What follows is given to the engine as if it had been emitted, and
runs behind the reduction, as it does after a failover. So no rule knows, while it drops tokens, which fact will be
asked. An answer that prefill samples would be right whatever was dropped.

- *bytes a token, tokens/s*: {load}, the techniques in turns; `-` for a row that was added without that;
- *recall*: the share of held-out prompts answered right, {prompts};
- *perplexity*: of the last third of {pages} pages of 384 tokens: English, whose sentences tell nothing about one
  another, so that it shows text that breaks; and facts with questions and answers, which shows facts that are lost;
- *agreement*: the share of {pages} prompts of {length} tokens, and as many English pages, whose next 32 tokens are all
  the same as with the full cache in float32, or in bfloat16 where the row says so. Over float32 a technique shows by
  itself; over bfloat16 the same codes of int8 move many more answers;
- *after a failover*: what a stream goes on with, on a CPU, when its worker is lost;
- rows of the *latest* tokens and of tokens *at random* are controls: budgets of the same size, filled without a look at
  attention. The window is the demo model's weights as a Mistral, which was not trained so.

The demo model, in float32 where a row names no dtype: 4 layers, 2 KV heads of 32; blocks of 16 tokens. Machine:
{machine}."""


@dataclass(frozen=True)
class Row:
    """The figures of a technique. perplexity: by kind of page. greedy_agreement: with the technique that it is over."""

    recall: dict[int, float]
    recall_by_depth: dict[int, dict[str, float]]
    perplexity: dict[str, float]
    greedy_agreement: float
    load: Decoding

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Row":
        """Reads a row of RESULTS."""
        recall, by_depth = ({int(length): one for length, one in row[key].items()} for key in _BY_LENGTH)
        return cls(recall, by_depth, row["perplexity"], row["greedy_agreement"], Decoding(**row["load"]))


_BY_LENGTH = ("recall", "recall_by_depth")


def write_page(rows: Mapping[str, Row]) -> None:
    """Writes the figures of all techniques, the page, and prints it."""
    machine = MachineState.measure()
    _write(f"{processor()}, {machine.describe()}, {datetime.now(UTC):%Y-%m-%d}, commit {commit()}", rows)


def add_rows(rows: Mapping[str, Row]) -> None:
    """Writes the page anew with these rows among the kept ones, whose machine stays named."""
    kept = json.loads(RESULTS.read_text())
    _write(kept["machine"], {**{name: Row.read(row) for name, row in kept["rows"].items()}, **rows})


def renew_page() -> None:
    """Writes the page anew of all that is kept, and prints it."""
    text = page_of_kept()
    PAGE.write_text(text)
    print(text)


def page_of_kept() -> str:
    kept = json.loads(RESULTS.read_text())
    return format_page(kept["machine"], {name: Row.read(row) for name, row in kept["rows"].items()}, *read_real())


def _write(machine: str, rows: Mapping[str, Row]) -> None:
    ordered = {one.name: asdict(rows[one.name]) for one in TECHNIQUES}
    RESULTS.write_text(json.dumps({"command": COMMAND, "machine": machine, "rows": ordered}, indent=1) + "\n")
    renew_page()


def format_page(machine: str, rows: Mapping[str, Row], real_machine: str, real_rows: Mapping[str, RealRow]) -> str:
    """Formats the introduction, a table for each model, and the case that each technique is for."""
    prompts = ", ".join(f"{3 * num} prompts of {length} tokens" for length, num in PLAN.items())
    introduction = _INTRODUCTION.format(
        command=COMMAND,
        machine=machine,
        load=LOAD,
        prompts=prompts,
        pages=PLAN[MAIN_LEN],
        length=MAIN_LEN,
    )
    head = ["technique", "bytes a token", "tokens/s", *(f"recall at {length}" for length in PLAN)]
    head += ["perplexity: English", "facts", "agreement", "after a failover"]
    lines = [_line(head), "|---|" + "---:|" * (len(head) - 2) + "---|"]
    lines += [_line(_cells(one, rows[one.name])) for one in TECHNIQUES]
    figures = {name: figures_of(row, real_rows[FULL_BFLOAT16]) for name, row in real_rows.items()}
    cases = [f"- **{one.name}**: {one.when.format(**figures.get(one.name, {}))}." for one in TECHNIQUES if one.when]
    real = format_section(real_machine, real_rows)
    return "\n\n".join([introduction, "\n".join(lines), real, "## When to use which", "\n".join(cases)]) + "\n"


def _cells(technique: Technique, row: Row) -> list[str]:
    recall = [f"{row.recall[length]:.1%}" for length in PLAN]
    speed = "-" if row.load.tokens_per_s is None else f"{row.load.tokens_per_s:,.0f}"
    figures = [f"{row.load.bytes_per_token:,.0f}", speed, *recall]
    figures += [f"{one:.3f}" for one in row.perplexity.values()]
    over = "" if technique.over == FULL else f" of {technique.over}"
    return [technique.name, *figures, f"{row.greedy_agreement:.1%}{over}", technique.promise]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
