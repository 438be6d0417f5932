"""Questions to a GPU beside the product's own figures, each a command of its own that ends in a minute.

    python3 benchmarks/gpu_lab.py step          a decode step of 8B, kernel by kernel, and what lies idle between them
    python3 benchmarks/gpu_lab.py prompt        prompts of both models, kernel by kernel
    python3 benchmarks/gpu_lab.py splits        decoding rows cut into fewer splits, or more
    python3 benchmarks/gpu_lab.py products      products of one order beside cuBLAS; bits of a row among others
    python3 benchmarks/gpu_lab.py exact         steps and a prompt of 8B with these products and with cuBLAS's
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
from benchmarks.gpu_prototypes import NUM_KEYS, sum_and_copy
from benchmarks.gpu_timing import time_in_turn
from kernels import tiles
from kernels.backend import KVPages
from kernels.products import dependent_launch, ordered

Work = Callable[[], object]
ATTENTION = ("attend", "attend_in_groups")
"""The names of attention's kernels."""
STEPS = [(1, 1024), (16, 1024), (64, 2048)]
DECODES = [(1, 1024), (1, 8192), (1, 32_768), (16, 1024), (16, 8192), (64, 2048), (128, 1024)]
SPLITS = [(32, 128), (32, 256), (32, 512), (16, 256), (16, 512), (8, 512), (64, 128)]
"""The most splits of a row, and the fewest tokens of one."""
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (28_672, 4096), "down": (4096, 14_336)}
"""Columns and depth."""
PRODUCT_TILES = {
    16: [(16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 128, 128, 4, 3)],
    64: [(64, 64, 128, 4, 3), (64, 128, 64, 4, 5), (64, 256, 64, 4, 4), (64, 64, 64, 4, 6)],
    128: [(64, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3)],
    256: [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 5), (128, 256, 64, 8, 3)],
    2048: [(128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4)],
}
"""Candidates by numbers of rows. No loop is split over warps: with one, Triton 3.6's product hung."""
NUM_ROWS = {1: 16, 16: 16, 64: 64, 128: 128, 256: 256, 2048: 2048}
"""Rows, with their candidates."""
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
    asked = step, prompt, splits, products, exact, attention, small_kv, codes, pages
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
    places = [place for place, one in enumerate(kernels) if one["name"] in ATTENTION]
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


