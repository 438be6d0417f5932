from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import bfloat16_as_on_a_gpu

collect_ignore = ["test_library.py"] if torch.cuda.is_available() else []
"""Of kernels of a CPU: a machine with a GPU may have no compiler."""


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
