"""The lint of words: docstrings, pages and names of tests name the thing (CONTRIBUTING.md says how).

python tests/docs/words.py
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "baton",
    "benchmarks",
    "cli",
    "decode_worker",
    "demo_model",
    "deploy",
    "engine",
    "examples",
    "gateway",
    "httpd",
    "kernels",
    "kv_store",
    "prefill_worker",
    "router",
    "text",
    "wire",
    "worker",
)
MAX_CLAUSE_WORDS = 25
_NO_NOUN = re.compile(r"\b(who|whom|whoever|whomever|those|(?:no|any|some|every)(?:body|one)|no one)\b", re.IGNORECASE)
_NO_SUBJECT = re.compile(r"(what|whatever|who|whoever|whose|one|those|that which|nobody)\b", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_FIELD_WITHOUT_NOUN = re.compile(r"\b[a-z_]\w*`?: (of|as of|theirs)\b|\A\s*(Of|As of|Theirs)\b")
_BEFORE_ONE = r"(?:an?|the|each|every|any|all|no|some|this|that|(?:an)?other|such|its|their|only|older|later|new)"
_AFTER_ONE = (
    r"(?:[,;.)]|\s+(?:of|that|which|whose|with|without|in|on|at|from|for|by|to|under|over|beside|between|beyond"
    r"|was|were|had|may|might|can|could|must|will|would|do|and|or|[a-z]+(?<![us])s)\b)"
)
_ONE_AS_SUBJECT = re.compile(
    r"(?:\A|[.;:!?]\s+|\n\s*\n)\s*"
    rf"((?:{_BEFORE_ONE}\s+(?:[\w-]+\s+){{0,2}})?one(?:s\b|(?={_AFTER_ONE})))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n\s*\n")
_CLAUSE_END = re.compile(r"[;:()]")


def check_docstring(text: str) -> Iterator[str]:
    """Yields the faults of a docstring, or of the string below a constant."""
    yield from check_prose(text)
    first = _SENTENCE_END.split(_CODE.sub("code", text).strip(), maxsplit=1)[0]
    if _NO_SUBJECT.match(first):
        yield f"begins with {first.split()[0]!r} in place of a noun or a verb"
    for clause in _CLAUSE_END.split(first):
        if len(clause.split()) > MAX_CLAUSE_WORDS:
            yield f"a first clause of {len(clause.split())} words: {clause.strip()[:40]}..."


def check_sentences(text: str) -> Iterator[str]:
    """Yields the fields of a docstring that are explained without a noun or verb, and "one" as a subject."""
    prose = _CODE.sub("code", text)
    for field in _FIELD_WITHOUT_NOUN.finditer(prose):
        yield f"{field.group().strip()!r} lacks its noun or verb"
    for subject in _ONE_AS_SUBJECT.findall(prose):
        yield f"{' '.join(subject.split())!r} as a subject: name the thing"


def check_page(text: str) -> Iterator[str]:
    yield from check_prose(text)
    for heading in re.findall(r"^#+ (.+)$", _CODE.sub("code", text), re.MULTILINE):
        if _NO_SUBJECT.match(heading):
            yield f"the heading {heading!r} begins with {heading.split()[0]!r}"


def check_test_name(name: str) -> Iterator[str]:
    yield from (f"{problem} in {name}" for problem in check_prose(name.replace("_", " ")))


def check_prose(text: str) -> Iterator[str]:
    for word in _NO_NOUN.findall(_CODE.sub("code", text)):
        yield f"{word!r} where the thing has a name"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands as a statement."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def find_problems() -> Iterator[str]:
    for path in _files():
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        if path.suffix == ".md":
            yield from (f"{name}: {problem}" for problem in check_page(text))
        elif name.startswith("tests/"):
            yield from (
                f"{name}: {one}" for test in re.findall(r"def (test_\w+)", text) for one in check_test_name(test)
            )
        else:
            yield from (
                f"{name}:{line}: {problem}"
                for line, string in docstrings(text)
                for check in (check_docstring, check_sentences)
                for problem in check(string)
            )


def _files() -> Iterator[Path]:
    sources = chain.from_iterable((ROOT / package).rglob("*.py") for package in (*PACKAGES, "tests"))
    pages = chain.from_iterable(
        (ROOT / folder).glob("*.md") for folder in (".", "benchmarks", "docs", "docs/decisions")
    )
    return (path for path in sorted(chain(sources, pages)) if "wire/pb" not in str(path))


if __name__ == "__main__":
    sys.exit("\n".join(find_problems()) or 0)
