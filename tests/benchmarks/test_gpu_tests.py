"""Tests dealt to processes, of which some crash, hang or leave their device unusable."""

import signal
import threading
import time
from pathlib import Path

import pytest

from benchmarks import gpu_tests
from benchmarks.gpu_tests import Tally, run, stop

LONG_S = 100.0
WELL = "".join(f"def test_{number}() -> None: ...\n" for number in range(7))
BADLY = """
import os, time

def test_fails() -> None:
    assert 1 == 2, "one is not two"

def test_ends_its_process() -> None:
    os._exit(9)

def test_loses_the_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_hangs() -> None:
    time.sleep(60)

def test_after_all_of_these() -> None: ...
"""
DRAWN = """
from hypothesis import given, strategies

@given(strategies.integers())
def test_of_drawn_cases(number: int) -> None:
    raise AssertionError

def test_beside_it() -> None: ...
"""


def outcomes(tally: Tally) -> dict[str, str]:
    return {name.partition("::")[2]: outcome for name, outcome in tally.outcomes.items()}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path / "test_some.py"


def test_every_test_has_one_outcome_whatever_became_of_its_process(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written.write_text(BADLY)
    monkeypatch.setattr(gpu_tests, "TEST_LIMIT_S", 5.0)
    tally = run([str(written)], 1, LONG_S)
    assert outcomes(tally) == {
        "test_fails": "failed",
        "test_ends_its_process": "crashed",
        "test_loses_the_device": "failed",
        "test_hangs": "hung",
        "test_after_all_of_these": "passed",
    }
    assert not tally.is_good
    told = capsys.readouterr().out
    assert "one is not two" in told
    assert told.index("FAILED") < told.index("CRASHED") < told.index("HUNG")
    assert "1 passed, 4 deselected" in (written.parent / "tests.log").read_text()


def test_lanes_share_the_tests(written: Path) -> None:
    written.write_text(WELL)
    tally = run([str(written)], 3, LONG_S)
    assert outcomes(tally) == {f"test_{number}": "passed" for number in range(7)}
    assert tally.is_good
    assert tally.describe() == "7 passed, of 7 tests"


def test_a_run_that_is_stopped_tells_what_has_not_ended(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = written.parent / "begun"
    written.write_text(f"import time\ndef test_sleeps() -> None:\n    open({str(begun)!r}, 'w'); time.sleep(60)\n")

    def stop_once_begun() -> None:
        while not begun.exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        threading.Thread(target=stop_once_begun).start()
        tally = run([str(written)], 1, LONG_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == "stopped\n"
    assert not tally.is_good
    assert tally.describe() == "1 not ended, of 1 tests"


def test_a_run_without_time_ends(written: Path) -> None:
    written.write_text(WELL)
    assert run([str(written)], 1, 0.0).outcomes == {}


def test_drawn_cases_are_left_out(written: Path) -> None:
    written.write_text(DRAWN)
    assert outcomes(run([str(written)], 1, LONG_S)) == {"test_beside_it": "passed"}


def test_a_file_that_cannot_be_loaded_fails(written: Path) -> None:
    written.write_text("import no_such_module\n")
    tally = run([str(written)], 2, LONG_S)
    assert [*tally.outcomes.values()] == ["failed"]
    assert not tally.is_good
