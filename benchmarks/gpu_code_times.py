"""Times the candidate of benchmarks/gpu_codes.py beside the product's kernel and cuBLAS, over the matrices of a layer.

A process for each format and number of rows: all prepare and compile at once, then measure one after another.
benchmarks/gpu_lab.py asks them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_candidates import ask_in_turn, compiling
from benchmarks.gpu_codes import CodesTile, multiply_part
from benchmarks.gpu_kernels import WORKING_SET_BYTES, make_random
from benchmarks.gpu_products import IN_REGISTERS, MAX_COPIES, OF_A_LAYER
from benchmarks.gpu_timing import time_in_turn
from kernels.quantized import products
from kernels.quantized.device_layout import CodedWeight
from kernels.tiles import Tile
from tests.kernels.quantized_matrices import DRAWS

COMMAND = [sys.executable, "-m", "benchmarks.gpu_code_times"]
MEASURING_S = 15.0
CHECKED_COLUMNS = 256
MAX_TILES = 1 << 16
FEW = [(8, 64, 2, 4, 1056), (8, 64, 2, 4, 528), (8, 128, 2, 3, 792), (16, 64, 2, 4, 924)]
UP_TO_16 = [(16, 64, 2, 4, 924), (16, 64, 2, 4, 462), (16, 64, 2, 3, 924), (16, 128, 2, 3, 528)]
UP_TO_64 = [(16, 128, 2, 3, 264), (32, 64, 2, 3, 462), (16, 64, 2, 4, 462)]
ASKED_TO_TILES = {
    "Q4_K 1": FEW,
    "Q4_K 16": UP_TO_16,
    "Q4_K 64": UP_TO_64,
    "Q6_K 16": [(16, 64, 2, 4, 660), (16, 64, 2, 3, 330), (16, 128, 2, 3, 528)],
    "Q8_0 16": [(16, 64, 2, 4, 1056), (16, 128, 2, 4, 660), (16, 64, 2, 5, 1056)],
}
"""Rows, columns, warps, stages and most programs, by format and rows of states."""
WIDENING = {1: (16, 64, 2, 4), 16: (16, 64, 2, 4), 64: (64, 128, 4, 3)}
"""A tile of the product's kernel with more splits, by rows of states."""
MORE_SPLITS: dict[str, Any] = {"WANTED_PROGRAMS": 768, "MIN_SPLIT_DEPTH": 512}
Work = Callable[[CodedWeight], Tensor]


@dataclass(frozen=True)
class Matrix:
    """Copies of a packed matrix that leave the cache, as many plain ones, and states.

    exact: the product with the first columns, float64, whose weights are not rounded.
    """

    name: str
    weights: Sequence[CodedWeight]
    plain: Tensor
    states: Tensor
    exact: Tensor


def codes() -> Iterator[str]:
    """Times products of few rows whose codes are scaled after them, beside the product's kernel and cuBLAS."""
    yield from ask_in_turn(COMMAND, list(ASKED_TO_TILES), MEASURING_S)


