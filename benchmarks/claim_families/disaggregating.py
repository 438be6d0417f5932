"""A prefill and a decode worker beside two co-located ones, at prompts below 2K and above 8K tokens, over eight."""

import argparse
import asyncio
from statistics import fmean

from benchmarks.claim_families.engines import random_model
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report
from benchmarks.disaggregation import Mode, Services, take_turns
from benchmarks.latency import Record
from benchmarks.schedule import poisson

HIDDEN_SIZE, NUM_LAYERS = 512, 6
LENGTH_DIVISOR = 8
PROMPT_LENS = {"disaggregation_short": 1536, "disaggregation_long": 12288}
OUTPUT_LEN = 32
PROMPT_TOKENS_PER_S = 400.0
DURATION_S = 15.0
CHUNK_LEN = 128
TIMEOUT_S = 60.0


def measure(inputs: Inputs) -> Report:
    options = argparse.Namespace(decode_slowdown=None, dtype="bfloat16")
    services = Services(random_model(inputs.scratch, HIDDEN_SIZE, NUM_LAYERS), inputs.scratch, options)
    lengths = {name: length // LENGTH_DIVISOR for name, length in PROMPT_LENS.items()}
    rounds = [
        poisson(PROMPT_TOKENS_PER_S / length, DURATION_S, length, OUTPUT_LEN, seed)
        for seed, length in enumerate(lengths.values())
    ]
    with services.co_located(CHUNK_LEN) as base, services.disaggregated() as other:
        base.pin_workers()
        other.pin_workers()
        modes = asyncio.run(take_turns({"co-located": base, "disaggregated": other}, rounds, TIMEOUT_S))
    findings = {name: _finding(name, modes, number) for number, name in enumerate(lengths)}
    setting = (
        f"Two workers with a core each; random weights, hidden size {HIDDEN_SIZE}, {NUM_LAYERS} layers, bf16. "
        "Lengths over "
        f"{LENGTH_DIVISOR}: prompts of {' and '.join(map(str, lengths.values()))} tokens, answers of {OUTPUT_LEN}, "
        f"Poisson arrivals of {PROMPT_TOKENS_PER_S:.0f} prompt tokens a second for {DURATION_S:.0f} s, one round. "
        "Baseline: "
        f"the same service with two co-located workers, chunks of {CHUNK_LEN}. On a published trace: "
        "[disaggregation](../benchmarks/results/disaggregation.md)."
    )
    series: dict[str, list[tuple[float | str, float]]] = {
        name: [
            (str(length * LENGTH_DIVISOR), mode.running_itl_p99_ms(slice(number, number + 1)))
            for number, length in enumerate(lengths.values())
        ]
        for name, mode in modes.items()
    }
    chart = Chart("99th percentile of gaps of running answers", "prompt tokens, over 8", "ms", series)
    return Report(setting, findings, chart)


def _finding(name: str, modes: dict[str, Mode], number: int) -> Finding:
    """Judges by the mean time of a request: below 2K it must not fall, above 8K it must."""
    base, other = modes["co-located"], modes["disaggregated"]
    gaps = _ratio(*(mode.running_itl_p99_ms(slice(number, number + 1)) for mode in (other, base)))
    whole = _ratio(_mean_s(other.rounds[number]), _mean_s(base.rounds[number]))
    first = _ratio(_mean_ttft_s(other.rounds[number]), _mean_ttft_s(base.rounds[number]))
    told = f"{whole:.2f} of the time of a request, {first:.2f} of that to its first token, {gaps:.2f} of the p99 gap"
    short = "a hand-over is one cache hit; half as many workers prefill"
    long = "a chunk of a long prompt holds up decodes; half as many workers prefill"
    is_short = name == "disaggregation_short"
    return Finding(short if is_short else long, told, whole >= 1.0 if is_short else whole < 1.0)


def _mean_s(records: list[Record]) -> float:
    return fmean(record.ended_s - record.scheduled_s for record in records)


def _mean_ttft_s(records: list[Record]) -> float:
    return fmean(record.ttft_s for record in records)


def _ratio(value: float, base: float) -> float:
    return value / base


FAMILY = Family(
    "Prefill and decode apart",
    {
        "disaggregation_short": "below 2K tokens disaggregation does not pay",
        "disaggregation_long": "above 8K tokens disaggregation pays",
    },
    measure,
)
