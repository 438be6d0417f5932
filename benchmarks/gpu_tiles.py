"""Tunes kernels/tiles.toml for the GPU of this machine: each row gets the fastest of the tiles that spill nothing.

    python3 benchmarks/gpu.py --tune

Rows of float32 stay as they are. Other architectures' rows stay, too. A row's candidates are compiled side by side in
child processes before they are timed.
"""

import datetime
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import TritonError

from benchmarks.gpu_kernels import BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, make_pool, make_random
from benchmarks.gpu_products import DEPTH, make_weights, multiply_in_turn
from benchmarks.gpu_timing import time_in_turn
from engine.warm import compiling
from kernels.attention import decode, paged, prompts
from kernels.backend import AttentionVariant, KVPages, Scores
from kernels.cpu.library import NoKernels
from kernels.quantized import products
from kernels.tiles import PRODUCTS, TABLE, Table, Tile, read_table
from kv_store.device_pool import view_pages
from wire.layout import KVLayout

NOTE = (
    "# Tiles: rows, keys of an iteration (of products: columns; in order: columns, depth of an iteration), warps, "
    "stages of loads; of groups keys and tiles loaded ahead. docs/gpu.md says how rows are chosen.\n"
)
NUM_SEQS, CONTEXT_LEN, PROMPT_LEN = 16, 8192, 2048
KEPT = {"plain": None, "sinks": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
"""The dtype of codes by the kinds of attention that are tuned."""
BITS_TO_FORMAT = {4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 8: "Q8_0"}
KIND_TO_ROWS = {"few": 8, "some": 48, "many": 512}
"""The kinds of products that are tuned, and the rows to time them with."""
USUAL_SIZES = (128, 4)
"""Heads of 128, codes of 4 bits."""
COMPILATION_S = 60.0
"""Bound on a candidate's compilation."""
SHAPES = {
    "decode": [Tile(16, *one) for one in product((32, 64, 128), (2, 4, 8), (1, 2, 3))],
    "prompts": [Tile(*one) for one in product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3))],
}
"""The candidates of a role of attention."""
SHAPES_OF_PRODUCTS = list(product((64, 128), (4, 8), (2, 3, 4, 5)))
"""Columns, warps and stages of candidates: with fewer columns or warps a tile would have another matrix instruction."""


@dataclass(frozen=True)
class Row:
    """A row of the table; of products `size` is bits of codes, else the size of heads."""

    role: str
    kind: str
    size: int


@dataclass(frozen=True)
class Trial:
    """A tile's run: its median seconds, infinite if it did not start, and the registers that it spilled."""

    tile: Tile
    seconds: float = math.inf
    spilled: int = 0


Try = Callable[[Row, Sequence[Tile]], list[Trial]]
"""Times a row's tiles; its trials are in their order."""
Timed = dict[str, str]
"""The device and the date of the times that chose a row's tiles, by its architecture, role and kind."""


def choose_fastest(trials: list[Trial], present: Tile) -> Tile:
    """Returns the tile of the fastest trial without spills; the present one where there is none."""
    sound = [one for one in trials if not one.spilled and math.isfinite(one.seconds)]
    return min(sound, key=lambda one: one.seconds).tile if sound else present


def tune(table: Table, architecture: str, try_tiles: Try) -> Iterator[tuple[Row, Tile, Tile, list[Trial]]]:
    """Replaces an architecture's rows of the table, one after another, the most used ones first.

    Yields each with its tiles before and after, and its trials.
    """
    for row in rows_of(table, architecture):
        sizes = table[architecture][row.role][row.kind]
        before = Tile(*sizes[str(row.size)])
        trials = try_tiles(row, candidates(row.role, before))
        after = choose_fastest(trials, before)
        sizes[str(row.size)] = [after.rows, after.width, after.num_warps, after.num_stages]
        yield row, before, after, trials


def rows_of(table: Table, architecture: str) -> list[Row]:
    """Lists the rows that are tuned, usual sizes of heads and codes first."""
    rows = [
        Row(role, kind, int(size))
        for role, kinds in table[architecture].items()
        for kind, sizes in kinds.items()
        for size in sizes
        if kind in (KIND_TO_ROWS if role == PRODUCTS else KEPT)
    ]
    return sorted(rows, key=lambda row: row.size not in USUAL_SIZES)


def candidates(role: str, present: Tile) -> list[Tile]:
    """Lists the tiles to try, the present one first, so that it stays where others are no faster.

    Products keep their rows, by which a launch chooses among their kinds.
    """
    shapes = [Tile(present.rows, *one) for one in SHAPES_OF_PRODUCTS] if role == PRODUCTS else SHAPES[role]
    return [present, *(one for one in shapes if one != present)]


def read_timed(path: Path = TABLE) -> Timed:
    """Reads the comments behind rows of the table."""
    timed, section = Timed(), ""
    for line in path.read_text().splitlines():
        if found := re.fullmatch(r"\[(.+)\]|(\w+) = [^#]*# (.*)", line):
            section = found[1] or section
            if found[2]:
                timed[f"{section}.{found[2]}"] = found[3]
    return timed


def format_table(table: Table, timed: Timed) -> str:
    """Formats a table as kernels/tiles.toml: one line a kind, a tile for each size of heads, and what timed it."""
    lines = [NOTE]
    for architecture, roles in table.items():
        for role, kinds in roles.items():
            lines.append(f"\n[{architecture}.{role}]\n")
            for kind, heads in kinds.items():
                tiles = ", ".join(f"{head_dim} = {numbers}" for head_dim, numbers in heads.items())
                note = timed.get(f"{architecture}.{role}.{kind}")
                lines.append(f"{kind} = {{ {tiles} }}{f'  # {note}' if note else ''}\n")
    return "".join(lines)


