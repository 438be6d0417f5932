"""Everything that wants a GPU, in one command of some minutes: what must be right, clusters, figures, then tiles.

    python3 benchmarks/gpu.py --minutes 8
    python3 benchmarks/gpu.py --minutes 3 --steps "tests + model, pools, lab products, run gpu_lab.py step pages"
    python3 benchmarks/gpu.py --tune
    python3 benchmarks/gpu.py --rehearse

Each step is a process of its own with a limit, so that one that hangs, crashes or leaves its device unusable takes no
other along; a step for which no time is left is skipped, and says so. "run" stands before any other script of
benchmarks/ and its words. Steps print as they go. Where OUT names a folder, OUT/gpu.json has the figures after each
step, beside device, commit, versions and how steps ended; the table at the end compares them with
benchmarks/results/gpu.json, the last run that was kept.

Needs torch, Triton and pytest, and nothing installed of this project; clusters want Ray and its company, and are
skipped without. A rehearsal runs all of it on a CPU with the demo model and small sizes, and measures nothing. Without
a GPU the command says so and ends well.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_figures import FILE, HEADINGS, Figure, read_figures, read_last, record, write_run
from benchmarks.gpu_plan import Stage, Step, choose, limit_s, seconds_for_first
from benchmarks.machine import commit

MEASURES = ("engine", "store", "kernels", "products")
LAB = Path(__file__).with_name("gpu_lab.py")
ORDER = (
    "tests + model, killed float32 + killed bfloat16, pools, colocated, engine, store, kernels, products, "
    "lab products, lab attention, tune"
)
"""The most wanted steps first."""
MODEL = Path("/dev/shm/baton-8B")
HEAD_TIMEOUT_S = 90.0
AFTER_TIMEOUT_S = 40.0
GRACE_S = 20.0
"""For the end of steps, where the run is interrupted."""
MAX_LINE = 1500


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: 8)")
    parser.add_argument(
        "--steps", default=ORDER, help=f"names in order, + between those side by side (default: {ORDER})"
    )
    parser.add_argument(
        "--model", type=Path, default=MODEL, help=f"folder for a random 8B, made there (default: {MODEL})"
    )
    parser.add_argument("--flags", default="", help="more flags for each `baton up`")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--tune", action="store_true", help="nothing but tiles, until it is stopped")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--head", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    if options.head:
        print(json.dumps(describe_device()))
        return 0
    if options.tune or options.measure:
        return on_device(options.measure)
    head = read_head()
    if not head["device"] and not options.rehearse:
        print("no CUDA device here: nothing to measure")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if folder := os.environ.get("OUT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as name:
        known = make_steps(options, Path(name))
        try:
            stages = choose(known, options.steps)
        except ValueError as error:
            parser.error(str(error))
        is_kept = options.model.exists()
        try:
            return Run(head, stages, options.minutes * 60, Path(name)).run()
        finally:
            for model in () if is_kept else (options.model, options.model.with_name(f"{options.model.name}.part")):
                shutil.rmtree(model, ignore_errors=True)


def on_device(measure: str | None) -> int:
    """Does in this process what wants a device: a benchmark's rows, or tiles."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    if measure is None:
        return tune()
    from importlib import import_module

    for row in import_module(f"benchmarks.gpu_{measure}").measure():
        record(row.figure)
    return 0


def tune() -> int:
    """Rewrites this device's rows of the table of tiles, and lists them in the folder of OUT, if there is one."""
    import torch

    from benchmarks.gpu_tiles import try_on_device, write_tuned
    from kernels.tiles import architecture_of

    folder = os.environ.get("OUT")
    listed = Path(folder, "tiles.txt") if folder else None
    write_tuned(architecture_of(torch.device("cuda")), try_on_device, torch.cuda.get_device_name(), listed=listed)
    return 0


def describe_device() -> dict[str, str]:
    """Names the device, "" without one, and the versions of what runs on it."""
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    with suppress(ImportError):
        import ray

        versions["ray"] = ray.__version__
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    with suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {"device": device, **versions}


