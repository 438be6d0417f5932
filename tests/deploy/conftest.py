import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import run_dir
from deploy.processes.interrupts import SIGNALS


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees clusters that run on this machine, nor leaves a state of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """The run folder of a cluster named default."""
    folder = run_dir.create("default")
    yield folder
    run_dir.remove(folder)


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """Tests in the background ignore signals, and so would all commands that they run; afterwards all is as it was."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
