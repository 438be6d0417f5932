"""The tests of kernels and engine on a GPU, dealt to processes that run side by side, the most wanted ones first.

    python3 benchmarks/gpu_tests.py --seconds 90

Prints each failure as it comes. A test that hangs is stopped after its limit, and after one that leaves a process's
device unusable, or ends the process, another process goes on with the rest. Tests that draw their cases (hypothesis)
are left out: they compile too much. Where OUT names a folder, all output goes to OUT/tests.log.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest

KERNELS = (
    "packed_products",
    "ordered_products",
    "experts_in_triton",
    "row_operations",
    "int4_pages",
    "kv_write",
    "paged_decode",
    "paged_prefill",
)
TESTS = ["tests/gpu", *(f"tests/kernels/test_{one}.py" for one in KERNELS)]
TESTS = [one for one in TESTS if (ROOT / one).exists()]
"""In the order in which they are wanted."""
# The settings of pyproject.toml name plugins that a bare GPU machine may lack; these tests need none of them.
PYTEST = [
    "-c",
    os.devnull,
    "--rootdir",
    str(ROOT),
    "--import-mode=importlib",
    "-o",
    f"pythonpath={ROOT}",
    "-q",
    "-p",
    "no:benchmark",
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
]
UNUSABLE = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
"""Words of errors after which a process's device refuses all work."""
GAVE_UP = 7
"""The exit status of a process whose device is unusable."""
TEST_LIMIT_S = 45.0
POLL_S = 0.1
MAX_TEXT = 4000
NUM_SLOWEST = 8


class Lane:
    """A plugin of pytest that runs a share of the tests, and notes them in a file as they begin and end."""

    def __init__(self, place: int, num_lanes: int, notes: Path) -> None:
        self._place, self._num_lanes, self._notes = place, num_lanes, notes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keeps this lane's share, without tests that an earlier process of the lane has begun."""
        begun = {one["test"] for one in read_notes(self._notes) if one["what"] == "begun"}
        share = [one for one in items if not is_drawn(one)][self._place :: self._num_lanes]
        kept = [one for one in share if one.nodeid not in begun]
        config.hook.pytest_deselected(items=[one for one in items if one not in kept])
        items[:] = kept
        self._note("dealt", tests=[one.nodeid for one in share])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("begun", test=nodeid, at_s=time.monotonic())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext[-MAX_TEXT:] if report.failed else ""
            self._note("ended", test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)
            if any(words in text for words in UNUSABLE):
                sys.stdout.flush()
                os._exit(GAVE_UP)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = report.longreprtext[-MAX_TEXT:]
            self._note("ended", test=report.nodeid, outcome="failed", seconds=0.0, text=text)

    def _note(self, what: str, **values: object) -> None:
        with self._notes.open("a") as lines:
            lines.write(json.dumps({"what": what, **values}) + "\n")


def is_drawn(item: pytest.Item) -> bool:
    """Tells whether hypothesis draws a test's cases."""
    return bool(getattr(getattr(item, "function", None), "is_hypothesis_test", False))


def wants_hypothesis(path: Path) -> bool:
    return path.is_file() and "from hypothesis import" in path.read_text()


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Reads a lane's notes; a line that a killed process has not ended is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


@dataclass
class Tally:
    """Outcomes of the tests so far, from the notes of all lanes."""

    dealt: set[str] = field(default_factory=set)
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def take(self, note: dict[str, Any]) -> str:
        """Adds a note; returns what is to be printed of it, "" for nothing."""
        if note["what"] == "dealt":
            self.dealt.update(note["tests"])
        if note["what"] != "ended" or self.outcomes.get(note["test"]) == "failed":
            return ""
        self.outcomes[note["test"]], self.seconds[note["test"]] = note["outcome"], note["seconds"]
        failed = note["outcome"] not in ("passed", "skipped")
        return f"{note['outcome'].upper()} {note['test']}\n{note['text']}".rstrip() if failed else ""

    @property
    def missing(self) -> list[str]:
        return sorted(self.dealt - self.outcomes.keys())

    def describe(self) -> str:
        counts = Counter(self.outcomes.values()) | ({"not ended": len(self.missing)} if self.missing else {})
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        return f"{told}, of {len(self.dealt)} tests"

    @property
    def is_good(self) -> bool:
        """Whether something has passed, or all was skipped, and nothing failed or is missing."""
        return not self.missing and {*self.outcomes.values()} <= {"passed", "skipped"}


