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
from tests.kernels.quantized_matrices import DRAWS

COMMAND = [sys.executable, "-m", "benchmarks.gpu_code_times"]
MEASURING_S = 25.0
CHECKED_COLUMNS = 256
MAX_TILES = 1 << 16
MAX_OFF = 2e-2
ASKED_TO_TILES: dict[str, list[tuple[Any, ...]]] = {
    "Q4_K 1": [
        (8, 64, 2, 4, 1056),
        (8, 64, 2, 4, 528),
        (8, 128, 2, 3, 792),
        (16, 64, 2, 4, 924),
        (16, 128, 4, 4, 528, True),
    ],
    "Q4_K 16": [
        (16, 64, 2, 4, 924),
        (16, 64, 2, 4, 462),
        (16, 64, 2, 3, 924),
        (16, 128, 2, 3, 528),
        (16, 128, 4, 4, 528, True),
        (16, 64, 2, 4, 1056, True),
    ],
    "Q4_K 64": [(16, 128, 2, 3, 264), (32, 64, 2, 3, 462), (64, 128, 4, 3, 396, True), (64, 128, 4, 2, 264, True)],
    "Q6_K 16": [(16, 64, 2, 4, 792), (16, 64, 2, 3, 396), (16, 128, 2, 3, 528), (16, 64, 4, 4, 792, True)],
    "Q8_0 16": [(16, 64, 2, 4, 1320), (16, 128, 2, 4, 792), (16, 64, 2, 5, 660), (16, 128, 4, 4, 660, True)],
}
"""Rows, columns, warps, stages, most programs, and whether weights are widened, by format and rows of states."""
MORE_SPLITS: dict[str, Any] = {"WANTED_PROGRAMS": 512, "MIN_SPLIT_DEPTH": 512}
"""The product's kernel with more splits."""
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

    def split_more(weight: CodedWeight) -> Tensor:
        with mock.patch.multiple(products, **MORE_SPLITS):
            return IN_REGISTERS.linear(states, weight, None)

    def multiplied(tile: CodesTile, weight: CodedWeight) -> Tensor:
        out = states.new_empty(len(states), weight.columns)
        [part] = weight.parts
        multiply_part(states, part, tile, counters, None, None, out)
        return out

    works: dict[str, Work] = {"the table's": lambda weight: IN_REGISTERS.linear(states, weight, None)}
    works["the table's, more splits"] = split_more
    for numbers in ASKED_TO_TILES[asked]:
        works[str(numbers)] = partial(multiplied, CodesTile(*numbers))
    return works


def check(works: dict[str, Work], alone: dict[str, Work], matrix: Matrix) -> Iterator[str]:
    """Compares products with the exact ones, all columns with the table's, and a row's bits with its own alone.

    Tells the largest differences, and drops the works that fail.
    """
    weight, expected = matrix.weights[0], matrix.exact
    own = next(iter(works.values()))(weight).float()
    offs: dict[str, tuple[float, float]] = {}
    for name, work in list(works.items()):
        try:
            first, second = work(weight), work(weight)
            off = float((first[:, :CHECKED_COLUMNS].double() - expected).abs().max() / expected.abs().max())
            offs[name] = off, float((first.float() - own).abs().max() / own.abs().max())
            if not max(offs[name]) < MAX_OFF:
                yield f"{matrix.name}, {name}: WRONG, {offs[name]}"
            if not torch.equal(first, second):
                yield f"{matrix.name}, {name}: NOT TWICE THE SAME"
            if not torch.equal(first[:1], alone[name](weight)):
                yield f"{matrix.name}, {name}: OTHER BITS ALONE"
        except Exception as error:
            yield f"{matrix.name}, {name}: {error!r:.200}"
            del works[name]
    told = (f"{name} {off:.0e}, {apart:.0e}" for name, (off, apart) in offs.items())
    yield f"{matrix.name}, off of the exact product, and of the table's: {'; '.join(told)}"


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
