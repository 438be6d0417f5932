"""Prefill and decode beside the peaks of the machine: multiplications a second, and bytes read a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from benchmarks.claim_families.caching import one_thread
from benchmarks.claim_families.engines import Asked, load, make_core, random_model, run
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report
from benchmarks.engine import BLOCK_SIZE, decoding_core
from engine.model.decoder import Decoder
from engine.schedule.continuous_batcher import ContinuousBatcher

HIDDEN_SIZE, NUM_LAYERS = 1024, 8
PREFILL_LEN = 512
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_LEN = 64
NUM_ROUNDS = 5
ENOUGH = 0.8
PEAK_SIZE = 1536
READ_BYTES = 512 << 20
H100_BALANCE = 989e12 / 3.35e12
"""Products in bf16 for each byte that its memory brings. Source: NVIDIA's data sheet of the H100 SXM."""


@dataclass(frozen=True)
class Peaks:
    """The best of several plain runs of one thread."""

    flops: float
    read_bytes: float

    @classmethod
    def measure(cls) -> "Peaks":
        """Multiplies square bf16 matrices with torch, and reads half a gigabyte."""
        square = torch.randn(PEAK_SIZE, PEAK_SIZE).bfloat16()
        values = torch.ones(READ_BYTES // 4)
        return cls(2 * PEAK_SIZE**3 / _least_s(partial(torch.mm, square, square)), READ_BYTES / _least_s(values.amax))

    @property
    def balance(self) -> float:
        """Rows of bf16 weights, of two bytes, for which multiplying takes as long as reading."""
        return self.flops / self.read_bytes


def _least_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def matrix_parameters(model: Decoder) -> int:
    """Counts the numbers that each token is multiplied with, the head aside."""
    matrices = [
        one
        for layer in model.weights.layers
        for one in (layer.qkv.weight, layer.attention_output.weight, *layer.feed_forward.matrices)
    ]
    return sum(one.columns * one.depth for one in matrices)


def measure(inputs: Inputs) -> Report:
    with one_thread():
        model = load(random_model(inputs.scratch, HIDDEN_SIZE, NUM_LAYERS), "bfloat16")
        peaks = Peaks.measure()
        num_parameters = matrix_parameters(model)
        prefill = 2 * num_parameters * PREFILL_LEN / _prefill_s(model) / peaks.flops
        steps_s = {batch: _decode_s(model, batch) for batch in BATCHES}
    decode = {batch: 2 * num_parameters * batch / step_s / peaks.flops for batch, step_s in steps_s.items()}
    read = {batch: 2 * num_parameters / step_s / peaks.read_bytes for batch, step_s in steps_s.items()}
    speed = {batch: batch / step_s for batch, step_s in steps_s.items()}
    shares = ", ".join(f"{decode[batch]:.0%} at {batch}" for batch in BATCHES if batch in (1, 8, 32))
    enough = min(batch for batch in BATCHES if speed[batch] >= ENOUGH * max(speed.values()))
    gains = ", ".join(f"{speed[batch] / speed[1]:.1f}x at {batch}" for batch in BATCHES if batch in (8, 32, 64))
    setting = (
        f"Random weights, hidden size {HIDDEN_SIZE}, {NUM_LAYERS} layers, bf16, one thread; prompts of {PREFILL_LEN}, "
        f"contexts of {CONTEXT_LEN}. Peaks of the same run: {peaks.flops / 1e9:.0f} GFLOP/s in torch's product of "
        f"{PEAK_SIZE} x {PEAK_SIZE} bf16 matrices, {peaks.read_bytes / 1e9:.1f} GB/s read. Counted are the products "
        "with the matrices of the layers."
    )
    findings = {
        "prefill_peak": Finding(
            f"{PREFILL_LEN} rows a weight, {PREFILL_LEN / peaks.balance:.0f}x what balances a read: compute limits",
            f"{prefill:.0%} of the peak",
            0.5 <= prefill <= 0.7,
        ),
        "decode_peak": Finding(
            f"reads are the limit: at most {1 / peaks.balance:.0%} of the peak a row here, {1 / H100_BALANCE:.1%} "
            "on an H100",
            f"{shares}; at 1 it reads weights at {read[1]:.0%} of the reading peak",
            0.1 <= decode[8] <= 0.2,
        ),
        "decode_batch": Finding(
            f"reading and multiplying balance at {peaks.balance:.0f} rows here, at {H100_BALANCE:.0f} on an H100",
            f"tokens/s {gains}, over a batch of 1: {ENOUGH:.0%} of the best from {enough} on",
            8 <= enough <= 32,
        ),
    }
    chart = Chart(
        "Share of the peak of multiplications",
        "batch",
        "%",
        {
            "decode": [(batch, 100 * share) for batch, share in decode.items()],
            "prefill": [(b, 100 * prefill) for b in BATCHES],
        },
    )
    return Report(setting, findings, chart)


def _prefill_s(model: Decoder) -> float:
    seconds = []
    for number in range(NUM_ROUNDS):
        core = make_core(model, ContinuousBatcher(), 4 * PREFILL_LEN)
        prompt = tuple((number * 7 + place * place) % 256 for place in range(PREFILL_LEN))
        began_s = time.perf_counter()
        run(core, [Asked(prompt, 1)])
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def _decode_s(model: Decoder, batch: int) -> float:
    core = decoding_core(model, batch, CONTEXT_LEN, 4 * BLOCK_SIZE)
    core.step()
    seconds = []
    for _ in range(BLOCK_SIZE):
        began_s = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


FAMILY = Family(
    "Shares of the peak",
    {
        "prefill_peak": "prefill reaches 50-70 % of peak",
        "decode_peak": "decode reaches 10-20 % of peak",
        "decode_batch": "decode wants batches of 8-32",
    },
    measure,
)
