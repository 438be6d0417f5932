"""A plugin of pytest: after its first failure, the other tests of a file are skipped."""

from pathlib import Path

import pytest

_failed: set[Path] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path in _failed:
        pytest.skip("another test of the file has failed")


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    _failed.add(node.path)
