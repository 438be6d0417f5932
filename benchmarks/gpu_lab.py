"""Questions to a GPU beside the product's own figures, each a command of its own that ends in a minute.

    python3 benchmarks/gpu_lab.py step          a decode step of 8B, kernel by kernel, and what lies idle between them
    python3 benchmarks/gpu_lab.py prompt        prompts of both models, kernel by kernel
    python3 benchmarks/gpu_lab.py splits        decoding rows cut into fewer splits, or more
    python3 benchmarks/gpu_lab.py products      products of one order beside cuBLAS; bits of a row among others
    python3 benchmarks/gpu_lab.py overlapping   the same, with launches that overlap the kernel before them
    python3 benchmarks/gpu_lab.py exact         steps and a prompt of 8B with these products and with cuBLAS's
    python3 benchmarks/gpu_lab.py dependent     steps of 8B whose launches overlap the kernel before them; their tokens
    python3 benchmarks/gpu_lab.py attention     prompts by candidates beside cuDNN's and the product's own
    python3 benchmarks/gpu_lab.py small_kv      decoding over int8 and fp8 by tile, widened by a cast and by integers
    python3 benchmarks/gpu_lab.py codes         packed products of few rows by codes, beside the product's and cuBLAS
    python3 benchmarks/gpu_lab.py pages         pages to pinned memory with sums of each, beside copies and a product

Needs what benchmarks/gpu.py needs. Prints as it goes.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, mode
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_candidates import attention, small_kv
from benchmarks.gpu_code_times import codes
from benchmarks.gpu_prototypes import (
    NUM_KEYS,
    sum_and_copy,
)
from benchmarks.gpu_timing import time_in_turn
from kernels import tiles
from kernels.backend import KVPages
from kernels.products import dependent_launch, ordered

Work = Callable[[], object]
STEPS = [(1, 1024), (16, 1024), (64, 2048)]
DECODES = [(1, 1024), (1, 8192), (1, 32_768), (16, 1024), (16, 8192), (64, 2048), (128, 1024)]
SPLITS = [(32, 128), (32, 256), (32, 512), (16, 256), (16, 512), (8, 512), (64, 128)]
"""The most splits of a row, and the fewest tokens of one."""
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (28_672, 4096), "down": (4096, 14_336)}
"""Columns and depth."""
MATRIX_SPLITS = {"qkv": (2, 1, 3), "o": (4, 2, 8), "gate up": (1, 2), "down": (8, 4)}
"""The product's splits of the depth, and others: one number for all rows."""
PRODUCT_TILES = {
    16: [(16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 64, 64, 4, 8), (16, 128, 128, 4, 3)],
    64: [
        *((64, 128, 64, 4, 5), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 256, 64, 4, 4)),
        *((64, 64, 64, 4, 6), (64, 64, 128, 4, 3)),
    ],
    128: [(64, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 64, 64, 4, 4)],
    256: [(64, 128, 64, 4, 5), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (256, 128, 64, 8, 3), (128, 256, 64, 8, 3)],
}
"""Candidates by numbers of rows. No loop is split over warps: with one, Triton 3.6's product hung."""
NUM_ROWS = {1: 16, 16: 16, 64: 64, 128: 128, 256: 256}
"""Rows, with their candidates."""
WAYS = {"": (128, 128), "apart": (256, 16)}
"""The most rows whose splits have a program each, and the most whose splits the same launch adds."""
LAUNCHES = {
    "ordinary": (False, 0),
    "dependent": (True, 0),
    "512 places fetched": (True, 512),
    "1,024 places fetched": (True, 1024),
}
"""Whether launches are dependent ones, and what each split of a product has in the cache before it waits."""
NUM_COMPARED = 20
"""Steps whose tokens are compared."""
NUM_BLOCKS, BLOCK_BYTES = 256, 2 << 20
SQUARE = 4096
"""The size of products beside hand-offs."""
NUM_PROGRAMS = (4, 8, 16, 32)
WORKING_SET_BYTES = 1 << 28
NUM_ROUNDS = 15


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 0
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    asked = step, prompt, splits, products, overlapping, exact, dependent, attention, small_kv, codes, pages
    questions = {one.__name__: one for one in asked}
    for name in sys.argv[1:] or questions:
        for line in questions[name]():
            print(line, flush=True)
    return 0


