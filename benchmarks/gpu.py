"""Everything that wants a GPU, in one command: the tests of the kernels, then how fast they are.

    python3 benchmarks/gpu.py
    python3 benchmarks/gpu.py --tune

Needs torch, Triton, pytest and hypothesis, and nothing installed of this project. Prints a table last; where OUT names
a folder, the figures go to OUT/gpu.json, too. With --tune, tiles are timed instead, and this architecture's rows of
kernels/tiles.toml get the fastest that spill nothing. Without a GPU it says so and ends well.
"""

import datetime
import importlib.util
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
TESTS = [
    "tests/gpu",
    *(
        f"tests/kernels/test_{name}.py"
        for name in ("paged_decode", "paged_prefill", "kv_write", "int4_pages", "packed_products")
    ),
]
TESTS += ["tests/kernels/test_row_operations.py"]
HEADINGS = f"{'work':<14}{'shape':<16}{'us':>10}{'of ceiling':>11}  {'ceiling':<14}{'against':<24}{'times faster':>12}"
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
]


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    if "--tune" in sys.argv[1:]:
        return tune()
    failed = run_tests()
    if failed:
        print("the kernels are wrong here: no figures")
        return failed
    rows = []
    for row in measure_all():
        print(describe(row), flush=True)
        rows.append(row)
    report(rows)
    return 0


def tune() -> int:
    """Rewrites this device's rows of the table of tiles."""
    from benchmarks.gpu_tiles import try_on_device, write_tuned
    from kernels.tiles import architecture_of

    write_tuned(architecture_of(torch.device("cuda")), try_on_device, torch.cuda.get_device_name())
    return 0


def run_tests() -> int:
    """The exit status of the kernels' tests, compiled for the GPU of this machine."""
    at_once = ["-n", "12", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", *PYTEST, *at_once, *TESTS]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=TEST_LIMIT_S, check=False).returncode


def measure_all() -> Iterable[Row]:
    """Yields the rows of every benchmark."""
    from benchmarks import gpu_engine, gpu_kernels, gpu_products, gpu_store

    for benchmark in [gpu_kernels.measure, gpu_products.measure, gpu_store.measure, gpu_engine.measure]:
        yield from benchmark()


def describe(row: Row) -> str:
    """Formats a row under HEADINGS."""
    over_peer = f"{row.over_peer:>12.2f}" if row.peer else ""
    figures = f"{row.seconds * 1e6:>10.1f}{row.of_ceiling:>11.2f}"
    return f"{row.name:<14}{row.shape:<16}{figures}  {row.ceiling:<14}{row.peer:<24}{over_peer}".rstrip()


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
        figures = [asdict(row) | {"of_ceiling": row.of_ceiling, "over_peer": row.over_peer} for row in rows]
        Path(folder, "gpu.json").write_text(json.dumps(head | {"rows": figures}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
