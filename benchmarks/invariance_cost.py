"""The cost of rows whose bits depend on no other: our linear layers beside torch's fastest, which may vary.

    python benchmarks/invariance_cost.py --threads 2

All products of one forward pass of SmolLM-135M's shape in bfloat16, of 1 to 512 rows. Torch multiplies weights that
oneDNN has packed. The two take turns, with a pause, for torch's threads spin for a while; the best turn counts.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.result_file import write_result
from kernels.backend import Backend, Weight
from kernels.selection import select_backend

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Columns and depth of a layer's matrices."""
NUM_LAYERS = 30
PACK, LINEAR = (getattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
"""Torch's compiler calls these operators; they have no public names."""
_SETTLE_S = 0.3


def make_products(
    num_rows: int, num_threads: int
) -> dict[str, tuple[int, list[Callable[[torch.Tensor], torch.Tensor]]]]:
    """Makes each engine's products, a function a matrix, and the threads that torch then has."""
    torch.set_num_threads(num_threads)
    backend = select_backend(torch.device("cpu"))
    weights = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(NUM_LAYERS) for shape in LAYER]
    own = [backend.pack(weight) for weight in weights]
    packed = [PACK(weight, num_rows) for weight in weights]
    return {
        "baton": (1, [partial(_multiply, backend, weight) for weight in own]),
        "torch": (num_threads, [partial(_multiply_packed, weight) for weight in packed]),
    }


def _multiply(backend: Backend, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
    return backend.linear(rows, weight, None)


def _multiply_packed(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = LINEAR(rows, weight, None, "none", [], "")
    return product


def measure(num_rows: int, num_threads: int, num_turns: int) -> dict[str, float]:
    """Returns milliseconds of all products: the sum of each one's shortest time."""
    engines = make_products(num_rows, num_threads)
    inputs = [torch.randn(num_rows, depth, dtype=torch.bfloat16) for _ in range(NUM_LAYERS) for _, depth in LAYER]
    best = {name: [float("inf")] * len(inputs) for name in engines}
    for _ in range(num_turns):
        for name, (torch_threads, products) in engines.items():
            torch.set_num_threads(torch_threads)
            time.sleep(_SETTLE_S)
            for at, (product, rows) in enumerate(zip(products, inputs, strict=True)):
                began_s = time.perf_counter()
                product(rows)
                best[name][at] = min(best[name][at], time.perf_counter() - began_s)
    return {name: sum(seconds) * 1e3 for name, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="invariance_cost", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    figures = {rows: measure(rows, options.threads, options.turns) for rows in options.rows}
    rows = {
        f"{rows} rows": f"baton {one['baton']:.2f} ms, torch {one['torch']:.2f} ms: {one['torch'] / one['baton']:.2f}"
        for rows, one in figures.items()
    }
    write_result(options.out, rows, {str(rows): one for rows, one in figures.items()})


if __name__ == "__main__":
    main()