def products() -> Iterator[str]:
    """Times products of one order beside cuBLAS's, compares bits among any number of rows, then steps of 8B."""
    yield from _compile_products()
    totals = dict.fromkeys(NUM_ROWS, (0.0, 0.0))
    counters = ordered.Counters()
    for name, (columns, depth) in MATRICES.items():
        copies = max(2, -(-WORKING_SET_BYTES // (2 * columns * depth)))
        weights = [
            torch.empty(columns, depth, dtype=torch.bfloat16, device="cuda").normal_(std=depth**-0.5)
            for _ in range(copies)
        ]
        states = torch.empty(max(NUM_ROWS), depth, dtype=torch.bfloat16, device="cuda").normal_()
        first: Tensor | None = None
        for num_rows, kind in NUM_ROWS.items():
            rows = states[:num_rows].contiguous()
            works: dict[str, Work] = {"cuBLAS": _bind(_each, weights, F.linear, rows)}
            for numbers in PRODUCT_TILES[kind]:
                work = _bind(_multiply, rows, weights, counters, tiles.OrderedTile(*numbers))
                out = work()
                assert isinstance(out, Tensor)
                first = out[:1].clone() if first is None else first
                if not torch.equal(out[:1], first):
                    yield f"{name}, {num_rows} rows: OTHER BITS with {numbers}"
                works[str(numbers)] = work
            seconds = {key: one / copies for key, one in time_in_turn(works).items()}
            told = ", ".join(f"{key} {one * 1e6:.1f}" for key, one in seconds.items())
            theirs = seconds.pop("cuBLAS")
            before = totals[num_rows]
            totals[num_rows] = before[0] + min(seconds.values()), before[1] + theirs
            yield f"{name}, {num_rows} rows: {theirs / min(seconds.values()):.2f} of {told}"
        del weights
        torch.cuda.empty_cache()
    for num_rows, (ours, theirs) in totals.items():
        yield f"all four, {num_rows} rows: {ours * 1e6:.1f} us, cuBLAS {theirs * 1e6:.1f}: {theirs / ours:.2f}"


def _compile_products() -> Iterator[str]:
    """Compiles the candidates in children, as a worker compiles its kernels before it is ready."""
    from engine.warm.compiling import Compilers, Launches

    launches, counters = Launches(), ordered.Counters()
    for columns, depth in MATRICES.values():
        weight = torch.empty(columns, depth, dtype=torch.bfloat16, device="cuda")
        for num_rows, kind in NUM_ROWS.items():
            rows = torch.empty(num_rows, depth, dtype=torch.bfloat16, device="cuda")
            with launches.noting():
                for numbers in PRODUCT_TILES[kind]:
                    _multiply(rows, [weight], counters, tiles.OrderedTile(*numbers))
    began_s = time.monotonic()
    Compilers().compile([*launches.signatures])
    yield f"{len(launches.signatures)} kernels compiled in {time.monotonic() - began_s:.1f} s"


def exact() -> Iterator[str]:
    """Times decode steps and a prompt of 8B with products of one order and with cuBLAS's, in turn.

    Also with ordinary launches in place of ones that overlap the kernel before them, which give the same tokens.
    """
    from benchmarks.gpu_engine import LARGE, Load, compile_all, make_decoder, run_prompt
    from kernels.triton_backend import ExactBackend, TritonBackend

    models = {}
    for name, backend, overlaps in (
        ("library", TritonBackend(), True),
        ("library, ordinary launches", TritonBackend(), False),
        ("in order", ExactBackend(), True),
    ):
        torch.manual_seed(0)
        with mock.patch.object(dependent_launch, "IS_ON", overlaps):
            models[name] = make_decoder(LARGE, backend), overlaps
            compile_all(models[name][0])
    for num_seqs, context_len in STEPS:
        us, tokens = {}, {}
        for name, (model, overlaps) in models.items():
            torch.manual_seed(0)
            with mock.patch.object(dependent_launch, "IS_ON", overlaps):
                load = Load(model, num_seqs * (context_len + 256))
                for _ in range(num_seqs):
                    load.add(context_len, 100)
                while load.step()[1] < num_seqs:
                    pass
                us[name] = 1e6 * median([load.step()[0] for _ in range(40)][8:])
                tokens[name] = load.core.step().token_ids
            del load
            torch.cuda.empty_cache()
        told = ", ".join(f"{name} {one:.0f} us" for name, one in us.items())
        are_same = tokens["library"] == tokens["library, ordinary launches"]
        percent = 100 * us["in order"] / us["library"]
        yield f"8B, {num_seqs} x {context_len}: {told}: {percent:.1f} percent{'' if are_same else ', OTHER TOKENS'}"
    for name, (model, overlaps) in models.items():
        with mock.patch.object(dependent_launch, "IS_ON", overlaps):
            load = Load(model, 8192)
            yield f"8B, a prompt of 2,048, {name}: {median(run_prompt(load, 2048) for _ in range(5)) * 1e3:.1f} ms"


def _each(weights: Sequence[Tensor], multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> None:
    for one in weights:
        multiply(rows, one)


def _multiply(rows: Tensor, weights: Sequence[Tensor], counters: ordered.Counters, tile: tiles.OrderedTile) -> Tensor:
    """Multiplies with each of the weights; returns the first product."""
    outs = [rows.new_empty(len(rows), len(one)) for one in weights]
    for one, out in zip(weights, outs, strict=True):
        ordered.multiply(rows, one, None, None, out, counters, tile)
    return outs[0]


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
