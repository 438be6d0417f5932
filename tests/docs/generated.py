"""Parts of pages that commands make from the code."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE, REQUEST_PATH, TIMELINE = (
    ROOT / "docs" / name for name in ("architecture.md", "request-path.md", "timeline.md")
)


def read(page: Path, command: str) -> str:
    """Returns the part of a page that a command makes."""
    begin, end = _bounds(command)
    text = page.read_text()
    return text[text.index(begin) + len(begin) : text.index(end)].strip("\n")


def write(page: Path, command: str, part: str) -> None:
    """Puts a part in place of the one before."""
    begin, end = _bounds(command)
    text = page.read_text()
    page.write_text(f"{text[: text.index(begin)]}{begin}\n\n{part}\n\n{text[text.index(end) :]}")


def _bounds(command: str) -> tuple[str, str]:
    return f"<!-- made by: {command} -->", f"<!-- end of: {command} -->"
