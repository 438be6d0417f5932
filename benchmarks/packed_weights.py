"""Products of weights in 4 to 8 bits beside products of weights in bfloat16.

    python benchmarks/packed_weights.py --threads 1

All products of one forward pass of SmolLM-135M's shape, of 1 to 512 rows. The formats take turns; the sum of each
product's shortest time counts, so that a neighbour's work on a shared machine costs little.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.result_file import write_result
from kernels.backend import Backend, Weight
from kernels.selection import select_backend
from tests.kernels.quantized_matrices import DRAWS

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Columns and depth of a layer's matrices."""
NUM_LAYERS = 30
FORMATS = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "FP8 of blocks")
ROWS_TO_TURNS = {1: 15, 2: 9, 8: 7, 32: 5, 512: 2}
PLAIN = "bfloat16"


def make_weights(backend: Backend) -> dict[str, list[Weight]]:
    """Packs each matrix of each layer in each format, in memory of its own."""
    weights: dict[str, list[Weight]] = {name: [] for name in (PLAIN, *FORMATS)}
    for columns, depth in LAYER * NUM_LAYERS:
        weights[PLAIN].append(backend.pack(torch.randn(columns, depth).bfloat16()))
    for name in FORMATS:
        drawn = [DRAWS[name](columns, depth) for columns, depth in LAYER]
        weights[name] = [backend.pack_codes([one], torch.bfloat16) for one in drawn * NUM_LAYERS]
    return weights


def measure(backend: Backend, weights: dict[str, list[Weight]], num_rows: int, num_turns: int) -> dict[str, float]:
    """Returns milliseconds of all products of each format."""
    best = {name: [float("inf")] * len(of_format) for name, of_format in weights.items()}
    rows = {depth: torch.randn(num_rows, depth).bfloat16() for _, depth in LAYER}
    for _ in range(num_turns):
        for name, of_format in weights.items():
            for at, weight in enumerate(of_format):
                began_s = time.perf_counter()
                backend.linear(rows[weight.depth], weight, None)
                best[name][at] = min(best[name][at], time.perf_counter() - began_s)
    return {name: sum(seconds) * 1e3 for name, seconds in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    backend = select_backend(torch.device("cpu"))
    weights = make_weights(backend)
    times = {rows: measure(backend, weights, rows, turns) for rows, turns in ROWS_TO_TURNS.items()}
    num_bytes = {name: sum(one.data.nbytes for one in of_format) for name, of_format in weights.items()}
    head = ("weights", "bytes", *(f"{rows} rows" for rows in times))
    table = [
        (name, f"{num_bytes[name] / num_bytes[PLAIN]:.2f}", *(f"{of[PLAIN] / of[name]:.2f}" for of in times.values()))
        for name in weights
    ]
    figures = {"instruction set": backend.name, "threads": threads}
    figures |= {f"bfloat16, {rows} rows, ms": f"{of[PLAIN]:.1f}" for rows, of in times.items()}
    write_result("packed_weights", figures, {"ms": times}, [head, *table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
