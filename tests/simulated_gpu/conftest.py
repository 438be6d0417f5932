import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu.library import NoKernels
from tests.simulated_gpu import device


@pytest.fixture(autouse=True, scope="session")
def devices() -> None:
    """Loads the devices. Without a compiler tests are skipped with the reason; tests/run.sh wants them."""
    try:
        device.load()
    except NoKernels as error:
        if os.environ.get("BATON_NO_SKIP"):
            raise
        pytest.skip(f"no simulated GPU: {error}")


@pytest.fixture(autouse=True)
def orderly(devices: None) -> Iterator[None]:
    """Fails a test that leaves a race behind, or a fault."""
    device.reset()
    yield
    found = device.races()
    device.reset()
    assert found == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the first test time to compile the devices."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(400))
