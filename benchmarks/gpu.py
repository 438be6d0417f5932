"""Everything that wants a GPU, in one command: the tests of the kernels, then how fast they are.

    python3 benchmarks/gpu.py

Needs torch, Triton, pytest and hypothesis, and nothing installed of this project. Prints a table last; where OUT names
a folder, the figures go to OUT/gpu.json, too. Without a GPU it says so and ends well.
"""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.gpu_timing import Row

TEST_LIMIT_S = 420
HEADINGS = f"{'kernel':<8}{'shape':<14}{'us/layer':>10}{'GB/s':>8}{'of copy':>9}  {'against':<24}{'times faster':>12}"
# The settings of pyproject.toml name plugins that a bare GPU machine may lack; these tests need none of them.
PYTEST = ["-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-o", f"pythonpath={ROOT}", "-q"]


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    failed = run_tests()
    if failed:
        print("the kernels are wrong here: no figures")
        return failed
    report(list(measure_all()))
    return 0


def run_tests() -> int:
    """The exit status of the kernels' tests, compiled for the GPU of this machine."""
    command = [sys.executable, "-m", "pytest", *PYTEST, "tests/gpu", "tests/kernels"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=TEST_LIMIT_S, check=False).returncode


def measure_all() -> Iterable[Row]:
    """Yields the rows of every benchmark. The engine's, and copies between the tiers, are to join the list."""
    from benchmarks import gpu_kernels

    for benchmark in [gpu_kernels.measure]:
        yield from benchmark()


def describe(row: Row) -> str:
    """Formats a row under HEADINGS."""
    figures = f"{row.seconds * 1e6:>10.1f}{row.gb_s:>8.0f}{row.of_copy:>9.2f}"
    return f"{row.name:<8}{row.shape:<14}{figures}  {row.peer:<24}{row.over_peer:>12.2f}"


def report(rows: Sequence[Row]) -> None:
    """Prints the table and writes it where OUT says."""
    head = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": f"torch {torch.__version__}",
    }
    print(", ".join(head.values()))
    print(HEADINGS)
    for row in rows:
        print(describe(row))
    if folder := os.environ.get("OUT"):
        figures = [asdict(row) | {"gb_s": row.gb_s, "of_copy": row.of_copy, "over_peer": row.over_peer} for row in rows]
        Path(folder, "gpu.json").write_text(json.dumps(head | {"rows": figures}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
