"""Figures of the code that can be counted, for the table of docs/decisions/.

python -m tests.docs.figures                    # of this tree
python -m tests.docs.figures --tree FOLDER      # of another checkout: all but the way of a request
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.docs import import_chains, sizes
from tests.docs.request_path import Way

ROOT = Path(__file__).resolve().parents[2]
MANY_ATTRIBUTES = 15
MANY_METHODS = 12
LAYERED = ("router", "engine", "kv_store")
LAYERED_NAMES = " / ".join(LAYERED)
MESSAGE = re.compile(r"^\s*message (\w+)", re.MULTILINE)


class Tree:
    """The classes of a checkout's product, generated stubs left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=root, text=True).split()
        self.tests = [root / name for name in listed if name.startswith("tests/")]
        packages = tuple(f"{package}/" for package in product_packages(root))
        self.product = [root / name for name in listed if name.startswith(packages) and not name.startswith("wire/pb/")]
        self.classes = [node for path in self.product for node in _classes(path)]

    def class_named(self, name: str) -> ast.ClassDef:
        [found] = [node for node in self.classes if node.name == name]
        return found


def product_packages(root: Path) -> list[str]:
    """Lists the packages that the wheel of a checkout installs, without the demo model."""
    return [package for package in sizes.product_packages(root) if package != "demo_model"]


def _joined(numbers: Iterable[int]) -> str:
    return " / ".join(map(str, numbers))


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def attributes(node: ast.ClassDef) -> set[str]:
    """Returns the fields of a class and what its methods assign to `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    own = {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
    }
    return fields | own


def methods(node: ast.ClassDef) -> list[str]:
    """Returns the names of a class's public methods, properties too."""
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({one.name for one in functions if not one.name.startswith("_")})


def num_lines(node: ast.ClassDef, function: str) -> int:
    """Counts the lines of a method, decorators and docstring too."""
    [found] = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == function]
    assert found.end_lineno is not None
    return found.end_lineno - found.lineno + 1


def named_twice(tree: Tree) -> list[str]:
    """Returns the names that two classes of the product have, or a class and a message."""
    counts = Counter(node.name for node in tree.classes)
    messages = {name for path in tree.root.glob("proto/**/*.proto") for name in MESSAGE.findall(path.read_text())}
    return sorted(name for name, count in counts.items() if count > 1 or name in messages)


def rows(tree: Tree) -> Iterator[tuple[str, object]]:
    """Yields what is counted, and how many."""
    statements = dict.fromkeys(product_packages(tree.root), 0)
    for path in tree.product:
        statements[path.relative_to(tree.root).parts[0]] += sizes.num_statements(path.read_text())
    yield from ((f"statements of {package}", count) for package, count in statements.items())
    yield "statements of the product", sum(statements.values())
    yield "lines of the product", sum(path.read_text().count("\n") for path in tree.product)
    yield "lines of tests", sum(path.read_text().count("\n") for path in tree.tests)
    sequence, layout = (tree.class_named(name) for name in ("Sequence", "KVLayout"))
    [reads] = [node for node in tree.classes if node.name in ("KVCache", "PrefixReads") and "admit" in methods(node)]
    yield "attributes of Sequence", len(attributes(sequence))
    yield f"lines of {reads.name}.admit", num_lines(reads, "admit")
    yield "public methods of KVLayout", len(methods(layout))
    large = {node.name: len(attributes(node)) for node in tree.classes if len(attributes(node)) >= MANY_ATTRIBUTES}
    yield f"classes with {MANY_ATTRIBUTES} attributes or more", _with_names(large)
    wide = {node.name: len(methods(node)) for node in tree.classes if len(methods(node)) > MANY_METHODS}
    yield f"classes with over {MANY_METHODS} public methods", _with_names(wide)
    graphs = {package: import_chains.graph_of(tree.root, package) for package in LAYERED}
    yield (
        f"longest import chains inside {LAYERED_NAMES}",
        _joined(len(import_chains.longest_chain(one)) for one in graphs.values()),
    )
    yield (
        f"imports that run back up inside {LAYERED_NAMES}",
        _joined(len(import_chains.arrows_back_up(one)) for one in graphs.values()),
    )
    twice = named_twice(tree)
    yield "class names of two things", f"{len(twice)}: {' '.join(twice)}"
    if tree.root == ROOT:
        way = _way()
        yield "files of a request", len(way.files)
        yield "returns to a file left before", way.num_returns


def _with_names(numbers: dict[str, int]) -> str:
    ordered = sorted(numbers.items(), key=lambda item: -item[1])
    return f"{len(numbers)}: {', '.join(f'{name} {number}' for name, number in ordered)}"


def _way() -> Way:
    """Traces in a process of its own, whose output of libraries is left out."""
    command = [sys.executable, "-m", "tests.docs.request_path", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Way(**json.loads(done.stdout)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    for what, count in rows(Tree(parser.parse_args().tree.resolve())):
        sys.stdout.write(f"{what:<42}{count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
