import re
from pathlib import Path

import pytest

from deploy.deadlines import ladder


def test_a_ladder_whose_outer_wait_is_not_longer_is_refused() -> None:
    assert ladder(1, 2, 2.5) == (1, 2, 2.5)
    for rungs in ((2, 1), (1, 1), (1, 3, 2)):
        with pytest.raises(ValueError, match="loses its answer"):
            ladder(*rungs)


def test_no_rung_is_set_again_elsewhere() -> None:
    """A deadline between processes that has a second place could leave its ladder."""
    ladders = Path("deploy/deadlines.py")
    rungs = set(re.findall(r"\b[A-Z_]+_S\b", ladders.read_text()))
    assert len(rungs) > 10
    for package in ("cli", "deploy", "gateway", "router", "worker"):
        for path in set(Path(package).rglob("*.py")) - {ladders, Path("router/workers/controller_port.py")}:
            assert not rungs & set(re.findall(r"^([A-Z_]+_S)\b.*=", path.read_text(), re.MULTILINE)), path
