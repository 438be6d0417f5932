"""The files that one request is read in: which, in which order, and how often a reader returns to one left before.

python -m tests.docs.request_path            # prints the steps and counts
python -m tests.docs.request_path --write    # puts the steps into docs/request-path.md, which a test holds
python -m tests.docs.request_path --json     # prints the way of each request, function by function
python -m tests.docs.request_path --returns  # prints how often a reader comes back to each file, and from which

A chat over HTTP, streamed, no block of its prompt cached, goes through a whole cluster in this process: gateway,
router, a prefill and a decode worker, and the directory, all behind their own ports; only templates are rendered in
another process. A function counts once, when it is first called, so that loops and the speed of the machine add
nothing; and only if all requests call it, and clearly more often than an idle cluster does. Functions that an idle
cluster calls too count for files, and not for returns.
"""

import asyncio
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Set
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.docs import generated
from tests.docs.sizes import product_packages

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.docs.request_path --write"
MODEL = ROOT / "demo_model" / "checkpoint"
REST_S = 0.5
IDLE_S = 2.0
SUBJECTS = ("houses", "trees", "birds")
NUM_TOKENS = 24
"""More than a block, so that decode fills one."""
WORDS = "Tell me about the {} and the river, in as many words as it takes to come through two blocks of tokens."
IN, ROUTER, PREFILL, DECODE, ALWAYS = "in", "router", "prefill", "decode, out", "also without a request"
BESIDE = ("router/workers/node_events.py",)
"""Files of tasks beside all requests: whether these run more often with one depends on the machine."""
PACKAGE_TO_STEP = {"router": ROUTER, "worker": PREFILL, "decode_worker": DECODE}
"""A step begins with the first file of a package."""