def step() -> Iterator[str]:
    """Times the kernels of decode steps of 8B by their places in a layer."""
    from benchmarks.gpu_engine import LARGE, Load, make_decoder

    model = make_decoder(LARGE)
    for num_seqs, context_len in STEPS:
        load = Load(model, num_seqs * (context_len + 256))
        for _ in range(num_seqs):
            load.add(context_len, 200)
        while load.step()[1] < num_seqs:
            pass
        seconds = median([load.step()[0] for _ in range(30)][10:])
        yield f"8B, {num_seqs} x {context_len}: {seconds * 1e6:.0f} us a step"
        yield from describe_layers(_trace(load.step, 6))
        del load
        torch.cuda.empty_cache()


def prompt() -> Iterator[str]:
    """Times the kernels of prompts as graphs by their places in a layer."""
    from benchmarks.gpu_engine import LARGE, SMALL, Load, compile_all, make_decoder, prepare_prompt, run_prompt

    for shape, lengths in ((SMALL, (128, 2048)), (LARGE, (512, 2048))):
        model = make_decoder(shape)
        compile_all(model)
        for length in lengths:
            load = Load(model, 2 * length + 512)
            run_prompt(load, length)
            prepare_prompt(model, load, length)
            seconds = median(run_prompt(load, length) for _ in range(7))
            yield f"{shape.name}, a prompt of {length}: {seconds * 1e3:.2f} ms"
            yield from describe_layers(_trace(_bind(run_prompt, load, length), 3))
            del load
            torch.cuda.empty_cache()
        del model


def _trace(work: Work, num_times: int) -> list[Mapping[str, Any]]:
    """Repeats a work, and lists what torch's profiler saw."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(num_times):
            work()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[Mapping[str, Any]] = json.loads(Path(file.name).read_text())["traceEvents"]
    return events


def describe_layers(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describes the kernels from one layer's attention to the next one's, and between the attention of two steps."""
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels.sort(key=lambda one: one["ts"])
    places = [place for place, one in enumerate(kernels) if one["name"] == "attend"]
    spans = [kernels[begin : end + 1] for begin, end in pairwise(places)]
    size = mode(len(one) for one in spans)
    layers = [one for one in spans if len(one) == size]
    for place in range(size - 1):
        yield f"  {_describe([one[place : place + 2] for one in layers])}"
    yield f"  a layer: {median(one[-1]['ts'] - one[0]['ts'] for one in layers):.1f} us"
    longer = [one for one in spans if len(one) > size]
    for span in longer[2:3]:
        yield f"  from the last layer of a step to the first of the next: {span[-1]['ts'] - span[0]['ts']:.1f} us"
        for pair in pairwise(span[size - 1 :]):
            yield f"    {_describe([pair])}"


