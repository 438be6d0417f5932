"""A page of figures names the day, the commit, the machine and the command that they are of."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "benchmarks/results").glob("*.md")), ROOT / "docs/claims.md", ROOT / "docs/quality.md"]
NAMED = {
    "day": r"\b20\d\d-\d\d-\d\d\b",
    "commit": r"\bcommits? [0-9a-f]{7,}\b|\| 20\d\d-\d\d-\d\d, [0-9a-f]{7,} \|",
    "machine": r"\b\d+ cores|\btwo (shared )?cores|\bNVIDIA |machine does not matter|the device is a simulation",
    "command": r"`[^`]*\b(python3? |pytest |bash )[^`]*`|^    [A-Z_=0-9 ]*python ",
}
"""What is named, and how."""


def missing(text: str) -> list[str]:
    """Lists what a page does not name."""
    return [what for what, how in NAMED.items() if not re.search(how, text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_figures_says_what_it_is_of(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_what_is_left_out_is_found() -> None:
    whole = "`python benchmarks/load.py`\n\n2026-11-26 10:00 UTC, commit c4fd1e0b and changes; AMD EPYC, 2 cores\n"
    assert missing(whole) == []
    assert missing(whole.replace("commit c4fd1e0b", "")) == ["commit"]
    assert missing(whole.replace("2 cores", "")) == ["machine"]
    assert missing(whole.replace("2026-11-26", "")) == ["day"]
    assert missing(whole.replace("python ", "")) == ["command"]


def test_each_row_of_the_goals_names_day_and_commit_or_a_test_of_each_run() -> None:
    page = (ROOT / "benchmarks/results/goals.md").read_text()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line[:2] == "| "]
    days = {row[3] for row in rows if row[0] != "figure"}
    assert {day for day in days if not re.fullmatch(r"20\d\d-\d\d-\d\d, [0-9a-f]{8}|the same|each run", day)} == set()
