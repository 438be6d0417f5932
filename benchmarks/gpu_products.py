"""Products with packed weights at the sizes of Llama 3 8B, against reading or a product, and against torch in bfloat16.

As many copies of a matrix take turns as it needs to leave the cache. A row's bits are compared beside the times: among
few rows and among many, at these sizes.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_kernels import HIDDEN, MLP, WORKING_SET_BYTES, Ceilings, make_random
from benchmarks.gpu_timing import Row
from kernels.backend import Weight
from kernels.triton_backend import TritonBackend
from tests.kernels.quantized_matrices import DRAWS

DEPTH = HIDDEN
FORMATS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "FP8 of blocks")
MATRICES = {"o": (HIDDEN, HIDDEN), "gate up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
"""Columns and depth."""
NUM_ROWS = (1, 16, 64, 2048)
MAX_COPIES = 32
BACKEND = TritonBackend()


def measure() -> Iterator[Row]:
    """Rows as they are measured: all matrices in Q4_K, and the square one in each format."""
    ceilings = Ceilings()
    cases = [(name, "Q4_K") for name in MATRICES] + [("o", one) for one in FORMATS if one != "Q4_K"]
    for name, form in cases:
        columns, depth = MATRICES[name]
        weights = make_weights(form, columns, depth)
        plain = make_random(min(MAX_COPIES, -(-WORKING_SET_BYTES // (2 * columns * depth))), columns, depth)
        for num_rows in NUM_ROWS:
            states = make_random(num_rows, depth)
            _require_bits(states, weights[0])
            yield _measure(f"{name} {form.split()[0]}", states, weights, plain, ceilings)
        torch.cuda.empty_cache()


def make_weights(form: str, columns: int, depth: int) -> list[Weight]:
    """Makes copies of a packed matrix on the GPU, together larger than its cache."""
    matrix = DRAWS[form](columns, depth).to(torch.device("cuda"))
    first = BACKEND.pack_codes([matrix], torch.bfloat16)
    num_copies = min(MAX_COPIES, -(-WORKING_SET_BYTES // first.data.nbytes))
    return [first, *(BACKEND.pack_codes([matrix], torch.bfloat16) for _ in range(num_copies - 1))]


def multiply_in_turn(states: Tensor, weights: Sequence[Weight]) -> Callable[[], None]:
    """Makes the launches of a product with each of the weights."""

    def run() -> None:
        for one in weights:
            BACKEND.linear(states, one, None)

    return run


def _measure(name: str, states: Tensor, weights: Sequence[Weight], plain: Tensor, ceilings: Ceilings) -> Row:
    def in_bfloat16() -> None:
        for one in plain:
            F.linear(states, one)

    works: dict[str, Callable[[], object]] = {"packed": multiply_in_turn(states, weights), "bf16": in_bfloat16}
    times = ceilings.time(works)
    own, other = times.seconds["packed"] / len(weights), times.seconds["bf16"] / len(plain)
    num_rows, (columns, depth) = len(states), plain[0].shape
    by_bytes, by_products = weights[0].data.nbytes / times.read, 2 * num_rows * columns * depth / times.operations
    ceiling = "read" if by_bytes > by_products else "product"
    return Row(name, f"{num_rows} rows", own, max(by_bytes, by_products), ceiling, "torch, bf16 weights", other)


def _require_bits(states: Tensor, weight: Weight) -> None:
    """Raises RuntimeError unless the first row has the bits that it has alone."""
    alone, together = (BACKEND.linear(one, weight, None) for one in (states[:1], states))
    if not torch.equal(alone[0], together[0]):
        raise RuntimeError(f"a row has other bits among {len(states)} rows than alone, with {weight.columns} columns")