def _describe(pairs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    took = median(first["dur"] for first, _ in pairs)
    idle = median(second["ts"] - first["ts"] - first["dur"] for first, second in pairs)
    return f"{took:7.2f} us, then {idle:5.2f} idle  {pairs[0][0]['name'][:80]}"


def splits() -> Iterator[str]:
    """Times attention of decoding rows whose splits are fewer or more."""
    from benchmarks.gpu_kernels import BYTES_PER_TOKEN, HEAD_DIM, NUM_HEADS, VARIANT, make_pool, make_random
    from kernels.attention import paged
    from kernels.attention.decode import paged_decode_attention

    for num_seqs, context_len in DECODES:
        num_bytes = num_seqs * context_len * BYTES_PER_TOKEN
        layers, tables = make_pool(max(1, min(32, WORKING_SET_BYTES // num_bytes)), num_seqs, context_len)
        query = make_random(num_seqs, NUM_HEADS, HEAD_DIM)
        lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device="cuda")

        def decode(most: int, least: int, layers: Sequence[KVPages], *rows: Tensor) -> None:
            query, tables, lens = rows
            with mock.patch.multiple(paged, MAX_SPLITS=most, MIN_SPLIT_LEN=least):
                for layer in layers:
                    paged_decode_attention(query, layer, tables, lens, VARIANT)

        works = {
            f"{most} of {least}": _bind(decode, most, least, layers, query, tables, lens) for most, least in SPLITS
        }
        seconds = time_in_turn(works)
        each = {name: one / len(layers) for name, one in seconds.items()}
        told = (f"{name}: {one * 1e6:.1f} us, {num_bytes / one / 1e12:.2f} TB/s" for name, one in each.items())
        yield f"{num_seqs} x {context_len}: {'; '.join(told)}"
        del layers, tables, works
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Candidate:
    """A tile and a number of splits of the depth. way: the key of WAYS that says how splits are added."""

    tile: tuple[int, int, int, int, int]
    num_splits: int
    way: str

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.tile))} in {self.num_splits} {self.way}".strip()

    def multiply(self, rows: Tensor, weights: Sequence[Tensor], counters: ordered.Counters) -> Tensor:
        """Multiplies with each of the weights; returns the first product."""

        def split_depth_of(_: int, depth: int) -> int:
            return int(triton.cdiv(triton.cdiv(depth, self.num_splits), ordered.UNIT) * ordered.UNIT)

        most_split, most_counted = WAYS[self.way]
        changed: dict[str, Any] = {"MAX_SPLIT_ROWS": most_split, "MAX_COUNTED_ROWS": most_counted}
        outs = [rows.new_empty(len(rows), len(one)) for one in weights]
        with mock.patch.multiple(ordered, **changed, split_depth_of=split_depth_of):
            for one, out in zip(weights, outs, strict=True):
                ordered.multiply(rows, one, None, None, out, counters, tiles.OrderedTile(*self.tile))
        return outs[0]


def candidates(name: str, num_rows: int) -> list[Candidate]:
    """Lists what is timed for a matrix and a number of rows: few rows, and one split, have one way to add."""
    return [
        Candidate(tile, num_splits, way)
        for num_splits in MATRIX_SPLITS[name]
        for way in WAYS
        for tile in PRODUCT_TILES[NUM_ROWS[num_rows]]
        if not way or (num_splits > 1 and num_rows > WAYS[way][1])
    ]


def overlapping() -> Iterator[str]:
    """Asks `products` with launches that overlap."""
    with mock.patch.object(dependent_launch, "IS_ON", True):
        yield from products()


