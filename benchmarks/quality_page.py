"""The page of smaller KV caches, docs/quality.md, and the figures behind it, benchmarks/results/quality.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import MachineState, processor
from benchmarks.result_file import FOLDER
from benchmarks.techniques import LOAD, TECHNIQUES, Decoding, Technique

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
RESULTS = FOLDER / "quality.json"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/quality.py --write"
PLAN = {150: 50, 300: 100, 900: 30}
"""Lengths of prompts, and how many of each depth."""
MAIN_LEN = 300
"""The length at which agreement is measured, on as many prompts as of one depth, and as many English pages."""

_INTRODUCTION = """\
# Smaller KV caches, measured

What each technique saves, and what it costs the answers of the [demo model](demo-model.md). This command makes the
page:

    {command}

Recall, perplexity and agreement count only what is sampled on the reduced cache: a prompt ends before its question's
last three tokens, an English page after two thirds. What follows is given to the engine as if it had been emitted, and
runs behind the reduction, as it does after a failover. So no rule knows, while it drops tokens, which fact will be
asked. An answer that prefill samples would be right whatever was dropped.

- *bytes a token, tokens/s*: {load}, the techniques in turns;
- *recall*: the share of held-out prompts answered right, {prompts};
- *perplexity*: of the last third of {pages} pages of 384 tokens: English, whose sentences tell nothing about one
  another, so that it shows text that breaks; and facts with questions and answers, which shows facts that are lost;
- *agreement*: the share of {pages} prompts of {length} tokens, and as many English pages, whose next 32 tokens are all
  the same as with the full cache;
- *after a failover*: what a stream goes on with, on a CPU, when its worker is lost;
- rows of the *latest* tokens and of tokens *at random* are controls: budgets of the same size, filled without a look at
  attention. The window is the demo model's weights as a Mistral, which was not trained so.

The demo model in float32: 4 layers, 2 KV heads of 32; blocks of 16 tokens. Machine: {machine}."""


@dataclass(frozen=True)
class Row:
    """The figures of a technique. perplexity: by kind of page. greedy_agreement: with the first technique's answers."""

    recall: dict[int, float]
    recall_by_depth: dict[int, dict[str, float]]
    perplexity: dict[str, float]
    greedy_agreement: float
    load: Decoding


def write_page(rows: Mapping[str, Row]) -> None:
    """Writes the figures by technique, the page, and prints it."""
    machine = MachineState.measure()
    where = f"{processor()}, {machine.describe()}, {datetime.now(UTC):%Y-%m-%d}"
    content = {"command": COMMAND, "machine": where, "rows": {name: asdict(row) for name, row in rows.items()}}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    text = format_page(where, rows)
    PAGE.write_text(text)
    print(text)


def format_page(machine: str, rows: Mapping[str, Row]) -> str:
    """Formats the introduction, one table, and the case that each technique is for."""
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
    cases = [f"- **{one.name}**: {one.when}." for one in TECHNIQUES if one.when]
    return "\n\n".join([introduction, "\n".join(lines), "## When to use which", "\n".join(cases)]) + "\n"


def _cells(technique: Technique, row: Row) -> list[str]:
    recall = [f"{row.recall[length]:.1%}" for length in PLAN]
    figures = [f"{row.load.bytes_per_token:,.0f}", f"{row.load.tokens_per_s:,.0f}", *recall]
    figures += [f"{one:.3f}" for one in row.perplexity.values()]
    return [technique.name, *figures, f"{row.greedy_agreement:.1%}", technique.promise]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