def read_head() -> dict[str, str]:
    """Returns device, versions, commit and day, asked in a process of its own, so that the run holds no device."""
    command = [sys.executable, __file__, "--head"]
    asked = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HEAD_TIMEOUT_S, check=True)
    device: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    now = datetime.datetime.now(datetime.UTC)
    return device | {
        "cores": str(len(os.sched_getaffinity(0))),
        "commit": commit(),
        "date": f"{now:%Y-%m-%d %H:%M}",
    }


def make_steps(options: argparse.Namespace, folder: Path) -> dict[str, Step]:
    """Makes all steps that there are, by name. folder: for compiled kernels of a cold start."""
    steps = _rehearsed_steps(folder) if options.rehearse else _steps(options.model)
    clusters = [
        _cluster(words, least_s, options, folder)
        for words, least_s in (("killed float32", 120), ("killed bfloat16", 120), ("pools", 130), ("colocated", 85))
    ]
    names = map(str.strip, re.split("[,+]", options.steps))
    others = [Step(one, _python(*shlex.split(one)[1:]), 10, 120) for one in names if one.startswith("run ")]
    return {one.name: one for one in (*steps[:2], *clusters, *steps[2:], *others)}


def questions() -> list[str]:
    """Lists what benchmarks/gpu_lab.py can be asked, by its own words."""
    return re.findall(r"^    python3 benchmarks/gpu_lab\.py (\w+) ", LAB.read_text(), re.MULTILINE)


def _steps(model: Path) -> list[Step]:
    steps = [
        Step("tests", _python("gpu_tests.py", "--seconds", "95"), 60, 100, grace_s=3),
        Step("model", _python("gpu_model.py", str(model)), 30, 100),
    ]
    limits_s = {"engine": (25, 70), "store": (15, 45), "kernels": (30, 90), "products": (30, 80)}
    steps += [Step(name, _python("gpu.py", "--measure", name), *limits_s[name]) for name in MEASURES]
    steps += [Step(f"lab {name}", _python("gpu_lab.py", name), 12, 75) for name in questions()]
    return [*steps, Step("tune", _python("gpu.py", "--tune"), 25, 600)]


def _rehearsed_steps(folder: Path) -> list[Step]:
    tests = ("tests/gpu", "tests/kernels/test_tiles.py")
    steps = [
        Step("tests", _python("gpu_tests.py", "--lanes", "2", "--seconds", "80", *tests), 30, 85, grace_s=3),
        Step("model", _python("gpu_model.py", str(folder / "tiny"), "--sizes", "tiny"), 10, 60),
    ]
    steps += [Step(name, _python("gpu.py", "--measure", name), 5, 60) for name in MEASURES]
    steps += [Step(f"lab {name}", _python("gpu_lab.py", name), 5, 60) for name in questions()]
    return [*steps, Step("tune", _python("gpu.py", "--tune"), 5, 60)]


def _cluster(words: str, least_s: float, options: argparse.Namespace, folder: Path) -> Step:
    what, _, dtype = words.partition(" ")
    flags = [f"--flags={options.flags}"] if options.flags else []
    if options.rehearse:
        flags += ["--gpus", "0"]
    elif what != "killed":
        flags += ["--model", str(options.model), "--kernels", str(folder / "kernels")]
    command = _python("gpu_cluster.py", what, *(["--dtype", dtype] if dtype else []), *flags)
    name = f"bench-{words.replace(' ', '-')[:8]}"
    after = (sys.executable, "-m", "cli", "down", "--name", name)
    wants = "" if options.rehearse or what == "killed" else "model"
    return Step(words, command, least_s, least_s + 90, grace_s=20, after=after, wants=wants)


def _python(script: str, *words: str) -> tuple[str, ...]:
    return sys.executable, "-u", str(ROOT / "benchmarks" / script), *words


