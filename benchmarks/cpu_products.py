"""Products of linear layers in bfloat16 on a CPU: each instruction set of this machine beside torch (oneDNN), in turns.

OMP_NUM_THREADS=2 python benchmarks/cpu_products.py --threads 2

With a reproducible set and the one of its own order of sums (`--isas avx2 reproducible_avx2`) it prints the price of
the common order, too.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import MachineState, commit, processor
from kernels.backend import Weight
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import ISA_TO_FEATURES, best_isa, can_run
from tests.kernels.quantized_matrices import DRAWS

MODEL_TO_MATRICES = {
    "135M": ((3072, 576), (576, 1536)),
    "0.5B": ((9728, 896), (896, 4864)),
    "1.5B": ((17920, 1536), (1536, 8960)),
    "8B": ((28672, 4096), (4096, 14336)),
}
"""Columns and depth of gate and up, and of down."""
NUM_ROWS = (1, 8, 32, 128, 512, 2048)
PACKED = "Q4_1"
WORKING_SET_BYTES = 256 << 20
NUM_ROUNDS = 5
"""The least time counts."""
OF_ONE_ORDER = "reproducible_"
"""The start of the names of sets with a common order of sums, before the name of the set with an order of its own."""


def measure(
    backends: Mapping[str, CpuBackend], num_threads: int, models: Sequence[str], row_counts: Sequence[int]
) -> Iterator[str]:
    """Yields a line for each matrix and number of rows, as it is measured: GFLOP/s by product."""
    for model in models:
        for columns, depth in MODEL_TO_MATRICES[model]:
            num_copies = max(1, min(16, WORKING_SET_BYTES // (2 * columns * depth)))
            plain = torch.randn(num_copies, columns, depth).bfloat16()
            weights = {name: [backend.pack(one) for one in plain] for name, backend in backends.items()}
            best = next(iter(backends))
            drawn = DRAWS[PACKED](columns, depth)
            coded = {name: [one.pack_codes([drawn], torch.bfloat16) for _ in plain] for name, one in backends.items()}
            for num_rows in row_counts:
                rows = torch.randn(num_rows, depth).bfloat16()
                works = {name: partial(_multiply, backends[name], rows, of_name) for name, of_name in weights.items()}
                works |= {
                    f"{name} {PACKED}": partial(_multiply, backends[name], rows, own) for name, own in coded.items()
                }
                works["torch"] = partial(_multiply_in_torch, rows, plain, num_threads)
                operations = 2 * num_copies * num_rows * columns * depth
                rates = {name: operations / seconds / 1e9 for name, seconds in _time(works).items()}
                told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                pairs = [(best, "torch"), *((name, name.removeprefix(OF_ONE_ORDER)) for name in rates)]
                ratios = [f"{a} over {b} {rates[a] / rates[b]:.2f}" for a, b in pairs if a != b and b in rates]
                yield f"{model} {columns} x {depth}, {num_rows} rows: {told} GFLOP/s; {', '.join(ratios)}"


def _multiply(backend: CpuBackend, rows: Tensor, weights: list[Weight]) -> None:
    for one in weights:
        backend.linear(rows, one, None)


def _multiply_in_torch(rows: Tensor, weights: Tensor, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # the kernels leave it one
    for one in weights:
        F.linear(rows, one)
    torch.set_num_threads(1)


def _time(works: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Runs the works in turns, once unmeasured; returns the least seconds of each."""
    least = dict.fromkeys(works, float("inf"))
    for round_index in range(NUM_ROUNDS + 1):
        for name, work in works.items():
            began_s = time.perf_counter()
            work()
            if round_index:
                least[name] = min(least[name], time.perf_counter() - began_s)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isas", nargs="+", choices=list(ISA_TO_FEATURES), help="default: the best, and avx512")
    parser.add_argument("--models", nargs="+", choices=list(MODEL_TO_MATRICES), default=list(MODEL_TO_MATRICES))
    parser.add_argument("--rows", nargs="+", type=int, default=NUM_ROWS)
    arguments = parser.parse_args()
    isas = arguments.isas or [*(["amx"] if can_run("amx") else []), best_isa(has_tiles=False)]
    torch.set_num_threads(arguments.threads)
    backends = {isa: CpuBackend(isa) for isa in isas}
    print(f"{processor()}, {arguments.threads} threads, {MachineState.measure().describe()}, commit {commit()}")
    for line in measure(backends, arguments.threads, arguments.models, arguments.rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
