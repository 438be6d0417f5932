"""The image that `bash tests/image.sh` has built."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.container import Image, mounted_image


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of base, wheels and images."""
    return Path(os.environ["BATON_IMAGE_FOLDER"])


@pytest.fixture(scope="session")
def image(folder: Path) -> Iterator[Image]:
    with mounted_image(folder) as image:
        yield image


@pytest.fixture(scope="session")
def figures(folder: Path) -> Iterator[dict[str, float]]:
    """Figures that tests measure, by name; they are written to figures.json."""
    measured: dict[str, float] = {}
    yield measured
    (folder / "figures.json").write_text(json.dumps(measured, indent=1) + "\n")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """An empty volume; the folders above it let others pass."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    made = tmp_path / "volume"
    made.mkdir()
    return made
