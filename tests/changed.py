"""The test files whose sources have changed since they passed: a test is a function of files that it runs or reads.

python -m tests.changed --changed   # prints these files; --all prints all test files
python -m tests.changed --passed    # notes that the files printed last have passed, but those with a failure

`bash tests/run.sh --changed` does both around a run. The sources of a test file are the files that it imports, at any
depth and anywhere in them, every conftest.py above it, and each module and file that one of these names in a string:
`python -m MODULE`, MODULE:CLASS, a file's name. A file that no source names, and pyproject.toml, are sources of every
test; so are the versions of Python and of the packages installed. Comments, and docstrings of functions and classes,
are no part of a source but for the tests that read the whole tree.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".pytest_cache" / "changed.json"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
READ_WHOLE_TREE = ("tests/docs/", "tests/deploy/test_scripts.py", "tests/cluster/test_wheel.py", "tests/image/")
"""Tests that list files by themselves: with git, as a wheel, as an image."""
READ_BY_THESE = re.compile(r"LICENSE|proto/.*|wire/pb/.*\.pyi|.*\.(md|png|svg)|(docs|benchmarks/results)/.*|\.\w.*")
READERS = {"kernels/cpu/": "kernels/cpu/library.py", "tests/simulated_gpu/native/": "tests/simulated_gpu/device.py"}
"""Folders of files that a module finds by a pattern."""
FOR_ALL = ("pyproject.toml",)
_NAME = re.compile(r"cli|(?!.*\btest_\w+\.py)[\w./-]+\.\w+(:\w+)?")
"""A string that may name a module or a file, but no test's; `cli` is the one package that runs by its own name."""


@dataclass(frozen=True)
class Source:
    """What a Python file imports or names, and a digest of its code."""

    names: frozenset[str]
    digest: str

    @classmethod
    def parse(cls, content: bytes) -> "Source":
        tree = ast.parse(content)
        names = frozenset(_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
                node, False
            ):
                node.body = node.body[1:]
        return cls(names, hashlib.sha256(ast.dump(tree).encode()).hexdigest())


class Sources:
    """The files of a tree, and which of them a test file is a function of.

    blobs: each file's name, with a digest of its content. parsed: Python files by that digest, which trees may share.
    """

    def __init__(
        self, blobs: Mapping[str, str], read: Callable[[str], bytes], parsed: dict[str, Source] | None = None
    ) -> None:
        self._blobs = blobs
        self._read = read
        self._parsed: dict[str, Source] = {} if parsed is None else parsed
        self._edges: dict[str, frozenset[str]] = {}
        self._by_base: dict[str, list[str]] = defaultdict(list)
        for name in blobs:
            self._by_base[PurePosixPath(name).name].append(name)

    @property
    def tests(self) -> list[str]:
        """Test files, as pytest collects them."""
        return sorted(name for name in self._blobs if re.fullmatch(r"tests/(.*/)?test_\w+\.py", name))

    def of(self, test: str) -> frozenset[str]:
        """Returns the sources of a test file."""
        if test.startswith(READ_WHOLE_TREE):
            return frozenset(self._blobs)
        conftests = (f"{folder}/conftest.py" for folder in PurePosixPath(test).parents)
        known, ahead = set(self._for_all), [test, *(name for name in conftests if name in self._blobs)]
        while ahead:
            if (name := ahead.pop()) not in known:
                known.add(name)
                ahead += self._named_by(name)
        return frozenset(known)

    def digest(self, test: str, environment: str) -> str:
        """Digests names and contents of a test file's sources, and the environment."""
        content = self._blobs.__getitem__ if test.startswith(READ_WHOLE_TREE) else self._code
        lines = (f"{name} {content(name)}\n" for name in sorted(self.of(test)))
        return hashlib.sha256(f"{environment}\n{''.join(lines)}".encode()).hexdigest()

    @cached_property
    def _for_all(self) -> frozenset[str]:
        data = {name for name in self._blobs if not name.endswith(".py") and not READ_BY_THESE.fullmatch(name)}
        named = frozenset[str]().union(*(self._named_by(name) for name in self._blobs))
        return frozenset((data - named) | data.intersection(FOR_ALL))

    def _named_by(self, name: str) -> frozenset[str]:
        if name not in self._edges:
            names = self._source(name).names if name.endswith(".py") else frozenset[str]()
            files = {file for one in names for file in (*self._modules(one), *self._by_base[PurePosixPath(one).name])}
            found = {file for folder, reader in READERS.items() if name == reader for file in self._below(folder)}
            self._edges[name] = frozenset(files | found)
        return self._edges[name]

    def _below(self, folder: str) -> list[str]:
        return [name for name in self._blobs if name.startswith(folder) and not name.endswith(".py")]

    def _modules(self, name: str) -> Iterator[str]:
        """Yields the files that importing a module runs, and the one that `python -m` runs."""
        parts = name.partition(":")[0].split(".")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            candidates = (f"{path}.py", f"{path}/__init__.py", *([f"{path}/__main__.py"] if end == len(parts) else ()))
            yield from (file for file in candidates if file in self._blobs)

    def _code(self, name: str) -> str:
        return self._source(name).digest if name.endswith(".py") else self._blobs[name]

    def _source(self, name: str) -> Source:
        blob = self._blobs[name]
        if blob not in self._parsed:
            self._parsed[blob] = Source.parse(self._read(name))
        return self._parsed[blob]


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.value


def checkout() -> Sources:
    """Reads the checkout: tracked files, and untracked ones that git does not ignore."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    contents = {name: (ROOT / name).read_bytes() for name in listed if (ROOT / name).is_file()}
    return Sources({name: hashlib.sha256(one).hexdigest() for name, one in contents.items()}, contents.__getitem__)


def digests() -> dict[str, str]:
    """Returns the digest of each test file of the checkout."""
    installed = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    environment = "\n".join([sys.version, *sorted(installed)])
    sources = checkout()
    return {test: sources.digest(test, environment) for test in sources.tests}


def to_run(now: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Returns the test files, with their digests, that have not passed with it. known: digests that have."""
    return {test: digest for test, digest in now.items() if known.get(test) != digest}


def passed(asked: Mapping[str, str], failed: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests that have passed, now or before. asked: at the start of the run. failed: ids of tests."""
    files = {test.partition("::")[0] for test in failed}
    return {test: digest for test, digest in {**before, **asked}.items() if test not in files}


def ask(asked: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Prints test files, keeps their digests beside those that have passed, and clears pytest's list of failures."""
    LAST_FAILED.unlink(missing_ok=True)
    STATE.write_text(json.dumps({"passed": known, "asked": asked}))
    sys.stdout.writelines(f"{test}\n" for test in asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    for name in ("--all", "--changed", "--passed"):
        which.add_argument(name, dest="which", action="store_const", const=name)
    state = json.loads(STATE.read_text()) if STATE.exists() else {"passed": {}, "asked": {}}
    STATE.parent.mkdir(exist_ok=True)
    match parser.parse_args().which:
        case "--all":
            ask(digests(), state["passed"])
        case "--changed":
            ask(to_run(digests(), state["passed"]), state["passed"])
        case _:
            failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
            STATE.write_text(json.dumps({"passed": passed(state["asked"], failed, state["passed"]), "asked": {}}))


if __name__ == "__main__":
    main()
