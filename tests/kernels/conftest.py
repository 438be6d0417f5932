from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import bfloat16_as_on_a_gpu

collect_ignore = ["test_library.py"] if torch.cuda.is_available() else []
"""Of kernels of a CPU: a machine with a GPU may have no compiler."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of kernels: triples, for instruction set, dtype and KV dtype make a kernel of their own."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.pairs(3, triton=1))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="session")
def bfloat16() -> Iterator[None]:
    with bfloat16_as_on_a_gpu():
        yield
