"""The packages and what they import, as a picture: each imports only those below it.

python -m tests.docs.package_picture            # prints it
python -m tests.docs.package_picture --write    # puts it into docs/architecture.md, which a test holds
"""

import sys
from graphlib import TopologicalSorter

from tests.docs import generated
from tests.docs.structure import imported, product_files, top_of

COMMAND = "python -m tests.docs.package_picture --write"


def imports() -> dict[str, set[str]]:
    """Maps each package to those that it imports anywhere, in functions too."""
    packages: dict[str, set[str]] = {}
    for path in product_files():
        packages.setdefault(top_of(path), set())
    for path in product_files():
        packages[top_of(path)] |= {name.partition(".")[0] for name in imported(path)} & set(packages) - {top_of(path)}
    return packages


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Maps each package to its floor: 0 without imports, else one above the highest that it imports.

    Raises graphlib.CycleError where packages import one another.
    """
    numbers: dict[str, int] = {}
    for package in TopologicalSorter(graph).static_order():
        numbers[package] = max((numbers[one] + 1 for one in graph[package]), default=0)
    return numbers


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leaves out imports that another import already stands above."""
    reached: dict[str, set[str]] = {}
    for package in TopologicalSorter(graph).static_order():
        reached[package] = graph[package].union(*(reached[one] for one in graph[package]))
    return {
        package: {one for one in below if not any(one in reached[other] for other in below)}
        for package, below in graph.items()
    }


def picture() -> str:
    graph = imports()
    floor_of, arrows = floors(graph), direct(graph)
    lines = ["```"]
    for floor in sorted(set(floor_of.values()), reverse=True):
        for package in sorted(one for one in graph if floor_of[one] == floor):
            below = f" ──▶ {', '.join(sorted(arrows[package]))}" if arrows[package] else ""
            lines.append(f"{floor}  {package}{below}")
    return "\n".join([*lines, "```"])


def main() -> int:
    if sys.argv[1:] == ["--write"]:
        generated.write(generated.ARCHITECTURE, COMMAND, picture())
    sys.stdout.write(f"{picture()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
