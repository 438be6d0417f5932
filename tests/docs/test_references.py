"""The pages refer to what is there: files behind links, scripts of commands, the tests that docs/faults.md names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path for folder in (".", "docs", "docs/decisions", "benchmarks") for path in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
SCRIPT = re.compile(r"(?:python3?|bash) ((?:benchmarks|deploy|examples|tests)/[\w/]+\.(?:py|sh))")
TEST_FILE = re.compile(r"(?:tests/[a-z_/]+/)?test_[a-z0-9_]+\.py")
REFERENCE = re.compile(rf"({TEST_FILE.pattern})|::((?:Test\w+::)?test_\w+|Test\w+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "decisions"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_scripts_of_commands_are_there(page: Path) -> None:
    """Decisions name commands of their day."""
    assert [script for script in SCRIPT.findall(page.read_text()) if not (ROOT / script).is_file()] == []


def test_the_tests_of_faults_are_there() -> None:
    missing = [f"{file}::{name}" for file, name in _tests_named(ROOT / "docs/faults.md") if not _defines(file, name)]
    assert missing == []


def _tests_named(page: Path) -> Iterator[tuple[str, str]]:
    """File and test; `::test` alone means one of the file named before it in the same row. A file alone has no test."""
    for row in page.read_text().splitlines():
        file = ""
        for named, test in REFERENCE.findall(row):
            file = named or file
            yield file, test


def _defines(file: str, name: str) -> bool:
    found = [ROOT / file] if "/" in file else list((ROOT / "tests").rglob(file))
    if len(found) != 1 or not found[0].is_file():
        return False
    source = found[0].read_text()
    return all(re.search(rf"(?:def|class) {part}\b", source) for part in name.split("::") if part)
