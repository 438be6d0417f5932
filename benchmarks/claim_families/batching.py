"""Static batches beside continuous batching, and shared prefixes beside none: the same engine on the same requests."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import engine.sequence
from benchmarks.claim_families.caching import one_thread
from benchmarks.claim_families.engines import (
    POOL_TOKENS,
    Asked,
    add,
    load,
    make_core,
    random_model,
    run,
    run_afresh,
    weights,
)
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report, Stopwatch, spread
from cli.bench.schedule import read_trace
from engine.kv.retention import Retention, Tokens
from engine.model.decoder import Decoder
from engine.schedule.batcher import UNLEARNED, Batcher, Candidate, Pages, Plan, StepCosts
from engine.schedule.continuous_batcher import ContinuousBatcher
from wire.block_names import BlockName
from wire.ids import PageId

BATCHED_SHAPE, SHARING_SHAPE = (1024, 4), (512, 6)
"""Hidden size and layers of two models: the steps of the first mostly read weights, the second is quick."""
BATCH = 8
NUM_REQUESTS = 32
MAX_RUNNING = 16
LENGTH_DIVISOR = 4
PROMPT_LEN = 16
NUM_ROUNDS = 3
SLOS = (1.5, 2.0, 4.0, 8.0)
"""Gaps between tokens, in multiples of the gap of a request alone."""
SLO_BATCHES = (1, 2, 4, 8, 16, 32)
NUM_GAPS = 16
SAID_OF_SHARING = 1.5
SHARES = (0.0, 0.5, 0.75, 0.9)
SHARED_PROMPT_LEN, SHARED_OUTPUT_LEN = 256, 32


class Nameless(Retention):
    """A retention of blocks without names: none is found, and none is published."""

    def names(self, tokens: Tokens, num_tokens: int, num_dropped: int = 0) -> list[BlockName]:
        return []

    def filled(self, tokens: Tokens, start: int, num_computed: int) -> list[tuple[BlockName, PageId]]:
        return []


@contextmanager
def no_cache() -> Iterator[None]:
    """Lets engines make sequences without names."""
    with patch.object(engine.sequence, "retention_of", Nameless):
        yield


@dataclass(frozen=True)
class StaticBatcher:
    """Admits a batch when the last one has ended altogether, and nothing in between."""

    max_running: int

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        return ContinuousBatcher(max_running=self.max_running).plan(() if running else waiting, running, pages)


def static_steps(lengths: Sequence[int]) -> int:
    """Sums the steps of static batches: each lasts as long as its longest answer."""
    return sum(max(lengths[at : at + BATCH]) for at in range(0, len(lengths), BATCH))


def measure_batching(inputs: Inputs) -> Report:
    if inputs.trace is None:
        raise ValueError("give a published trace with --trace")
    lengths = [max(1, row.output_len // LENGTH_DIVISOR) for row in read_trace(inputs.trace)[:NUM_REQUESTS]]
    asked = [Asked(_tokens(PROMPT_LEN, seed), length) for seed, length in enumerate(lengths)]
    chosen = weights(inputs, *BATCHED_SHAPE)
    with one_thread():
        model = load(chosen.folder, "bfloat16")
        batchers: dict[str, Batcher] = {
            "static": StaticBatcher(BATCH),
            "continuous": ContinuousBatcher(max_running=BATCH),
        }
        ways: dict[str, Callable[[], object]] = {
            name: partial(run_afresh, model, batcher, asked) for name, batcher in batchers.items()
        }
        ways["static"]()
        watch = Stopwatch().take_turns(ways, NUM_ROUNDS)
    rows = sum(lengths)
    by_steps = static_steps(lengths) / (rows / BATCH)
    ratios = watch.ratios("static", "continuous")
    speeds = [(name, rows / median(seconds)) for name, seconds in watch.seconds.items()]
    setting = (
        f"{NUM_REQUESTS} requests at once, answers as long as in {inputs.trace.stem} over {LENGTH_DIVISOR} (mean "
        f"{fmean(lengths):.0f}, longest {max(lengths)}), at most {BATCH} running; {chosen.words}, bf16, one thread. "
        "Baseline: the same engine that admits a batch only when the last one has ended. Rows that have ended are not "
        "computed on, which is kind to it: a smaller batch is a faster step."
    )
    finding = Finding(
        f"{by_steps:.1f}x fewer steps, if a step took as long at any batch", spread(ratios), median(ratios) >= 3
    )
    chart = Chart("Tokens a second", "", "tokens/s", {"Baton": speeds})
    return Report(setting, {"continuous_batching": finding}, chart)


def measure_sharing(inputs: Inputs) -> Report:
    chosen = weights(inputs, *SHARING_SHAPE)
    with one_thread():
        model = load(chosen.folder, "bfloat16")
        watches = {share: _time_sharing(model, share) for share in SHARES}
    ratios = {share: watch.ratios("none", "shared") for share, watch in watches.items()}
    enough = [share for share, each in ratios.items() if median(each) >= SAID_OF_SHARING]
    half = _prompt_tokens(0.5)
    told = ", ".join(f"{share:.0%} shared: {spread(each)}" for share, each in ratios.items() if share)
    setting = (
        f"{MAX_RUNNING} requests at a time of {2 * MAX_RUNNING}, prompts of {SHARED_PROMPT_LEN} tokens with a common "
        f"beginning, answers of {SHARED_OUTPUT_LEN}; {chosen.words}, bf16, one thread. Baseline: the same engine, "
        "whose blocks have no names, so that none is found."
    )
    finding = Finding(
        f"{half[0] / half[1]:.1f}x fewer prompt tokens with half of each prompt shared; no fewer tokens to decode",
        told,
        bool(enough),
        f"from {min(enough):.0%} shared on" if enough else "at none of these shares",
    )
    chart = Chart(
        "Times faster than without sharing",
        "% of the prompt shared",
        "x",
        {"Baton": [(100 * share, median(each)) for share, each in ratios.items()]},
    )
    return Report(setting, {"prefix_sharing": finding}, chart)


def batch_at_slo(scratch: Path, num_contiguous: int, num_paged: int, context_len: int) -> Finding:
    """Finds the largest batches that fit in memory and whose steps keep within a gap between tokens.

    context_len: tokens of each request, divided by LENGTH_DIVISOR.
    """
    batches = sorted({*(size for size in SLO_BATCHES if size < num_paged), num_contiguous, num_paged})
    with one_thread():
        model = load(random_model(scratch, *BATCHED_SHAPE), "bfloat16")
        gaps = {size: _gap(model, size, context_len // LENGTH_DIVISOR) for size in batches}
    ratios = {slo: largest(gaps, slo, num_paged) / largest(gaps, slo, num_contiguous) for slo in SLOS}
    met = [slo for slo, ratio in ratios.items() if ratio >= 4]
    told = ", ".join(f"{ratio:.1f}x within {slo:g}" for slo, ratio in ratios.items())
    return Finding(
        f"{num_paged / num_contiguous:.1f}x by memory alone, less where steps of more requests take longer",
        f"{told} times the gap of one request; {1e3 * gaps[1]:.1f} ms at 1, {1e3 * gaps[num_contiguous]:.1f} at "
        f"{num_contiguous}, {1e3 * gaps[num_paged]:.1f} at {num_paged}; {_words(BATCHED_SHAPE)}, contexts over "
        f"{LENGTH_DIVISOR}",
        bool(met),
        f"from {min(met):g} times the gap of one request on" if met else "at none of these gaps",
    )


def largest(gaps: Mapping[int, float], slo: float, room: int) -> int:
    """Picks the largest batch within the room whose gap is at most so many times that of one request."""
    return max(size for size, gap in gaps.items() if size <= room and gap <= slo * gaps[1])


def _gap(model: Decoder, batch: int, context_len: int) -> float:
    """Times steps of decoding requests; returns the median, in seconds."""
    core = make_core(model, ContinuousBatcher(max_running=batch), POOL_TOKENS)
    add(core, [Asked(_tokens(context_len, seed), NUM_GAPS) for seed in range(batch)])
    gaps = []
    while core.has_requests:
        began_s = time.perf_counter()
        if len(core.step().token_ids) == batch:
            gaps.append(time.perf_counter() - began_s)
    return median(gaps[1:])


def _time_sharing(model: Decoder, share: float) -> Stopwatch:
    common = _tokens(round(share * SHARED_PROMPT_LEN), 0)
    own_len = SHARED_PROMPT_LEN - len(common)
    asked = [Asked(common + _tokens(own_len, 1 + seed), SHARED_OUTPUT_LEN) for seed in range(2 * MAX_RUNNING)]
    batcher = ContinuousBatcher(max_running=MAX_RUNNING)

    def shared() -> None:
        core = make_core(model, batcher, POOL_TOKENS)
        run(core, asked[:1])  # requests that come together do not find what none of them has computed yet
        run(core, asked[1:])

    def without() -> None:
        with no_cache():
            shared()

    return Stopwatch().take_turns({"none": without, "shared": shared}, NUM_ROUNDS)


def _prompt_tokens(share: float) -> tuple[int, int]:
    """Counts the prompt tokens to compute without and with sharing."""
    common = round(share * SHARED_PROMPT_LEN)
    num = 2 * MAX_RUNNING
    return num * SHARED_PROMPT_LEN, common + num * (SHARED_PROMPT_LEN - common)


def _tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(32, 256), k=length))


def _words(shape: tuple[int, int]) -> str:
    return f"random weights, hidden size {shape[0]}, {shape[1]} layers, bf16, one thread"


BATCHING = Family(
    "Static and continuous batches",
    {"continuous_batching": "continuous batching gives 3-5x the throughput of static batches"},
    measure_batching,
)
SHARING = Family("Shared prefixes", {"prefix_sharing": "sharing prefixes gives 1.5-2x the throughput"}, measure_sharing)