class Run:
    """A run of stages within its seconds; keeps what each step found."""

    def __init__(self, head: dict[str, str], stages: Sequence[Stage], seconds: float, folder: Path) -> None:
        self._head, self._stages, self._seconds = head, stages, seconds
        self._file = folder / "figures.jsonl"
        self._begun_s = time.monotonic()
        self._steps: dict[str, str] = {}
        self._printing = threading.Lock()
        self._running: dict[str, subprocess.Popen[str]] = {}

    def run(self) -> int:
        """Runs the stages in order; returns 1 if a step failed. Interrupted, ends the steps under way."""
        self._say(", ".join(f"{name} {value}" for name, value in self._head.items()))
        for place, stage in enumerate(self._stages):
            seconds = seconds_for_first(self._stages[place:], self._seconds - self._passed_s)
            if seconds:
                self._run_stage(stage, seconds)
            else:
                self._skip(stage)
            self._keep()
        self._report()
        return int(any(how.startswith(("failed", "stopped")) for how in self._steps.values()))

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _skip(self, stage: Stage) -> None:
        for step in stage:
            self._steps[step.name] = f"skipped: {self._seconds - self._passed_s:.0f} s left, it wants {step.least_s:g}"
            self._say(f"SKIPPED for time: {step.name}")

    def _run_stage(self, stage: Stage, seconds: float) -> None:
        is_beside = len(stage) > 1
        with ThreadPoolExecutor(len(stage)) as threads:
            tasks = [threads.submit(self._run_step, step, min(seconds, limit_s((step,))), is_beside) for step in stage]
            try:
                for one in tasks:
                    one.result()
            except BaseException:
                for process in [*self._running.values()]:
                    _stop(process, GRACE_S)
                raise

    def _run_step(self, step: Step, seconds: float, is_beside: bool) -> None:
        """Runs a step's process, and what ends the rest of one that did not end well by itself."""
        self._say(f"##### {step.name}, at most {seconds:.0f} s")
        begun_s, prefix = time.monotonic(), f"{step.name}: " if is_beside else ""
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=os.environ | {FILE: str(self._file), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running[step.name] = process
        assert process.stdout is not None
        reader = threading.Thread(target=self._relay, args=(process.stdout, prefix), daemon=True)
        reader.start()
        is_in_time = _wait(process, seconds - step.grace_s) or _stop(process, step.grace_s)
        reader.join(1.0)  # a process that the step left behind may hold its output open
        if process.returncode and step.after:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(step.after, cwd=ROOT, timeout=AFTER_TIMEOUT_S, check=False)
        del self._running[step.name]
        how = "ended" if not process.returncode else f"failed with {process.returncode}"
        how = how if is_in_time else "stopped at its limit"
        self._steps[step.name] = f"{how} after {time.monotonic() - begun_s:.0f} s"
        self._say(f"##### {step.name} {self._steps[step.name]}")

    def _relay(self, lines: IO[str], prefix: str) -> None:
        with lines:
            for line in lines:
                with self._printing:
                    print(f"{prefix}{line.rstrip()[:MAX_LINE]}", flush=True)

    def _say(self, text: str) -> None:
        with self._printing:
            print(f"[{self._passed_s:5.0f}] {text}", flush=True)

    def _keep(self) -> None:
        if folder := os.environ.get("OUT"):
            write_run(Path(folder, "gpu.json"), self._head, self._steps, read_figures(self._file))

    def _report(self) -> None:
        last, figures = read_last(), read_figures(self._file)
        print(f"\n{describe_head(self._head)}\nover the last run: {describe_head(last['head'])}\n{HEADINGS}")
        print("\n".join(table(figures, last["values"])))
        for name, how in self._steps.items():
            print(f"{name}: {how}", flush=True)


def table(figures: Sequence[Figure], last: Mapping[tuple[str, str, str], float]) -> list[str]:
    """Formats figures beside the last run's."""
    return [one.describe(last.get(one.key)) for one in figures]


def describe_head(head: Mapping[str, str]) -> str:
    names = ("device", "date", "commit")
    return ", ".join(head[name] or "no device" for name in names if name in head) or "none was kept"


def _wait(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen[str], grace_s: float) -> bool:
    """Ends a step: asks it, then kills it and what it started in its session. Returns False: it was not in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if _wait(process, grace_s):
            break
    return False


if __name__ == "__main__":
    sys.exit(main())
