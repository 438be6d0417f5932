"""Sizes of the product: statements of Python by package, docstrings left out, and lines of C++.

python tests/docs/sizes.py prints them beside the bounds of tests/docs/sizes.toml, which tests/docs/test_sizes.py holds.
A capability raises its rows in its own commit, which says by how much and for what; nothing else raises one.
"""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = Path(__file__).with_name("sizes.toml")
CPP = "C++ lines"


def product_packages(root: Path = ROOT) -> list[str]:
    """Lists the top-level packages that the wheel of a checkout installs."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    return sorted({name.partition(".")[0] for name in settings["tool"]["setuptools"]["packages"]})


def sizes() -> dict[str, int]:
    """Counts the statements of each package, generated stubs left out, and the lines of C++."""
    counts: Counter[str] = Counter(dict.fromkeys([*product_packages(), CPP], 0))
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        path, package = ROOT / name, name.partition("/")[0]
        if package not in counts or name.startswith("wire/pb/") or not path.exists():
            continue
        if path.suffix == ".py":
            counts[package] += num_statements(path.read_text())
        elif path.suffix in (".cpp", ".h"):
            counts[CPP] += path.read_text().count("\n")
    return dict(counts)


def num_statements(source: str) -> int:
    """Counts statements at any depth, docstrings left out."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_docstring(node) for node in nodes)


def bounds() -> dict[str, int]:
    table: dict[str, int] = tomllib.loads(BOUNDS.read_text())
    return table


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> int:
    found, allowed = sizes(), bounds()
    for name in sorted({*found, *allowed}):
        sys.stdout.write(f"{name:<16}{found.get(name, 0):>8}{allowed.get(name, 0):>8}\n")
    total = sum(count for name, count in found.items() if name != CPP)
    sys.stdout.write(f"{'Python':<16}{total:>8}{sum(allowed.values()) - allowed[CPP]:>8}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