class Recorder:
    """Calls of functions of the product on any thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._packages = tuple(f"{ROOT}/{package}/" for package in product_packages())
        self._num_calls: dict[CodeType, int] = {}
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def start(self) -> None:
        self._num_calls = {}
        self._is_on = True
        self._began_s = time.monotonic()

    def stop(self) -> "Calls":
        self._is_on = False
        duration_s = time.monotonic() - self._began_s
        return Calls({code: num for code, num in self._num_calls.items() if self.path_of(code)}, duration_s)

    def close(self) -> None:
        """Ends recording; threads of before stay slower."""
        threading.setprofile(None)
        sys.setprofile(None)

    def path_of(self, code: CodeType) -> str:
        """Returns the file of a function of the product, "" for any other."""
        path = code.co_filename
        is_product = path.startswith(self._packages) and "/wire/pb/" not in path and code.co_name != "<module>"
        file = path.removeprefix(f"{ROOT}/") if is_product else ""
        return "" if file in BESIDE else file

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call":
            self._num_calls[frame.f_code] = self._num_calls.get(frame.f_code, 0) + 1


@dataclass(frozen=True)
class Calls:
    """How often each function was called, in the order of first calls."""

    num: dict[CodeType, int]
    duration_s: float

    def more_than(self, idle: "Calls") -> set[CodeType]:
        """Returns functions that were called clearly more often than in as long a time without a request."""
        share = self.duration_s / idle.duration_s
        return {code for code, num in self.num.items() if num > 2 * ceil(idle.num.get(code, 0) * share)}


@dataclass(frozen=True)
class Way:
    """The file of each function that a request calls, in the order of first calls; `always` run without one, too."""

    stays: tuple[str, ...]
    always: tuple[str, ...]

    @property
    def files(self) -> set[str]:
        return {*self.stays, *self.always}

    @property
    def num_returns(self) -> int:
        """Returns to a file left before."""
        return sum(1 for _ in groupby(self.stays)) - len(set(self.stays))

    @property
    def returns(self) -> dict[str, Counter[str]]:
        """Files before each return, by the file returned to, the one most returned to first."""
        runs, left = [file for file, _ in groupby(self.stays)], set[str]()
        returns: dict[str, Counter[str]] = defaultdict(Counter)
        for before, file in pairwise(runs):
            left.add(before)
            if file in left:
                returns[file][before] += 1
        return dict(sorted(returns.items(), key=lambda one: -one[1].total()))

    @property
    def steps(self) -> dict[str, list[str]]:
        """Files by step, each where it is first entered."""
        steps: dict[str, list[str]] = {IN: []}
        for file in dict.fromkeys(self.stays):
            begun = PACKAGE_TO_STEP.get(file.partition("/")[0], IN)
            if begun not in steps:
                steps[begun] = []
            steps[list(steps)[-1]].append(file)
        return {**steps, ALWAYS: sorted(set(self.always) - set(self.stays))}


def trace() -> list[Way]:
    """Sends requests through a cluster; returns the way of each."""
    return asyncio.run(_trace())


async def _trace() -> list[Way]:
    recorder = Recorder()
    try:
        with tempfile.TemporaryDirectory(prefix="way-") as folder:
            return await _trace_in(Path(folder), recorder)
    finally:
        recorder.close()


async def _trace_in(folder: Path, recorder: Recorder) -> list[Way]:
    from tests.harness.wired_cluster import WiredCluster  # here, for no other process has to load an engine
    from worker import store_control

    store_control.PAGE_PAUSE_S = 0.5  # else an idle cluster calls its directory as often as one at work
    cluster = WiredCluster(MODEL, folder)
    try:
        address = await cluster.serve()
        await asyncio.to_thread(ask, address, "hills")
        idle = await _calls(recorder, asyncio.sleep(IDLE_S))
        runs = [await _calls(recorder, asyncio.to_thread(ask, address, word)) for word in SUBJECTS]
    finally:
        await cluster.stop()
    of_all = set.intersection(*(run.more_than(idle) for run in runs))
    return [_way(recorder, run, of_all, idle) for run in runs]


def _way(recorder: Recorder, run: Calls, chosen: Set[CodeType], idle: Calls) -> Way:
    codes = [code for code in run.num if code in chosen]
    return Way(
        tuple(recorder.path_of(code) for code in codes if code not in idle.num),
        tuple(recorder.path_of(code) for code in codes if code in idle.num),
    )


async def _calls(recorder: Recorder, run: Awaitable[object]) -> Calls:
    """Records what is called while something runs, once what went before has come to rest."""
    await asyncio.sleep(REST_S)
    recorder.start()
    await run
    await asyncio.sleep(REST_S / 10)
    return recorder.stop()


def ask(address: str, word: str) -> None:
    """Reads the whole stream of one chat."""
    connection = http.client.HTTPConnection(address, timeout=60)
    messages = [{"role": "user", "content": WORDS.format(word)}]
    body = {"model": "twin", "messages": messages, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    assert text.endswith("data: [DONE]\n\n"), text


def to_table(steps: dict[str, list[str]]) -> str:
    """Writes steps as a table of Markdown, with each folder named once a run of its files."""
    rows = [f"| {step} | {' '.join(_runs(files))} |" for step, files in steps.items()]
    return "\n".join(["| step | files, in the order in which a request first enters them |", "|---|---|", *rows])


def _runs(files: Iterable[str]) -> Iterable[str]:
    for folder, run in groupby(files, lambda file: file.rpartition("/")[0]):
        yield f"`{folder}/` {', '.join(Path(file).stem for file in run)}"


def from_table(table: str) -> dict[str, list[str]]:
    """Reads what `to_table` has written."""
    steps: dict[str, list[str]] = {}
    for row in table.splitlines()[2:]:
        _, step, cell, _ = row.split("|")
        runs = [run.split("`") for run in cell.strip().removeprefix("`").split(" `")]
        steps[step.strip()] = [f"{folder}{name.strip()}.py" for folder, names in runs for name in names.split(",")]
    return steps


def main() -> int:
    ways = trace()
    table = to_table(ways[0].steps)
    if sys.argv[1:] == ["--json"]:
        sys.stdout.write(json.dumps([asdict(way) for way in ways]))
        return 0
    if sys.argv[1:] == ["--returns"]:
        for file, before in ways[0].returns.items():
            told = ", ".join(f"{one} {num}" for one, num in before.most_common())
            sys.stdout.write(f"{before.total():3} {file}: {told}\n")
    if sys.argv[1:] == ["--write"]:
        generated.write(generated.REQUEST_PATH, COMMAND, table)
    sys.stdout.write(f"{table}\n")
    sys.stdout.write(f"files {len(ways[0].files)}, returns {sorted(way.num_returns for way in ways)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
