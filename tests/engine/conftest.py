import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Architecture name to a folder with a checkpoint of it, made once."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda arch: make_checkpoint(arch, root / arch))
