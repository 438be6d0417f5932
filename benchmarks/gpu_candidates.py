"""Candidates for kernels of attention, each in a process of its own: a kernel that hangs takes no other along.

All processes prepare and compile at once, and then measure one after another. benchmarks/gpu_lab.py asks them.
"""

import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.jit import JITFunction

from benchmarks.gpu_kernels import (
    BYTES_PER_TOKEN,
    HEAD_DIM,
    NUM_HEADS,
    VARIANT,
    make_pool,
    make_random,
)
from benchmarks.gpu_timing import time_in_turn
from kernels.attention import decode, paged, prompts
from kernels.attention.decode import paged_decode_attention
from kernels.attention.prompts import paged_prefill_attention
from kernels.backend import KVPages
from kernels.tiles import GroupTile, Tile

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "benchmarks.gpu_candidates"]
PREPARING_S, MEASURING_S, ENDING_S = 40.0, 10.0, 5.0
WORKING_SET_BYTES = 1 << 28
PROMPTS = [(333, 1000), (0, 2048), (0, 8192), (8192, 2048)]
"""Tokens before a prompt, and of it."""
GROUP_TILES = {
    f"groups of {keys} keys, {slots} slots": GroupTile(keys, slots) for keys, slots in ((128, 2), (128, 3), (64, 4))
}
PAGED, CUDNN = "paged", "cuDNN"
DECODES = [(16, 8192), (64, 2048)]
DECODE_TILES = ["16 128 4 1", "16 64 4 1", "16 64 2 1", "16 32 4 1", "16 32 2 1", "16 64 2 2", "16 64 2 3", "16 64 4 2"]
DECODE_TILES += ["16 64 4 3", "16 32 4 2", "16 128 4 2", "16 128 8 1"]
"""Rows, keys, warps and stages; two warps spill with 128 keys."""
BFLOAT16 = "bfloat16"
KEPT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
Attend = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The queries of a prompt behind a number of tokens, with all keys and values in contiguous memory and in pages.

    seen: a mask for torch, None for a causal one.
    """

    num_before: int
    query: Tensor
    key: Tensor
    value: Tensor
    pages: KVPages
    tables: Tensor
    lens: Tensor
    starts: Tensor
    seen: Tensor | None

    @property
    def num_operations(self) -> int:
        """Two products, of each query head with the keys that it sees."""
        num_rows = len(self.query)
        return 4 * NUM_HEADS * HEAD_DIM * (num_rows * self.num_before + num_rows * (num_rows + 1) // 2)

    def __str__(self) -> str:
        return f"{len(self.query)} behind {self.num_before}" if self.num_before else str(len(self.query))


def attention() -> Iterator[str]:
    """Times attention of prompts by each candidate, launched and as a graph, and compares it with cuDNN's."""
    yield from ask_in_turn([*COMMAND, "attention"], [*GROUP_TILES, PAGED, CUDNN])


def small_kv() -> Iterator[str]:
    """Times decoding over pages of 8 bits by tile, with codes widened by a cast and by integers."""
    yield from ask_in_turn([*COMMAND, "small_kv"], [BFLOAT16, *DECODE_TILES])


def ask_in_turn(command: Sequence[str], candidates: Sequence[str], measuring_s: float = MEASURING_S) -> Iterator[str]:
    """Starts a process for each candidate, waits until all are prepared, and lets them measure one after another.

    A process says that it is prepared by a line, and measures once it is given one.
    """
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    asked = {one: subprocess.Popen([*command, one], cwd=ROOT, text=True, **pipes) for one in candidates}
    deadline = monotonic() + PREPARING_S
    for process in asked.values():
        assert process.stdout is not None
        if select.select([process.stdout], [], [], max(0.0, deadline - monotonic()))[0]:
            process.stdout.readline()
    for candidate, process in asked.items():
        try:
            out, errors = process.communicate("measure\n", timeout=measuring_s)
        except subprocess.TimeoutExpired:
            process.kill()
            yield f"{candidate}: DID NOT END in {measuring_s:.0f} s{_end(process)}"
            continue
        yield from (f"{line}  {candidate}" for line in out.splitlines())
        if process.returncode:
            yield f"{candidate}: FAILED with {process.returncode}: {' | '.join(errors.splitlines()[-3:])}"


def _end(process: "subprocess.Popen[str]") -> str:
    try:
        process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        return ", nor when it was killed"
    return ""


@contextmanager
def compiling() -> Iterator[None]:
    """Compiles what is launched within, and runs none of Triton's kernels."""
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    with mock.patch.object(JITFunction, "run", compile_only):
        yield


def measure_prompts(candidate: str) -> Iterator[str]:
    """Yields first once all is compiled, then a line for each prompt."""
    drawn = [make_prompt(*one) for one in PROMPTS]
    works = [choose_prompt_work(candidate, prompt) for prompt in drawn]
    with compiling():
        for work in works:
            work()
    yield "ready"
    for prompt, work in zip(drawn, works, strict=True):
        peer = SDPBackend.MATH if prompt.num_before else SDPBackend.CUDNN_ATTENTION
        expected, first, second = attend_by_torch(prompt, peer).float(), work(), work()
        off, is_same = float((first.float() - expected).abs().max()), torch.equal(first, second)
        yield f"{prompt}: off by {off:.1e}{'' if is_same else ', NOT TWICE THE SAME'}"
        for way, seconds in (("launched", time_launches(work)), ("as a graph", time_graph(work))):
            yield f"{prompt}: {seconds * 1e6:.1f} us, {prompt.num_operations / seconds / 1e12:.0f} TFLOP/s {way}"


