"""Figures of the code's structure: lines, small files with one importer, crowded folders, tests' reaches into privates.

python tests/docs/structure.py
"""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "baton",
    "cli",
    "decode_worker",
    "deploy",
    "engine",
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
SMALL_LINES = 60
MAX_ENTRIES = 15
SEAMS = (
    "engine.schedule.continuous_batcher",
    "router.workers.grpc_transport",
    "router.workers.local_transport",
    "kv_store.tiers.memory_tier",
    "text.byte_tokenizer",
)
"""Small files that keep a room of their own: a policy, a transport, a twin."""


def product_files() -> list[Path]:
    """Python files of the packages, without generated stubs."""
    names = subprocess.check_output(["git", "ls-files", *(f"{one}/*.py" for one in PACKAGES)], cwd=ROOT, text=True)
    return [ROOT / name for name in names.split() if not name.startswith("wire/pb/")]


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def small_files_with_one_importer() -> list[str]:
    """Modules below SMALL_LINES that one other module of the product imports; seams and `__init__` aside."""
    paths = {module_of(path): path for path in product_files()}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, path in paths.items():
        for name in imported(path):
            if name in paths and name != module:
                importers[name].add(module)
    return [
        module
        for module, path in sorted(paths.items())
        if num_lines(path) < SMALL_LINES and len(importers[module]) == 1 and not _has_a_room(module)
    ]


def _has_a_room(module: str) -> bool:
    return module in SEAMS or module.endswith("__init__")


def top_of(path: Path) -> str:
    """Returns the package of a file."""
    return path.relative_to(ROOT).parts[0]


def imported(path: Path) -> Iterator[str]:
    """Yields the modules and names that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def crowded_folders() -> dict[str, int]:
    """Folders of the product that show more than MAX_ENTRIES entries, `__init__` aside."""
    entries: dict[Path, set[str]] = defaultdict(set)
    for path in product_files():
        for folder in path.relative_to(ROOT).parents:
            entries[folder].add((path.relative_to(ROOT)).relative_to(folder).parts[0])
    del entries[Path()]
    numbers = {str(folder): len(names - {"__init__.py"}) for folder, names in entries.items()}
    return {folder: number for folder, number in numbers.items() if number > MAX_ENTRIES}


def private_reaches() -> Iterator[str]:
    """Places in tests and benchmarks that read a private attribute of an object of the product."""
    names = subprocess.check_output(["git", "ls-files", "tests/*.py", "benchmarks/*.py"], cwd=ROOT, text=True)
    for name in names.split():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
                yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    """Whether an attribute is private; a NamedTuple's public methods begin with an underscore, too."""
    return name.startswith("_") and not name.startswith("__") and name != "_replace"


def _is_own(value: ast.expr) -> bool:
    """Whether a class reads its own attribute, or the standard library's os and sys are asked."""
    is_super = isinstance(value, ast.Call) and ast.unparse(value) == "super()"
    return is_super or (isinstance(value, ast.Name) and value.id in ("self", "cls", "os", "sys"))


def main() -> None:
    by_package: dict[str, int] = defaultdict(int)
    for path in product_files():
        by_package[top_of(path)] += num_lines(path)
    for package, number in by_package.items():
        print(f"{package:15} {number:6}")
    print(f"{'all':15} {sum(by_package.values()):6} lines")
    print("small files with one importer:", *small_files_with_one_importer())
    print("crowded folders:", crowded_folders())
    print("private reaches:", *private_reaches(), sep="\n  ")


if __name__ == "__main__":
    main()