def products() -> Iterator[str]:
    """Times products of one order beside cuBLAS's, by tile and splits; compares bits among any number of rows."""
    yield from _compile_products()
    counters = ordered.Counters()
    for name, (columns, depth) in MATRICES.items():
        copies = max(2, -(-WORKING_SET_BYTES // (2 * columns * depth)))
        weights = [
            torch.empty(columns, depth, dtype=torch.bfloat16, device="cuda").normal_(std=depth**-0.5)
            for _ in range(copies)
        ]
        states = torch.empty(max(NUM_ROWS), depth, dtype=torch.bfloat16, device="cuda").normal_()
        first: dict[int, Tensor] = {}
        table: dict[int, list[str]] = {}
        for num_rows in NUM_ROWS:
            rows = states[:num_rows].contiguous()
            found = candidates(name, num_rows)
            for one in found:
                out = one.multiply(rows, weights[:1], counters)[:1].clone()
                if not torch.equal(out, first.setdefault(one.num_splits, out)):
                    yield f"{name}, {num_rows} rows: OTHER BITS with {one}"
            works: dict[str, Work] = {str(one): _bind(one.multiply, rows, weights, counters) for one in found}
            works["cuBLAS"] = _bind(_each, weights, F.linear, rows)
            us = {key: one / copies * 1e6 for key, one in time_in_turn(works).items()}
            theirs = us.pop("cuBLAS")
            for num_splits in MATRIX_SPLITS[name]:
                best = min(us[str(one)] for one in found if one.num_splits == num_splits)
                table.setdefault(num_splits, []).append(f"{best:.1f}")
            quickest = sorted(us, key=lambda key: us[key])[:4]
            told = ", ".join(f"{key}: {us[key]:.1f}" for key in dict.fromkeys([str(found[0]), *quickest]))
            yield f"{name}, {num_rows} rows: cuBLAS {theirs:.1f}; {told}"
        for num_splits, best_of_rows in table.items():
            yield f"{name} in {num_splits}, the quickest at {[*NUM_ROWS]} rows: {', '.join(best_of_rows)}"
        del weights
        torch.cuda.empty_cache()


def _compile_products() -> Iterator[str]:
    """Compiles the candidates in children, as a worker compiles its kernels before it is ready."""
    from engine.warm.compiling import Compilers, Launches

    launches, counters = Launches(), ordered.Counters()
    for name, (columns, depth) in MATRICES.items():
        weight = torch.empty(columns, depth, dtype=torch.bfloat16, device="cuda")
        for num_rows in NUM_ROWS:
            rows = torch.empty(num_rows, depth, dtype=torch.bfloat16, device="cuda")
            with launches.noting():
                for one in candidates(name, num_rows):
                    one.multiply(rows, [weight], counters)
    began_s = time.monotonic()
    Compilers().compile([*launches.signatures])
    yield f"{len(launches.signatures)} kernels compiled in {time.monotonic() - began_s:.1f} s"


def dependent() -> Iterator[str]:
    """Times decode steps of 8B with ordinary launches and with dependent ones, and compares their tokens."""
    from benchmarks.gpu_engine import LARGE, Load, compile_all, make_decoder
    from kernels.triton_backend import ExactBackend, TritonBackend

    for backend, chosen in ((ExactBackend(), LAUNCHES), (TritonBackend(), [*LAUNCHES][:2])):
        expected: dict[tuple[int, int], object] = {}
        for name in chosen:
            is_on, fetched = LAUNCHES[name]
            with (
                mock.patch.object(dependent_launch, "IS_ON", is_on),
                mock.patch.object(ordered, "FETCHED_DEPTH", fetched),
            ):
                torch.manual_seed(0)
                model = make_decoder(LARGE, backend)
                compile_all(model)
                for num_seqs, context_len in STEPS:
                    load = Load(model, num_seqs * (context_len + 256))
                    seconds = _time_steps(load, num_seqs, context_len)
                    tokens = [load.core.step().token_ids for _ in range(NUM_COMPARED)]
                    is_same = tokens == expected.setdefault((num_seqs, context_len), tokens)
                    told = "" if is_same else ", OTHER TOKENS"
                    yield f"{backend.name}, {name}, {num_seqs} x {context_len}: {seconds * 1e6:.0f} us a step{told}"
                    del load
                    torch.cuda.empty_cache()
                del model
                torch.cuda.empty_cache()


def _time_steps(load: Any, num_seqs: int, context_len: int) -> float:
    """Starts sequences; returns the median seconds of a step of all of them."""
    for _ in range(num_seqs):
        load.add(context_len, 100)
    while load.step()[1] < num_seqs:
        pass
    seconds: Sequence[float] = [load.step()[0] for _ in range(40)]
    return median(seconds[8:])


def exact() -> Iterator[str]:
    """Times decode steps and a prompt of 8B with products of one order and with cuBLAS's, in turn."""
    from benchmarks.gpu_engine import LARGE, Load, compile_all, make_decoder, run_prompt
    from kernels.triton_backend import ExactBackend, TritonBackend

    models = {}
    for backend in (TritonBackend(), ExactBackend()):
        models[backend.name] = make_decoder(LARGE, backend)
        compile_all(models[backend.name])
    for num_seqs, context_len in STEPS:
        medians = {}
        for name, model in models.items():
            load = Load(model, num_seqs * (context_len + 256))
            medians[name] = _time_steps(load, num_seqs, context_len)
            del load
            torch.cuda.empty_cache()
        library, ours = medians.values()
        told = f"library {library * 1e6:.0f} us, in order {ours * 1e6:.0f} us"
        yield f"8B, a step of {num_seqs} x {context_len}: {told}, {100 * ours / library:.1f} percent"
    for name, model in models.items():
        load = Load(model, 8192)
        yield f"8B, a prompt of 2,048, {name}: {median(run_prompt(load, 2048) for _ in range(5)) * 1e3:.1f} ms"


def _each(weights: Sequence[Tensor], multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> None:
    for one in weights:
        multiply(rows, one)


def pages() -> Iterator[str]:
    """Times hand-offs of pages by copies and by programs, alone and beside products of another stream."""
    words = BLOCK_BYTES // 8
    memory = torch.randint(-(2**62), 2**62, (2 * NUM_BLOCKS, words), device="cuda")
    keys = torch.randint(-(2**31), 2**31 - 1, (NUM_KEYS,), dtype=torch.int32, device="cuda").view(torch.uint32)
    sources = torch.randperm(2 * NUM_BLOCKS, device="cuda")[:NUM_BLOCKS].int()
    targets = torch.arange(NUM_BLOCKS, dtype=torch.int32, device="cuda")
    pinned = torch.zeros(NUM_BLOCKS, words, dtype=torch.int64, pin_memory=True)
    sums = torch.zeros(NUM_BLOCKS, words // 128, 2, dtype=torch.int64, device="cuda")
    places = sources.tolist()

    def launch(num_programs: int, out: Tensor | None, parts: int, chunks: int, num_warps: int) -> None:
        blocks = memory, out, sums, keys, sources, targets, NUM_BLOCKS * parts
        sum_and_copy[(num_programs,)](*blocks, words, parts, chunks, num_warps=num_warps)

    def copy() -> None:
        for slot, place in enumerate(places):
            pinned[slot].copy_(memory[place], non_blocking=True)

    def copy_and_sum() -> None:
        copy()
        launch(NUM_BLOCKS * 8, None, 8, 8, 4)

    works: dict[str, Work] = {
        "one pinned copy": _bind(pinned.copy_, memory[:NUM_BLOCKS], True),
        "256 copies": copy,
        "sums": _bind(launch, NUM_BLOCKS * 8, None, 8, 8, 4),
        "256 copies, then sums": copy_and_sum,
    }
    works |= {f"{one} programs that copy and sum": _bind(launch, one, pinned, 1, 32, 16) for one in NUM_PROGRAMS}
    left, right = (torch.empty(SQUARE, SQUARE, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    side = torch.cuda.Stream()

    def multiply(beside: Work | None) -> None:
        if beside is not None:
            with torch.cuda.stream(side):
                beside()
        for _ in range(40):
            torch.mm(left, right)

    yield f"40 products alone: {_time_alone(_bind(multiply, None)) * 1e3:.2f} ms"
    for name, work in works.items():
        alone = _time_alone(work)
        rate, both = NUM_BLOCKS * BLOCK_BYTES / alone / 1e9, _time_alone(_bind(multiply, work))
        yield f"{name}: {alone * 1e3:.2f} ms, {rate:.1f} GB/s; 40 products beside it {both * 1e3:.2f} ms"


def _time_alone(work: Work) -> float:
    """Median device seconds of a work on the current stream, without a graph."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_ROUNDS + 1)]
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    return median(float(begin.elapsed_time(end)) for begin, end in pairwise(events)) / 1e3


def _bind(work: Callable[..., object], *args: object) -> Work:
    return lambda: work(*args)


if __name__ == "__main__":
    sys.exit(main())