def choose_prompt_work(candidate: str, prompt: Prompt) -> Attend:
    """Binds what a candidate launches for a prompt."""
    if candidate == CUDNN:
        return lambda: attend_by_torch(prompt, SDPBackend.CUDNN_ATTENTION)

    def attend() -> Tensor:
        with mock.patch.object(prompts, "choose_group_tile", return_value=GROUP_TILES.get(candidate)):
            tables = prompt.tables, prompt.lens, prompt.starts
            return paged_prefill_attention(prompt.query, prompt.pages, *tables, VARIANT)

    return attend


def make_prompt(num_before: int, num_rows: int) -> Prompt:
    """Makes a prompt of random numbers, whose pages hold its keys and values."""
    end = num_before + num_rows
    (pages,), tables = make_pool(1, 1, end)
    key, value = join_pages(pages.data[tables[0].long()], end)
    seen = torch.ones(num_rows, end, dtype=torch.bool, device="cuda").tril(num_before) if num_before else None
    lens, starts = (torch.tensor(one, dtype=torch.int32, device="cuda") for one in ([end], [0, num_rows]))
    return Prompt(
        num_before=num_before,
        query=make_random(num_rows, NUM_HEADS, HEAD_DIM),
        key=key,
        value=value,
        pages=pages,
        tables=tables,
        lens=lens,
        starts=starts,
        seen=seen,
    )


def join_pages(pages: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Copies the keys and values of pages [num_pages, 2, heads, block_size, head_dim], the last perhaps not full."""
    key, value = (plane.transpose(1, 2).flatten(0, 1)[:num_tokens].contiguous() for plane in pages.unbind(1))
    return key, value


def attend_by_torch(prompt: Prompt, backend: SDPBackend) -> Tensor:
    """Attends with a kernel of torch's, behind a prefix with a mask."""
    query, key, value = (one[None].transpose(1, 2) for one in (prompt.query, prompt.key, prompt.value))
    seen = prompt.seen
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )
    return attended[0].transpose(0, 1)


def measure_decoding(candidate: str) -> Iterator[str]:
    """Yields first once all is compiled, then a line for each batch, dtype of codes, and way to widen them."""
    if candidate == BFLOAT16:
        batches = [(shape, BFLOAT16, make_batch(*shape, None)) for shape in DECODES]
    else:
        batches = [(shape, name, make_batch(*shape, kept)) for shape in DECODES for name, kept in KEPT.items()]
        tile = Tile(*map(int, candidate.split()))
        mock.patch.object(decode, "choose_tile", return_value=tile).start()
    ways = (False,) if candidate == BFLOAT16 else (False, True)
    for by_integers in ways:
        with compiling(), mock.patch.object(paged, "widens_by_integers", return_value=by_integers):
            for *_, works in batches[-len(KEPT) :]:
                works[0]()
    yield "ready"
    for shape, name, works in batches:
        results = []
        for by_integers in ways:
            with mock.patch.object(paged, "widens_by_integers", return_value=by_integers):
                seconds = time_graph(partial(run_all, works)) / len(works)
                results.append(works[0]())
                spilled = spills_of(works[0])
            told = ", by integers" * by_integers + f", {spilled} spilled" * (spilled > 0)
            yield f"{shape[0]} x {shape[1]}, {name}: {seconds * 1e6:.1f} us{told}"
        off, most = float((results[-1] - results[0]).abs().max()), float(results[0].abs().max())
        if off:
            yield f"{shape[0]} x {shape[1]}, {name}: by integers off by {off:.1e} of {most:.1e}"


def make_batch(num_seqs: int, context_len: int, kept: torch.dtype | None) -> list[Attend]:
    """Makes decoding rows over layers that leave the cache, and binds a launch for each layer."""
    num_layers = max(1, min(8, WORKING_SET_BYTES // (num_seqs * context_len * BYTES_PER_TOKEN)))
    layers, tables = make_pool(num_layers, num_seqs, context_len, kept)
    query = make_random(num_seqs, NUM_HEADS, HEAD_DIM)
    lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device="cuda")
    return [partial(paged_decode_attention, query, layer, tables, lens, VARIANT) for layer in layers]


def run_all(works: Sequence[Attend]) -> None:
    for work in works:
        work()


def spills_of(work: Attend) -> int:
    """Reads the registers that the kernel of attention spills, as the compiler counts them for this device."""
    spilled, run = [0], JITFunction.run

    def observe(kernel: Any, *args: Any, **options: Any) -> object:
        compiled = run(kernel, *args, **options)
        spilled.append(compiled.n_spills or 0)
        return compiled

    with mock.patch.object(JITFunction, "run", observe):
        work()
    return max(spilled)


def time_launches(work: Callable[[], object], num_rounds: int = 15) -> float:
    """Median device seconds of a work on the current stream, without a graph."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_rounds + 1)]
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    spans = sorted(float(begin.elapsed_time(end)) for begin, end in pairwise(events))
    return spans[num_rounds // 2] / 1e3


def time_graph(work: Callable[[], object]) -> float:
    """Median device seconds of a work as a graph."""
    return time_in_turn({"work": work})["work"]


def main(question: str, candidate: str) -> None:
    """Prepares one candidate, says so, and measures once a line came."""
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    lines = {"attention": measure_prompts, "small_kv": measure_decoding}[question](candidate)
    for line in lines:
        print(line, flush=True)
        if line == "ready":
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
