"""tests/changed.py chooses a test by the files that it can run or read."""

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import changed
from tests.docs.structure import product_files
from tests.groups import is_alone

ROOT = Path(__file__).resolve().parents[2]
NUM_DRAWN = 10


@pytest.fixture(scope="module")
def sources() -> changed.Sources:
    return changed.checkout()


def _mirrored(sources: changed.Sources) -> dict[str, str]:
    """Returns product files with the test file that is named alike, those that start clusters left out."""
    tests = {test for test in sources.tests if not is_alone(test)}
    pairs = {}
    for path in product_files():
        name = path.relative_to(ROOT)
        test = str(Path("tests", *name.parts[:-1], f"test_{name.stem}.py"))
        if test in tests:
            pairs[str(name)] = test
    return pairs


def _plant(path: Path) -> None:
    """Makes all functions of a file fail."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body.insert(0, ast.parse("raise AssertionError('planted')").body[0])
    path.write_text(ast.unparse(tree))


def _copy(folder: Path) -> None:
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def _failing(tests: Iterable[str], folder: Path) -> set[str]:
    """Runs test files in one process, each to its first failure; returns those with one."""
    options = ["-p", "no:cacheprovider", "-p", "tests.docs.first_failures", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    told = (line.split() for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return {words[1].partition("::")[0] for words in told}


@pytest.mark.timeout(300)
def test_tests_that_a_fault_fails_are_chosen(sources: changed.Sources, tmp_path: Path) -> None:
    pairs = _mirrored(sources)
    drawn = random.Random(2026).sample(sorted(pairs), NUM_DRAWN)
    _copy(tmp_path)
    for name in drawn:
        _plant(tmp_path / name)
    assert _failing((pairs[name] for name in drawn), tmp_path) == {pairs[name] for name in drawn}
    assert [name for name in drawn if name not in sources.of(pairs[name])] == []


def test_a_program_is_a_source_of_the_test_that_starts_it_by_its_name(sources: changed.Sources) -> None:
    assert "text/template/template_child.py" in sources.of("tests/text/test_chat.py")
    assert "cli/operate/drain.py" in sources.of("tests/cli/test_cli.py")
    assert "examples/prefix_store.py" in sources.of("tests/examples/test_examples.py")


def test_a_page_is_a_source_for_tests_of_the_tree_and_a_data_file_for_tests_that_reach_its_reader(
    sources: changed.Sources,
) -> None:
    def readers(name: str) -> set[str]:
        return {test for test in sources.tests if name in sources.of(test)}

    whole_tree = {test for test in sources.tests if test.startswith("tests/docs/")}
    assert whole_tree <= readers("docs/kv_store.md")
    assert len(readers("docs/kv_store.md")) < len(sources.tests) / 10
    assert readers("kernels/cpu/pieces.h") == readers("kernels/cpu/library.py") | readers("docs/kv_store.md")
    assert readers("gateway/ui/page.js") >= readers("gateway/observe/watch.py")
    assert readers("kernels/tiles.toml") >= readers("kernels/tiles.py")
    assert readers("pyproject.toml") == set(sources.tests)


def test_a_file_that_failed_is_run_again_and_one_that_passed_is_not() -> None:
    now = {"tests/a/test_a.py": "1", "tests/a/test_b.py": "2", "tests/a/test_c.py": "3"}
    asked = changed.to_run(now, {"tests/a/test_c.py": "3"})
    assert sorted(asked) == ["tests/a/test_a.py", "tests/a/test_b.py"]
    known = changed.passed(asked, ["tests/a/test_b.py::test_one[x]"], {"tests/a/test_c.py": "3"})
    assert list(changed.to_run(now, known)) == ["tests/a/test_b.py"]
    assert list(changed.to_run({**now, "tests/a/test_a.py": "4"}, known)) == ["tests/a/test_a.py", "tests/a/test_b.py"]


def _digest(contents: dict[str, str], environment: str = "") -> str:
    blobs = {name: content.upper() for name, content in contents.items()}
    return changed.Sources(blobs, lambda name: contents[name].encode()).digest("tests/test_a.py", environment)


TREE = {
    "tests/test_a.py": "import a.b\n",
    "tests/conftest.py": "FIRST = 'tests/test_b.py'\n",
    "tests/test_b.py": "",
    "a/__init__.py": "",
    "a/b.py": "def run():\n    'Runs.'\n    return 'a.c:C'\n",
    "a/c.py": "",
    "a/d.py": "",
    "docs/a.md": "",
    "a.toml": "",
}


@pytest.mark.parametrize("name", ["tests/test_a.py", "tests/conftest.py", "a/__init__.py", "a/b.py", "a/c.py"])
def test_a_digest_follows_each_source(name: str) -> None:
    assert _digest(TREE | {name: TREE[name] + "x = 1\n"}) != _digest(TREE)


def test_a_digest_follows_files_that_no_source_names_and_the_environment() -> None:
    assert _digest(TREE | {"a.toml": "x = 1"}) != _digest(TREE)
    assert _digest(TREE, "torch==3") != _digest(TREE)


def test_a_digest_does_not_follow_other_modules_pages_comments_and_docstrings() -> None:
    assert _digest(TREE | {"a/d.py": "x = 1", "tests/test_b.py": "x = 1", "docs/a.md": "# A"}) == _digest(TREE)
    assert _digest(TREE | {"a/b.py": TREE["a/b.py"].replace("Runs.", "Runs it.") + "# twice\n"}) == _digest(TREE)
