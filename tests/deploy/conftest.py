from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees clusters that run on this machine, nor leaves a state of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
