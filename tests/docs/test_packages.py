"""The list of packages in pyproject.toml, against the folders."""

import tomllib
from pathlib import Path

from tests.docs import words

ROOT = Path(__file__).resolve().parents[2]
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
TOPS = {name.split(".")[0] for name in LISTED}


def test_the_wheel_has_every_package() -> None:
    found = [init.parent.relative_to(ROOT) for top in TOPS for init in (ROOT / top).rglob("__init__.py")]
    assert sorted(LISTED) == sorted(".".join(folder.parts) for folder in found)


def test_the_wheel_has_neither_benchmarks_nor_tests() -> None:
    assert TOPS.isdisjoint({"benchmarks", "examples", "tests"})


def test_every_package_has_its_words_checked() -> None:
    assert set(words.PACKAGES) >= TOPS
