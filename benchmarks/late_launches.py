"""Signatures of an hour of drawn load that lie outside of the warmed set, and graphs that it lacks.

    python benchmarks/late_launches.py
    python benchmarks/late_launches.py --seconds 60

On a CPU: Triton's own binder specializes each launch, on 1 and on multiples of 16 too, and nothing is compiled or run.
Steps move the clock of that hour, by what they take an 8B model on an H200. A launch outside of the set, or a late
graph, stalls requests for seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SCRIPT = ROOT / "tests" / "simulated_gpu" / "launch_signatures.py"
LOADS = [("llama-gqa", "auto", "full"), ("gguf:Q4_K", "int8", "full"), ("qwen3", "int4", "full")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the load, by its clock (default 3600)")
    seconds = parser.parse_args().seconds
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": os.devnull}
    num_late = 0
    names = ("requests", "steps", "warmed", "launched", "outside", "graphs", "late")
    print(f"{'model, KV':<20}{''.join(f'{one:>12}' for one in names)}{'s':>7}")
    for load in LOADS:
        began_s = time.monotonic()
        command = [sys.executable, str(SCRIPT), *load, str(seconds)]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(answer.stdout)
        num_outside = len(found["outside"])
        num_late += num_outside + found["late_programs"]
        kernels = [found[one] for one in ("requests", "passes", "warmed", "seen")]
        columns = "".join(f"{one:>12}" for one in [*kernels, num_outside, found["programs"], found["late_programs"]])
        print(f"{', '.join(load[:2]):<20}{columns}{time.monotonic() - began_s:>7.0f}", flush=True)
    return 1 if num_late else 0


if __name__ == "__main__":
    sys.exit(main())