def write_tuned(architecture: str, try_tiles: Try, device: str, path: Path = TABLE, listed: Path | None = None) -> None:
    """Tunes an architecture's rows and writes the table after each, so that an interrupted run keeps what it found.

    device: its name, which rows get with the date. listed: a file for the rows found, with their times.
    """
    table, timed = read_table(path), read_timed(path)
    for row, before, after, trials in tune(table, architecture, try_tiles):
        timed[f"{architecture}.{row.role}.{row.kind}"] = f"{device}, {datetime.datetime.now(datetime.UTC).date()}"
        path.write_text(format_table(table, timed))
        line = describe(architecture, row, before, after, trials, device)
        print(line, flush=True)
        if listed is not None:
            with listed.open("a") as lines:
                lines.write(f"{line}\n")


def describe(architecture: str, row: Row, before: Tile, after: Tile, trials: Sequence[Trial], device: str) -> str:
    """Formats what was found of a row: its tile, device and date, the time, and that of the tile before."""
    seconds = {one.tile: one.seconds for one in trials}
    numbers = [[one.rows, one.width, one.num_warps, one.num_stages] for one in (after, before)]
    day = datetime.datetime.now(datetime.UTC).date()
    place = f"[{architecture}.{row.role}] {row.kind} = {{ {row.size} = {numbers[0]} }}  # {device}, {day}"
    times = [f"{seconds.get(one, math.inf) * 1e6:.1f} us" for one in (after, before)]
    return f"{place}; {times[0]}, before {numbers[1]} {times[1]}, of {len(trials)}"


class Spills:
    """A kernel, with the registers that its launches spilled: the compiler's count for this device."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.most = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None:
            self.most = max(self.most, self._kernel[grid](*args, **kwargs).n_spills)

        return launch


def try_on_device(row: Row, tiles: Sequence[Tile]) -> list[Trial]:
    """Times tiles on the current GPU, where some may fail to compile or fit, and so not start."""
    work = make_work(row)
    compile_all(note_launches(row, work, tiles))
    return [_try(row, tile, work) for tile in tiles]


def note_launches(row: Row, work: Callable[[], object], tiles: Sequence[Tile]) -> list[compiling.Signature]:
    """Lists what the work launches with each of the tiles, without launching it."""
    launches = compiling.Launches()
    for tile in tiles:
        with launches.noting(), using(row, tile):
            work()
    return [*launches.signatures]


def compile_all(signatures: Sequence[compiling.Signature]) -> None:
    """Compiles kernels side by side, as far as they compile."""

    def compile_one(signature: compiling.Signature) -> None:
        with suppress(NoKernels):
            compiling.Compilers(num_children=1, deadline_s=COMPILATION_S).compile([signature])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as children:
        list(children.map(compile_one, signatures))


def using(row: Row, tile: Tile) -> AbstractContextManager[object]:
    """Lets launches of a row have a tile, whatever the table says."""
    chooser = {PRODUCTS: products, "decode": decode}.get(row.role, prompts)
    choice = "choose_product_tile" if row.role == PRODUCTS else "choose_tile"
    return mock.patch.object(chooser, choice, return_value=tile)


@contextmanager
def counting_spills(row: Row) -> Iterator[Spills]:
    """Counts the registers that launches of a row's kernel spill."""
    module, kernel = (products, "multiply") if row.role == PRODUCTS else (paged, "attend")
    spills = Spills(getattr(module, kernel))
    with mock.patch.object(module, kernel, spills):
        yield spills


def _try(row: Row, tile: Tile, work: Callable[[], object]) -> Trial:
    with counting_spills(row) as spills, using(row, tile):
        try:
            seconds = time_in_turn({"work": work})["work"]
        except TritonError:
            return Trial(tile)
    return Trial(tile, seconds, spills.most)


def make_work(row: Row) -> Callable[[], object]:
    """Makes the launches of a row: 16 sequences of 8192 tokens that decode, 4 prompts of 2048, or products."""
    if row.role == PRODUCTS:
        weights = make_weights(BITS_TO_FORMAT[row.size], DEPTH, DEPTH)
        return multiply_in_turn(make_random(KIND_TO_ROWS[row.kind], DEPTH), weights)
    scores = Scores(50.0, torch.zeros(NUM_HEADS, device="cuda")) if row.kind == "sinks" else Scores()
    variant = AttentionVariant(row.size**-0.5, scores=scores)
    is_decode = row.role == "decode"
    num_seqs, length = (NUM_SEQS, CONTEXT_LEN) if is_decode else (NUM_SEQS // 4, PROMPT_LEN)
    (pages,), tables = make_pool(1, num_seqs, length, None if row.kind == "int4" else KEPT[row.kind], row.size)
    pages = make_int4_pages(len(pages.data), row.size) if row.kind == "int4" else pages
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
    if is_decode:
        query = make_random(num_seqs, NUM_HEADS, row.size)
        return lambda: decode.paged_decode_attention(query, pages, tables, lens, variant)
    query = make_random(num_seqs * length, NUM_HEADS, row.size)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
    return lambda: prompts.paged_prefill_attention(query, pages, tables, lens, starts, variant)


def make_int4_pages(num_pages: int, head_dim: int) -> KVPages:
    """Makes a layer of pages of random codes and small scales, all of whose sequences share one open block."""
    layout = KVLayout(1, NUM_KV_HEADS, head_dim, BLOCK_SIZE, "bfloat16", "int4")
    memory = torch.randint(60, (num_pages, layout.payload_bytes), dtype=torch.uint8, device="cuda")
    return view_pages(memory, layout, 1).layer(0)
