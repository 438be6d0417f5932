"""Attention over pages beside the same attention over contiguous KV: the cost of block tables."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from benchmarks.claim_families.caching import one_thread
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report, Stopwatch, spread
from kernels.backend import AttentionVariant, Backend, KVPages, Tables
from kernels.selection import select_backend

NUM_SEQUENCES, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 4, 32, 8, 128, 4
CONTEXT_LENS = (512, 1024, 2048, 4096)
BLOCK_SIZE = 16
NUM_ROUNDS = 24
VARIANT = AttentionVariant(HEAD_DIM**-0.5, None)


def make_way(backend: Backend, query: torch.Tensor, context_len: int, block_size: int) -> Callable[[], object]:
    """Makes attention of all layers over blocks of one size, at random places of a pool; one block a request: none."""
    num_blocks = context_len // block_size
    shape = (NUM_SEQUENCES * num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM)
    kv = KVPages(torch.randn(shape).bfloat16())
    places = torch.randperm(NUM_SEQUENCES * num_blocks, generator=torch.Generator().manual_seed(0))
    tables = Tables(
        places.view(NUM_SEQUENCES, num_blocks).int(),
        torch.full((NUM_SEQUENCES,), context_len, dtype=torch.int32),
        torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32),
        NUM_SEQUENCES,
    )

    def attend() -> None:
        for layer in range(NUM_LAYERS):
            backend.attend(query, kv.layer(layer), tables, VARIANT)

    return attend


def measure(inputs: Inputs) -> Report:
    with one_thread():
        backend = select_backend(torch.device("cpu"))
        watches = {context_len: _time(backend, context_len) for context_len in CONTEXT_LENS}
    ratios = {length: watch.ratios("pages", "contiguous") for length, watch in watches.items()}
    costs = {length: [100 * (one - 1) for one in middle_half(each)] for length, each in ratios.items()}
    setting = (
        f"Attention alone: {NUM_SEQUENCES} decoding requests, {NUM_HEADS} heads on {NUM_KV_HEADS} KV heads of "
        f"{HEAD_DIM}, {NUM_LAYERS} layers, bf16, one thread, {backend.version.rsplit('-', 1)[0]}. Baseline: the same "
        f"kernel with each request's KV in one block. Pages of {BLOCK_SIZE} tokens lie in random order. "
        f"Spreads are of the middle half of {NUM_ROUNDS} rounds."
    )
    finding = Finding(
        f"4 bytes for each {BLOCK_SIZE} tokens, and reads in runs of {BLOCK_SIZE * HEAD_DIM * 2 >> 10} KiB",
        ", ".join(f"{length} tokens: {spread(each, ' %')}" for length, each in costs.items()),
        *verdict(costs),
    )
    chart = Chart(
        "Time of attention over pages, % of contiguous KV",
        "tokens of context",
        "%",
        {"pages": [(length, 100 + median(each)) for length, each in costs.items()]},
    )
    return Report(setting, {"block_tables": finding}, chart)


def verdict(costs: Mapping[int, Sequence[float]]) -> tuple[bool | None, str]:
    """Tells whether tables cost 10 to 20 % at some length, and never more, and the lengths that decide it.

    None where rounds disagree on that.
    """
    unsure = [length for length, each in costs.items() if min(each) < 10 < max(each)]
    if unsure:
        return None, f"rounds lie on both sides of 10 % at {_listed(unsure)}"
    dear = [length for length, each in costs.items() if max(each) > 20]
    within = [length for length, each in costs.items() if 10 <= min(each) <= max(each) <= 20]
    if dear or not within:
        return False, f"more at {_listed(dear)}" if dear else "less at every length"
    return True, _listed(within)


def _listed(lengths: Sequence[int]) -> str:
    return f"{', '.join(map(str, lengths))} tokens"


def middle_half(values: Sequence[float]) -> list[float]:
    """Leaves the lowest and the highest quarter out: a round takes milliseconds, and other processes disturb some."""
    quarter = len(values) // 4
    return sorted(values)[quarter : len(values) - quarter]


def _time(backend: Backend, context_len: int) -> Stopwatch:
    query = torch.randn(NUM_SEQUENCES, NUM_HEADS, HEAD_DIM).bfloat16()
    ways = {
        "contiguous": make_way(backend, query, context_len, context_len),
        "pages": make_way(backend, query, context_len, BLOCK_SIZE),
    }
    for way in ways.values():
        way()
    return Stopwatch().take_turns(ways, NUM_ROUNDS)


FAMILY = Family("Block tables", {"block_tables": "block tables cost attention 10-20 %"}, measure)
