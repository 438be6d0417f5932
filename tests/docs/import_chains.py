"""The imports inside a package: its longest chain, and the arrows between its rooms that run back up.

A room is a folder of the package, or a file beside the folders. An arrow runs back up where its end reaches its start.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

Graph = Mapping[str, frozenset[str]]
"""The modules of a package that each of its modules imports."""


def graph_of(root: Path, package: str) -> Graph:
    """Reads the imports of a package of a checkout, imports inside functions too."""
    files = [path for path in (root / package).rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    return {name: frozenset(_imported(path)) & modules.keys() - {name} for name, path in modules.items()}


def longest_chain(graph: Graph) -> tuple[str, ...]:
    """Returns the longest chain of modules of which each imports the next."""

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, sorted(graph[name])), key=len, default=()))

    return max(map(chain, sorted(graph)), key=len)


def arrows_back_up(graph: Graph) -> list[str]:
    """Lists the imports between rooms that reach one another, fewer modules first: each pair's smaller direction."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, imported in graph.items():
        for other in imported:
            if _room(name) != _room(other):
                arrows[_room(name), _room(other)].append(f"{name} -> {other}")
    back = []
    for (start, end), imports in sorted(arrows.items()):
        if start in _reached(end, arrows) and len(imports) <= len(arrows.get((end, start), imports)):
            back += imports
    return sorted(back)


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _reached(room: str, arrows: Mapping[tuple[str, str], object]) -> set[str]:
    reached, new = set[str](), [room]
    while new:
        new = [end for start, end in arrows if start in new and end not in reached]
        reached |= {*new}
    return reached