class Process:
    """The process of a lane, and another one after each that ends before its tests do."""

    def __init__(self, place: int, num_lanes: int, folder: Path, tests: Sequence[str]) -> None:
        self.notes, self.log = folder / f"{place}.notes", folder / f"{place}.log"
        own = ["--lane", str(place), "--of", str(num_lanes), "--notes", str(self.notes)]
        self._command = [sys.executable, str(Path(__file__)), *own, *tests]
        self._num_read = 0
        self._process = self._start()

    def read(self) -> list[dict[str, Any]]:
        """Returns the notes since the last call."""
        notes = read_notes(self.notes)
        new, self._num_read = notes[self._num_read :], len(notes)
        return new

    def go_on(self) -> bool:
        """Returns whether the lane has tests left; starts another process where the last one has given up."""
        self._stop_hung()
        status = self._process.poll()
        if status is None:
            return True
        if status in (0, 1, 5) or not self._has_ended_one():
            return False
        self._process = self._start()
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_begun = len(read_notes(self.notes))
        left_out = () if "--interpret" in sys.argv else ("TRITON_INTERPRET",)
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=env | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop_hung(self) -> None:
        """Kills the process whose test is beyond its limit, and notes the test."""
        notes = read_notes(self.notes)
        if not notes or notes[-1]["what"] != "begun" or self._process.poll() is not None:
            return
        if time.monotonic() - notes[-1]["at_s"] > TEST_LIMIT_S:
            self.kill()
            self._end(notes[-1]["test"], "hung")

    def _has_ended_one(self) -> bool:
        """Notes the test that ended the process, if one did; returns whether the process came to any test."""
        notes = read_notes(self.notes)
        begun = [one["test"] for one in notes[self._num_begun :] if one["what"] == "begun"]
        if begun and begun[-1] not in {one["test"] for one in notes if one["what"] == "ended"}:
            self._end(begun[-1], "crashed")
        return bool(begun)

    def _end(self, test: str, outcome: str) -> None:
        text = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])[-MAX_TEXT:]
        note = {"what": "ended", "test": test, "outcome": outcome, "seconds": 0.0, "text": text}
        with self.notes.open("a") as lines:
            lines.write(json.dumps(note) + "\n")


class Stopped(Exception):
    """SIGTERM has come."""


def run(tests: Sequence[str], num_lanes: int, seconds: float) -> Tally:
    """Runs tests in lanes, and prints what fails; returns what has come of them in time."""
    deadline, tally = time.monotonic() + seconds, Tally()
    with tempfile.TemporaryDirectory() as name:
        lanes = [Process(place, num_lanes, Path(name), tests) for place in range(num_lanes)]
        try:
            under_way = lanes
            while under_way and time.monotonic() < deadline:
                time.sleep(POLL_S)
                under_way = [one for one in lanes if one.go_on()]
                _print_new(lanes, tally)
        except Stopped:
            print("stopped", flush=True)
        finally:
            for one in lanes:
                one.kill()
            _print_new(lanes, tally)
            _keep_logs(lanes)
    return tally


def _print_new(lanes: Sequence[Process], tally: Tally) -> None:
    for lane in lanes:
        for text in filter(None, map(tally.take, lane.read())):
            print(text, flush=True)


def _keep_logs(lanes: Sequence[Process]) -> None:
    if folder := os.environ.get("OUT"):
        logs = [f"##### {place}\n{one.log.read_text(errors='replace')}" for place, one in enumerate(lanes)]
        Path(folder, "tests.log").write_text("\n".join(logs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="for all of them (default: 90)")
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--lanes", type=int, default=max(1, num_cores * 3 // 4), help="processes side by side")
    parser.add_argument("--interpret", action="store_true", help="leave TRITON_INTERPRET as it is")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help="files and folders (default: all that want a GPU)")
    options = parser.parse_args()
    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    tests = options.tests or [one for one in TESTS if has_hypothesis or not wants_hypothesis(ROOT / one)]
    if options.lane is not None:
        return int(pytest.main([*PYTEST, *tests], plugins=[Lane(options.lane, options.of, options.notes)]))
    signal.signal(signal.SIGTERM, stop)
    begun_s = time.monotonic()
    tally = run(tests, options.lanes, options.seconds)
    for test in sorted(tally.seconds, key=lambda one: -tally.seconds[one])[:NUM_SLOWEST]:
        print(f"{tally.seconds[test]:6.1f} s  {test}")
    for test in tally.missing:
        print(f"NOT ENDED {test}")
    print(f"{tally.describe()}, in {time.monotonic() - begun_s:.0f} s", flush=True)
    return 0 if tally.is_good else 1


def stop(*_: object) -> None:
    """Ends a run; what has come of the tests by then is told."""
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