def make_matrix(name: str, form: str, num_rows: int) -> Matrix:
    columns, depth = OF_A_LAYER[name]
    with torch.device("cuda"):
        drawn = DRAWS[form](columns, depth)
    first = IN_REGISTERS.pack_codes([drawn], torch.bfloat16)
    num_copies = min(MAX_COPIES, -(-WORKING_SET_BYTES // first.data.nbytes))
    weights = [first, *(IN_REGISTERS.pack_codes([drawn], torch.bfloat16) for _ in range(num_copies - 1))]
    assert all(isinstance(one, CodedWeight) for one in weights)
    plain = make_random(min(MAX_COPIES, -(-WORKING_SET_BYTES // (2 * columns * depth))), columns, depth)
    states = make_random(num_rows, depth)
    widened = drawn.pick(torch.arange(CHECKED_COLUMNS, device="cuda")).dequantize().double()
    return Matrix(name, weights, plain, states, states.double() @ widened.T)  # type: ignore[arg-type]


def works_of(asked: str, states: Tensor, counters: Tensor) -> dict[str, Work]:
    """Makes a product for each candidate, by its name; the first is the product's own."""

    def widened(changes: dict[str, Any], weight: CodedWeight) -> Tensor:
        with mock.patch.multiple(products, **changes):
            return IN_REGISTERS.linear(states, weight, None)

    def scaled(tile: CodesTile, weight: CodedWeight) -> Tensor:
        out = states.new_empty(len(states), weight.columns)
        [part] = weight.parts
        multiply_part(states, part, tile, counters, None, None, out)
        return out

    own = Tile(*WIDENING[int(asked.split()[1])])
    works: dict[str, Work] = {"the table's": partial(widened, {})}
    works["the table's, more splits"] = partial(widened, MORE_SPLITS)
    if own.num_warps == 2:
        works["widened, 2 warps"] = partial(widened, MORE_SPLITS | {"choose_product_tile": lambda *_: own})
    for numbers in ASKED_TO_TILES[asked]:
        works[str(numbers)] = partial(scaled, CodesTile(*numbers))
    return works


def check(works: dict[str, Work], alone: dict[str, Work], matrix: Matrix) -> Iterator[str]:
    """Compares products with the exact ones, all columns with the table's, and a row's bits with those it has alone."""
    weight, expected = matrix.weights[0], matrix.exact
    own = next(iter(works.values()))(weight).float()
    for name, work in list(works.items()):
        try:
            first, second = work(weight), work(weight)
            off = float((first[:, :CHECKED_COLUMNS].double() - expected).abs().max() / expected.abs().max())
            apart = float((first.float() - own).abs().max() / own.abs().max())
            told = f"{matrix.name}, {name}: off by {off:.1e}, by {apart:.1e} of the table's"
            told += "" if torch.equal(first, second) else ", NOT TWICE THE SAME"
            told += "" if torch.equal(first[:1], alone[name](weight)) else ", OTHER BITS ALONE"
            yield told + (", WRONG" if not (off < 1e-2 and apart < 2e-2) else "")
        except Exception as error:
            yield f"{matrix.name}, {name}: {error!r:.200}"
            del works[name]


def measure(asked: str) -> Iterator[str]:
    """Yields first once all is compiled, then lines."""
    form, rows = asked.split()
    matrices = [make_matrix(name, form, int(rows)) for name in OF_A_LAYER]
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
    works = [works_of(asked, one.states, counters) for one in matrices]
    alone = [works_of(asked, one.states[:1], counters) for one in matrices]
    with compiling():
        for matrix, *both in zip(matrices, works, alone, strict=True):
            for work in chain.from_iterable(own.values() for own in both):
                work(matrix.weights[0])
    yield "ready"
    totals: dict[str, float] = {}
    for matrix, own, first in zip(matrices, works, alone, strict=True):
        yield from check(own, first, matrix)
        runs = {name: partial(run_each, work, matrix.weights) for name, work in own.items()}
        runs["cuBLAS"] = partial(run_each, partial(F.linear, matrix.states), matrix.plain)
        sizes = {name: len(matrix.plain if name == "cuBLAS" else matrix.weights) for name in runs}
        seconds = {name: one / sizes[name] for name, one in time_in_turn(runs).items()}
        for name, one in seconds.items():
            totals[name] = totals.get(name, 0.0) + one
        read = matrix.weights[0].data.nbytes / min(seconds[name] for name in own) / 1e12
        told = "; ".join(f"{name} {one * 1e6:.1f}" for name, one in seconds.items())
        yield f"{matrix.name}, us: {told}; the quickest reads {read:.2f} TB/s"
    peer = totals.pop("cuBLAS")
    quickest_first = sorted(totals.items(), key=lambda one: one[1])
    told = "; ".join(f"{name} {peer / one:.2f} ({one * 1e6:.0f})" for name, one in quickest_first)
    yield f"all four over cuBLAS ({peer * 1e6:.0f} us): {told}"
    if counters.any():
        yield "COUNTERS ARE LEFT"


def run_each(work: Callable[[Any], object], weights: Sequence[CodedWeight] | Tensor) -> None:
    for one in weights:
        work(one)


def main(asked: str) -> None:
    for line in measure(asked):
        print(line, flush=True)
        if line == "ready":
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
