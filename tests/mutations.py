"""Plants faults in copies of the tree, and reports those that the tests of their package do not find.

python tests/mutations.py --seed 1 --faults 40             # all, one after another
python tests/mutations.py --seed 1 --only 3,17 --show      # what is planted, without a test
A fault is drawn by seed from every place of the product where a comparison may be swapped, a count be off by one, a
condition be turned round, a check be skipped, an await or a call that releases something be forgotten.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_TO_TESTS = {
    "baton": ("baton", "gateway"),
    "cli": ("cli", "deploy"),
    "decode_worker": ("decode_worker", "local_cluster"),
    "deploy": ("deploy",),
    "engine": ("engine", "exactness"),
    "gateway": ("gateway",),
    "httpd": ("httpd", "gateway"),
    "kernels": ("kernels", "exactness"),
    "kv_store": ("kv_store", "local_cluster", "faults"),
    "prefill_worker": ("prefill_worker", "local_cluster"),
    "router": ("router", "local_cluster", "faults"),
    "text": ("text", "router"),
    "wire": ("wire", "kv_store", "router"),
    "worker": ("worker", "local_cluster", "faults"),
}
"""Folders of tests, nearest first."""
LEFT_OUT = ("wire/pb/", "tests/")
TIMEOUT_S = 600.0
SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
RELEASES = ("cancel", "close", "discard", "end", "free", "leave", "release", "remove", "unpin", "verify", "withdraw")


class Outcome(Enum):
    """What the tests say of a fault. NOT_ENDED: the fault hangs a test, or the machine is too busy; a look tells."""

    FOUND = "found"
    MISSED = "MISSED"
    NOT_ENDED = "not ended"


@dataclass(frozen=True)
class Fault:
    """A piece of a file's source and what stands in its place."""

    kind: str
    path: str
    line: int
    start: int
    end: int
    before: str
    text: str

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {' '.join(self.before.split())[:80]} -> {self.text[:80]}"


class Places(ast.NodeVisitor):
    """Collects the faults that may be planted in the functions of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.faults: list[Fault] = []
        self._path = path
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._source = source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in node.body:
                    self.visit(statement)
        self.faults = sorted(set(self.faults), key=lambda fault: (fault.start, fault.text))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._add("a comparison is swapped", node, f"({left} {SWAPPED[type(node.ops[0])]} {right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.right, ast.Constant) and node.right.value == 1:
            self._add("a count is off by one", node, f"({self._text(node.left)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._add("a condition is turned round", node, f"({word.join(self._text(one) for one in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("a condition is turned round", node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        is_elif = self._source[self._span(node)[0] :].startswith(b"elif")
        if isinstance(node.body[0], ast.Raise) and not node.orelse and not is_elif:
            self._add("a check is skipped", node, "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Await):
            self._add("an await is dropped", node, "pass")
        elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute | ast.Name):
            name = node.value.func.attr if isinstance(node.value.func, ast.Attribute) else node.value.func.id
            if name.strip("_").startswith(RELEASES):
                self._add("a release is forgotten", node, "pass")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Passes over functions within functions: the walk comes to them."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Passes over functions within functions: the walk comes to them."""

    def _add(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._span(node)
        before = self._source[start:end].decode()
        self.faults.append(Fault(kind, self._path, node.lineno, start, end, before, text))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split("\0") if path and (ROOT / path).is_file()]


def draw(seed: int, num_faults: int) -> list[Fault]:
    """Draws a package for each fault, in turn, then a kind, then a place."""
    chance, drawn = random.Random(seed), list[Fault]()
    package_to_faults = {package: faults for package in PACKAGE_TO_TESTS if (faults := list(_faults_in(package)))}
    while len(drawn) < num_faults:
        for package in chance.sample(sorted(package_to_faults), len(package_to_faults)):
            faults = [one for one in package_to_faults[package] if one not in drawn]
            if faults:
                kind = chance.choice(sorted({one.kind for one in faults}))
                drawn.append(chance.choice([one for one in faults if one.kind == kind]))
    return drawn[:num_faults]


def _faults_in(package: str) -> Iterator[Fault]:
    for path in tracked():
        if path.startswith(f"{package}/") and path.endswith(".py") and not path.startswith(LEFT_OUT):
            yield from Places(path, (ROOT / path).read_bytes()).faults


def tests_of(fault: Fault) -> list[list[str]]:
    """Returns the tests of a fault's package in stages: those named like its file, then folder by folder."""
    package, name = fault.path.split("/")[0], Path(fault.path).stem
    folders = [f"tests/{one}" for one in PACKAGE_TO_TESTS[package] if (ROOT / "tests" / one).is_dir()]
    own = sorted(str(path.relative_to(ROOT)) for path in (ROOT / folders[0]).rglob(f"test_*{name}*.py"))
    return [own, *([one] for one in folders)] if own else [[one] for one in folders]


def outcome_of(fault: Fault, tree: Path, stages: Sequence[Sequence[str]]) -> tuple[Outcome, str]:
    """Runs stages of tests over a tree with the fault until one fails; returns the first test that does."""
    path = tree / fault.path
    whole = path.read_bytes()
    path.write_bytes(fault.plant(whole))
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        for tests in stages:
            done = subprocess.run(
                [*command, *tests], cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode != 0:
                lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return Outcome.FOUND, lines[0].split(" - ")[0] if lines else done.stdout[-200:].strip()
    except subprocess.TimeoutExpired as error:
        return Outcome.NOT_ENDED, f"not within {TIMEOUT_S:.0f} s; last: {_last_line(error.stdout)}"
    finally:
        path.write_bytes(whole)
    return Outcome.MISSED, _last_line(done.stdout.encode())


def _last_line(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace").strip().rpartition("\n")[2][-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=40, help="how many are drawn")
    parser.add_argument("--only", default="", help="numbers of those to plant, with commas")
    parser.add_argument("--tests", nargs="*", help="folders in place of those of the package")
    parser.add_argument("--show", action="store_true", help="plant none")
    options = parser.parse_args()
    faults = draw(options.seed, options.faults)
    chosen = [int(number) for number in options.only.split(",") if number] or list(range(1, len(faults) + 1))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for path in [] if options.show else tracked():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, Path(folder) / path)
        for number in chosen:
            fault, began_s = faults[number - 1], time.monotonic()
            if options.show:
                print(f"{number:3} {fault}")
                continue
            stages = [options.tests] if options.tests else tests_of(fault)
            outcome, by = outcome_of(fault, Path(folder), stages)
            print(f"{number:3} {outcome.value} {time.monotonic() - began_s:4.0f} s {fault}\n    {by}", flush=True)
            survivors += [] if outcome is Outcome.FOUND else [number]
    print(f"{len(chosen)} faults, {len(survivors)} not found: {','.join(map(str, survivors))}")
    return min(len(survivors), 1)


if __name__ == "__main__":
    sys.exit(main())
