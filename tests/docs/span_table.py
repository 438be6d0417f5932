"""The table of spans in docs/timeline.md, and the strings of the product that name a kind of span.

python -m tests.docs.span_table            # prints the table and these strings
python -m tests.docs.span_table --write    # puts the table into docs/timeline.md, which a test holds
"""

import ast
import re
import sys
from collections.abc import Iterator

from tests.docs import generated, structure
from wire.journal import GATES, WORKERS, Kind, SpanPhase

COMMAND = "python -m tests.docs.span_table --write"
TABLE = structure.ROOT / "wire" / "journal.py"
PAGE = structure.ROOT / "gateway" / "ui" / "page.js"
_STEPS = "|".join(kind.step for kind in Kind if kind.names != (kind.step,))
_OF_A_PLACE = "|".join(sorted({re.escape(place) for kind in Kind for place in kind.places if place}))
_WAITS = "|".join(kind.step for kind in Kind if kind.step.startswith("wait_"))
NAMING = re.compile(rf"^(?:({_OF_A_PLACE})\.({_STEPS})|\.({_STEPS})|({_WAITS}))$|wait_\\?\w+.*queue")
"""A whole name, the step of one behind a place that is filled in, the step of a gate, or a pattern of gates."""


def table() -> str:
    rows = [f"| {_names(kind)} | {_measured_by(kind)} | {_doc(kind)} |" for kind in Kind]
    return "\n".join(["| span | measured by | what happens |", "|---|---|---|", *rows])


def _names(kind: Kind) -> str:
    return ", ".join(f"`{name}`" for name in kind.names)


def _measured_by(kind: Kind) -> str:
    if kind is Kind.CALL or not set(kind.places) <= {*WORKERS}:
        return "router"
    return "worker" if kind.places == WORKERS else f"{kind.places[0]} worker"


def _doc(kind: Kind) -> str:
    return f"gate: {kind.doc}" if kind.phase is SpanPhase.GATE else kind.doc


def named() -> Iterator[str]:
    """Yields the places of the product, beside the table, that name a kind of span."""
    for path in structure.product_files():
        if path != TABLE:
            yield from (f"{path.relative_to(structure.ROOT)}:{one}" for one in named_in(path.read_text()))
    page = PAGE.read_text()
    yield from (f"{PAGE.name}: {one}" for one in re.findall(r"""["'`/]([^"'`/]*)["'`/]""", page) if NAMING.search(one))


def named_in(source: str) -> Iterator[str]:
    """Yields the strings of a file that name a kind of span, with their lines; docstrings aside."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    yield from (
        f"{one.lineno}: {one.value}" for one in texts if isinstance(one.value, str) and NAMING.search(one.value)
    )


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        generated.write(generated.TIMELINE, COMMAND, table())
    sys.stdout.write("\n".join([table(), f"gates {len(GATES)}, named elsewhere:", *named()]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
