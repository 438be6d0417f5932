"""The picture of packages in docs/architecture.md, against the import graph."""

from graphlib import CycleError

import pytest

from tests.docs import generated
from tests.docs.package_picture import COMMAND, direct, floors, picture


def test_the_page_has_the_picture_of_the_imports() -> None:
    assert generated.read(generated.ARCHITECTURE, COMMAND) == picture(), f"run: {COMMAND}"


def test_a_package_stands_above_all_that_it_imports() -> None:
    graph = {"top": {"middle", "low"}, "middle": {"low"}, "low": set[str](), "beside": {"low"}}
    assert floors(graph) == {"top": 2, "middle": 1, "beside": 1, "low": 0}
    assert direct(graph) == {"top": {"middle"}, "middle": {"low"}, "beside": {"low"}, "low": set()}


def test_packages_that_import_one_another_have_no_picture() -> None:
    with pytest.raises(CycleError):
        floors({"one": {"other"}, "other": {"one"}})
