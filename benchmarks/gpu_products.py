"""Products with packed weights at the sizes of Llama 3 8B, against reading or a product, and against torch in bfloat16.

As many copies of a matrix take turns as it needs to leave the cache. A row's bits are compared beside the times: among
few rows and among many, at these sizes.

    python3 benchmarks/gpu_products.py [before]     tiles beside each other, a minute

`before` is a folder with another commit's kernels/quantized/products.py, whose kernel is timed beside (in the layout of
tables until November 2026: git archive 5b550633 kernels | tar x -C before). Each format has a process of its own.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_kernels import HIDDEN, MLP, WORKING_SET_BYTES, Ceilings, make_random
from benchmarks.gpu_timing import Row, time_in_turn
from kernels.backend import Weight
from kernels.quantized import products
from kernels.quantized.device_layout import CodedWeight
from kernels.tiles import Tile
from kernels.triton_backend import ExactBackend, TritonBackend
from tests.kernels.quantized_matrices import DRAWS

DEPTH = HIDDEN
FORMATS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "FP8 of blocks")
MATRICES = {"o": (HIDDEN, HIDDEN), "gate up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
"""Columns and depth."""
NUM_ROWS = (1, 16, 64, 2048)
MAX_COPIES = 32
BACKEND, IN_REGISTERS = TritonBackend(), ExactBackend()
"""The second widens in registers for any number of rows."""

COMPARED = ("Q4_K", "Q6_K", "Q8_0")
OF_A_LAYER = {"qkv": (HIDDEN + HIDDEN // 2, HIDDEN), **MATRICES}
FEW = [(16, 64, 4, 4), (16, 64, 4, 5), (16, 128, 4, 4), (16, 128, 8, 4)]
SOME = [(64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3)]
ROWS_TO_TILES = {1: FEW, 16: FEW, 64: SOME, 2048: [(128, 128, 8, 2), (128, 128, 8, 3)]}
"""Candidates; tests/kernels/compile_for.py compiles them without a device."""
SPLITS = [(512, 1024), (512, 512)]
"""Wanted programs and least depths of a split, beside the constants of `products`; for few rows."""
PANEL_BYTES = [32 << 20, 64 << 20, 256 << 20]
"""Widened weights of panels, to multiply by torch: their sums have another order, so that bits differ."""
MAX_FEW_ROWS = 16
COMPILATION_S, COMPARISON_S = 60, 40
NUM_COMPILERS = 4
"""Processes of each format that compile at first."""

Works = Mapping[str, Callable[[], object]]


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
    alone, together = (IN_REGISTERS.linear(one, weight, None) for one in (states[:1], states))
    if not torch.equal(alone[0], together[0]):
        raise RuntimeError(f"a row has other bits among {len(states)} rows than alone, with {weight.columns} columns")


def compare(form: str, before: str) -> Iterator[str]:
    """Times tiles of a format beside cuBLAS in bfloat16 and an earlier kernel, and compares the first row's bits."""
    totals: dict[tuple[int, str], float] = {}
    earlier = _load_products(before) if before else None
    for name, (columns, depth) in OF_A_LAYER.items():
        weights = make_weights(form, columns, depth)
        plain = make_random(min(MAX_COPIES, -(-WORKING_SET_BYTES // (2 * columns * depth))), columns, depth)
        all_states = make_random(max(NUM_ROWS), depth)
        alone = IN_REGISTERS.linear(all_states[:1], weights[0], None)[0]
        yield f"{form} {name}: {weights[0].data.nbytes / 1e6:.1f} MB; {_check(form, weights[0], all_states[:16])}"
        for num_rows in NUM_ROWS:
            states = all_states[:num_rows]
            works = _works_of(states, weights, earlier)
            for key in list(works):
                try:
                    if not torch.equal(works[key](weights[0])[0], alone):
                        yield f"  {num_rows} rows, {key}: OTHER BITS"
                except Exception as error:
                    yield f"  {num_rows} rows, {key}: {error!r:.200}"
                    del works[key]
            runs: dict[str, Callable[[], object]] = {key: _each(work, weights) for key, work in works.items()}
            runs["cuBLAS"] = _each(partial(F.linear, states), plain)
            seconds = {key: one / len(plain if key == "cuBLAS" else weights) for key, one in time_in_turn(runs).items()}
            for key, one in seconds.items():
                totals[num_rows, key] = totals.get((num_rows, key), 0.0) + one
            yield f"  {num_rows} rows, us: " + "; ".join(f"{key} {one * 1e6:.1f}" for key, one in seconds.items())
        del weights, plain
        torch.cuda.empty_cache()
    for num_rows in NUM_ROWS:
        own = {key: one for (rows, key), one in totals.items() if rows == num_rows}
        peer = own.pop("cuBLAS")
        told = (f"{key} {peer / one:.2f}" for key, one in sorted(own.items(), key=lambda item: item[1]))
        yield f"{form}, all four over cuBLAS ({peer * 1e6:.0f} us), {num_rows} rows: " + "; ".join(told)


def _works_of(states: Tensor, weights: Sequence[Weight], earlier: Any) -> dict[str, Callable[[Weight], Tensor]]:
    """Makes a product for each candidate, by its name."""

    def by_tile(tile: Tile, **constants: object) -> Callable[[Weight], Tensor]:
        changes: dict[str, Any] = {"choose_product_tile": lambda *_: tile, **constants}

        def run(weight: Weight) -> Tensor:
            with mock.patch.multiple(products, **changes):
                return IN_REGISTERS.linear(states, weight, None)

        return run

    works: dict[str, Callable[[Weight], Tensor]] = {"the table's": lambda one: IN_REGISTERS.linear(states, one, None)}
    tiles = [Tile(*one) for one in ROWS_TO_TILES[len(states)]]
    works |= {_name_of(one): by_tile(one) for one in tiles}
    if len(states) <= MAX_FEW_ROWS:
        works |= {
            f"{wanted} programs, {least} deep": by_tile(tiles[0], WANTED_PROGRAMS=wanted, MIN_SPLIT_DEPTH=least)
            for wanted, least in SPLITS
        }
    if len(states) > MAX_FEW_ROWS:
        works |= {f"widened {one >> 20} MiB at a time, then torch's": _by_panels(states, one) for one in PANEL_BYTES}
    if earlier is not None:
        in_old_layout = {id(one): _with_old_tables(one) for one in weights if isinstance(one, CodedWeight)}
        out = states.new_empty(len(states), weights[0].columns)
        works["before"] = lambda one: earlier.linear(states, in_old_layout[id(one)], None, None, out)
    return works


def _by_panels(states: Tensor, num_bytes: int) -> Callable[[Weight], Tensor]:
    """Makes products that widen a matrix once, as many columns at a time as fit in a number of bytes."""

    def run(weight: Weight) -> Tensor:
        assert isinstance(weight, CodedWeight)
        [part] = weight.parts
        out = states.new_empty(len(states), weight.columns)
        size = num_bytes // (2 * weight.depth) // 128 * 128
        for first in range(0, weight.columns, size):
            panel = states.new_empty(min(size, weight.columns - first), weight.depth)
            products.widen_columns(part, first, panel)
            torch.mm(states, panel.T, out=out[:, first : first + size])
        return out

    return run


def _name_of(tile: Tile) -> str:
    return f"{tile.rows} x {tile.width}, {tile.num_warps} warps, {tile.num_stages} stages"


def _each(work: Callable[[Any], object], weights: Sequence[Weight] | Tensor) -> Callable[[], None]:
    def run() -> None:
        for one in weights:
            work(one)

    return run


def _check(form: str, weight: Weight, states: Tensor) -> str:
    """Says whether the first columns are widened bit by bit, and how far a product is from that with them."""
    torch.manual_seed(0)
    matrix = DRAWS[form](64, 512).to(states.device)
    own = BACKEND.pack_codes([matrix], torch.bfloat16)
    widened = BACKEND.embed(torch.arange(64, device=states.device), own)
    is_equal = torch.equal(widened, matrix.dequantize().bfloat16())
    plain = BACKEND.embed(torch.arange(256, device=states.device), weight)
    product, expected = IN_REGISTERS.linear(states, weight, None)[:, :256].double(), states.double() @ plain.double().T
    off = (product - expected).abs().max() / expected.abs().max()
    return f"widened {'bit by bit' if is_equal else 'OTHERWISE'}, a product off by {off:.1e}"


def _load_products(folder: str) -> Any:
    path = Path(folder) / "kernels/quantized/products.py"
    spec = importlib.util.spec_from_file_location("earlier_products", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _with_old_tables(weight: CodedWeight) -> CodedWeight:
    """Views codes as 16 bits for each place, and rests as bytes."""

    def changed(part: Any) -> Any:
        codes, rest = part.tables.codes, part.tables.rest
        old = replace(part.tables, codes=codes.view(torch.int16), rest=None if rest is None else rest.view(torch.uint8))
        return replace(part, tables=old)

    return replace(weight, parts=tuple(changed(one) for one in weight.parts))


def _compile(form: str, share: int, before: str) -> None:
    """Runs a share of a format's candidates once, so that the compiler's cache has them."""
    cases = 0
    for name in ("o", "gate up"):
        weights = make_weights(form, *OF_A_LAYER[name])[:1]
        for num_rows in NUM_ROWS:
            works = _works_of(
                make_random(num_rows, OF_A_LAYER[name][1]), weights, _load_products(before) if before else None
            )
            for key, work in works.items():
                cases += 1
                if cases % NUM_COMPILERS == share:
                    try:
                        work(weights[0])
                    except Exception as error:
                        print(f"{form}, {num_rows} rows, {key}: {error!r:.200}", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    if "--compile" in sys.argv:
        _, _, form, share, before = sys.argv
        _compile(form, int(share), before)
        return 0
    if "--compare" in sys.argv:
        _, _, form, before = sys.argv
        for line in compare(form, before):
            print(line, flush=True)
        return 0
    before = sys.argv[1] if len(sys.argv) > 1 else ""
    own = [sys.executable, __file__]
    children = [
        subprocess.Popen([*own, "--compile", form, str(share), before])
        for form in COMPARED
        for share in range(NUM_COMPILERS)
    ]
    for child in children:
        _wait(child, COMPILATION_S)
    for form in COMPARED:
        _wait(subprocess.Popen([*own, "--compare", form, before]), COMPARISON_S)
    return 0


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        print(f"{child.args!r}: not done in {limit_s} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
