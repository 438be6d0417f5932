"""A mixture of experts on a CPU: decoding rows beside one long read of memory, a prompt beside a dense layer.

    python benchmarks/experts.py --threads 2
    python benchmarks/experts.py --threads 2 --weights Q4_K

A layer of hidden size 1,024 has 32 experts of 512, of which a row has 4, and is a program: routing, products, gate and
sums. A few rows: the bytes of the experts that are chosen, a second, over what as many threads read from memory. 512
rows: the time of a dense layer with as many operations (2,048 wide) over theirs. All are timed in turns.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.engine import READ_BYTES
from benchmarks.machine import MachineState, commit, processor
from kernels.backend import Activation, Backend, Recorder, Weight
from kernels.quantized.matrix import Quantized
from kernels.routing import Gating
from kernels.selection import select_backend
from tests.kernels.quantized_matrices import DRAWS

HIDDEN, NUM_EXPERTS, WIDTH, NUM_CHOSEN = 1024, 32, 512, 4
NUM_LAYERS = 4
"""Together they are larger than any cache; each is timed alone."""
NUM_DENSE_LAYERS = 16
PIECE_BYTES = 1 << 26
FEW, MANY = (1, 8), 512
PLAIN = "bfloat16"
DTYPE = torch.bfloat16


def draw(backend: Backend, weights: str, columns: int, depth: int) -> Weight:
    """Draws a matrix, plain or in a format of `DRAWS`."""
    if weights == PLAIN:
        return backend.pack(torch.randn(columns, depth).mul(depth**-0.5).to(DTYPE))
    drawn: Quantized = DRAWS[weights](columns, depth)
    return backend.pack_codes([drawn], DTYPE)


def numbers(*sizes: int) -> Tensor:
    return torch.randn(*sizes).to(DTYPE)


class Mixture:
    """Layers of experts on as many drawn rows, a program each."""

    def __init__(self, backend: Backend, num_rows: int, layers: Sequence[Sequence[Sequence[Weight]]]) -> None:
        chosen = num_rows, NUM_CHOSEN
        self._kept: list[object] = []
        self.programs, self.num_bytes = [], []
        for matrices in layers:
            to = recorder_of(backend)
            states, out, logits = (
                numbers(num_rows, HIDDEN),
                numbers(num_rows, HIDDEN),
                torch.randn(num_rows, NUM_EXPERTS),
            )
            gate_up, gated, rows = (numbers(*chosen, size) for size in (2 * WIDTH, WIDTH, HIDDEN))
            routing = backend.route(logits, NUM_CHOSEN, Gating.OF_ALL_NORMED)
            up, down = (backend.experts(own) for own in matrices)
            to.route(logits, NUM_CHOSEN, Gating.OF_ALL_NORMED, routing)
            to.expert_linear(states, up, routing, None, gate_up)
            to.gate(gate_up, Activation.SILU, gated)
            to.expert_linear(gated, down, routing, None, rows)
            to.combine(rows, routing, states, out)
            self.programs.append(to.finish())
            self._kept.append((states, out, logits, gate_up, gated, rows, routing, up, down))
            used = routing.experts.unique().tolist()
            self.num_bytes.append(sum(own[expert].data.nbytes for own in matrices for expert in used))


class Dense:
    """Layers that are as wide as all experts of a row together, a program each."""

    def __init__(self, backend: Backend, num_rows: int, layers: Sequence[Sequence[Weight]]) -> None:
        sizes = HIDDEN, 2 * NUM_CHOSEN * WIDTH, NUM_CHOSEN * WIDTH, HIDDEN
        self._kept = states, gate_up, gated, out = [numbers(num_rows, size) for size in sizes]
        self.programs = []
        for up, down in layers:
            to = recorder_of(backend)
            to.linear(states, up, None, None, gate_up)
            to.gate(gate_up, Activation.SILU, gated)
            to.linear(gated, down, None, states, out)
            self.programs.append(to.finish())


class Reader:
    """Reads a gigabyte of memory piece by piece, with as many threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._threads = num_threads, ThreadPoolExecutor(num_threads)
        self._pieces = torch.ones(READ_BYTES // 4).split(PIECE_BYTES // 4)

    def seconds(self) -> list[float]:
        """Returns the seconds of each piece."""
        return [timed(partial(self._read, piece)) for piece in self._pieces]

    def _read(self, piece: Tensor) -> None:
        list(self._threads.map(torch.amax, piece.chunk(self._num_threads)))


def recorder_of(backend: Backend) -> Recorder:
    recorder = backend.record()
    assert recorder is not None
    return recorder


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(weights: str, num_threads: int, num_rounds: int) -> dict[str, float | str]:
    """Times all in turns, and relates the best times of a layer: what others do on the machine makes none shorter."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    backend = select_backend(torch.device("cpu"))
    sizes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    layers = [
        [[draw(backend, weights, *size) for _ in range(NUM_EXPERTS)] for size in sizes] for _ in range(NUM_LAYERS)
    ]
    sizes = (2 * NUM_CHOSEN * WIDTH, HIDDEN), (HIDDEN, NUM_CHOSEN * WIDTH)
    dense_layers = [[draw(backend, weights, *size) for size in sizes] for _ in range(NUM_DENSE_LAYERS)]
    mixtures = {rows: Mixture(backend, rows, layers) for rows in (*FEW, MANY)}
    denses = {rows: Dense(backend, rows, dense_layers) for rows in (1, MANY)}
    reader, rates = Reader(num_threads), defaultdict[str, list[float]](list)
    for _ in range(num_rounds):
        rates["read"] += [PIECE_BYTES / seconds / 1e9 for seconds in reader.seconds()]
        for rows, mixture in mixtures.items():
            for program, num_bytes in zip(mixture.programs, mixture.num_bytes, strict=True):
                seconds = timed(partial(program.run, rows, 0, 0))
                rates[f"bytes {rows}"].append(num_bytes / seconds / 1e9)
                rates[f"experts {rows}"].append(1 / seconds)
        for rows, dense in denses.items():
            rates[f"dense {rows}"] += [1 / timed(partial(program.run, rows, 0, 0)) for program in dense.programs]
    best = {name: max(each) for name, each in rates.items()}
    figures: dict[str, float | str] = {
        "instruction set": backend.name,
        "threads": num_threads,
        "read, GB/s": best["read"],
    }
    for rows in FEW:
        figures[f"{rows} rows, bytes of chosen experts a second over the read"] = best[f"bytes {rows}"] / best["read"]
    for rows in denses:
        figures[f"{rows} rows, time of a dense layer over experts'"] = best[f"experts {rows}"] / best[f"dense {rows}"]
    for name, rate in best.items():
        if name.partition(" ")[0] in ("experts", "dense"):
            figures[f"{name} rows, ms a layer"] = 1e3 / rate
            figures[f"{name} rows, best rate over median"] = rate / median(rates[name])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=(PLAIN, *DRAWS), default=PLAIN)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    print(f"commit {commit()}; {processor()}, {MachineState.measure().describe()}")
    for name, figure in measure(options.weights, options.threads, options.rounds).items():
        print(f"{name}: {figure:.3g}" if isinstance(figure, float) else f"{name}: {figure}")


if __name__ == "__main__":
    main()
