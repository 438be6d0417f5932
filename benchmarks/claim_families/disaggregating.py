"""A prefill and a decode worker beside two co-located ones, at prompts below 2K and above 8K tokens, over eight."""

import argparse
import asyncio
from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.claim_families.engines import weights
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report, spread
from benchmarks.disaggregation import Mode, Services, require_ended, take_turns
from cli.bench.schedule import poisson

HIDDEN_SIZE, NUM_LAYERS = 512, 6
LENGTH_DIVISOR = 8
PROMPT_LENS = {"disaggregation_short": 1536, "disaggregation_long": 12288}
OUTPUT_LEN = 32
PROMPT_TOKENS_PER_S = 1600.0
DURATION_S = 20.0
NUM_ROUNDS = MIN_ROUNDS = 3
CHUNK_LEN = 128
TIMEOUT_S = 60.0
PAYS = 0.95
"""It pays where the time of a request falls by more than a twentieth: less is what equal rounds differ by."""
MEASURES = ("time of a request", "time to its first token", "p99 gap between tokens")


def measure(inputs: Inputs) -> Report:
    options = argparse.Namespace(disaggregation="always", dtype="bfloat16")
    chosen = weights(inputs, HIDDEN_SIZE, NUM_LAYERS)
    services = Services(chosen.folder, inputs.scratch, options)
    # The real model computes a fourth of the prompt tokens of the random one in a second.
    tokens_per_s, divisor = (
        (PROMPT_TOKENS_PER_S, LENGTH_DIVISOR) if inputs.real is None else (400.0, 2 * LENGTH_DIVISOR)
    )
    lengths = {name: length // divisor for name, length in PROMPT_LENS.items()}
    rounds = [
        poisson(tokens_per_s / length, DURATION_S, length, OUTPUT_LEN, seed)
        for length in lengths.values()
        for seed in range(NUM_ROUNDS)
    ]
    with services.co_located(CHUNK_LEN) as base, services.disaggregated() as other:
        base.pin_workers()
        other.pin_workers()
        modes = asyncio.run(take_turns({"co-located": base, "disaggregated": other}, rounds, TIMEOUT_S))
    require_ended([record for mode in modes.values() for one in mode.rounds for record in one])
    ratios = {
        name: [compare(modes, at * NUM_ROUNDS + number) for number in range(NUM_ROUNDS)]
        for at, name in enumerate(lengths)
    }
    setting = (
        f"Two workers with a core each; {chosen.words}, bf16. Lengths are divided by {divisor}: prompts "
        f"of {' and '.join(map(str, lengths.values()))} tokens, answers of {OUTPUT_LEN}, Poisson "
        f"arrivals of {tokens_per_s:.0f} prompt tokens a second for {DURATION_S:.0f} s, "
        f"{NUM_ROUNDS} rounds of each. Baseline: the same service with two co-located workers, which both prefill, in "
        f"chunks of {CHUNK_LEN}. On a published trace: "
        "[disaggregation](../benchmarks/results/disaggregation.md)."
    )
    series: dict[str, list[tuple[float | str, float]]] = {
        f"prompts of {lengths[name]}": [(measure, median(one[measure] for one in each)) for measure in MEASURES]
        for name, each in ratios.items()
    }
    chart = Chart("Disaggregated over co-located", "", "x", series)
    return Report(setting, {name: judge(name, each) for name, each in ratios.items()}, chart)


def compare(modes: dict[str, Mode], number: int) -> dict[str, float]:
    """Divides mean times, and the p99 gap of running answers, of a round disaggregated by the co-located round's."""
    other, base = (
        (
            fmean(record.ended_s - record.scheduled_s for record in mode.rounds[number]),
            fmean(record.ttft_s for record in mode.rounds[number]),
            mode.running_itl_p99_ms(slice(number, number + 1)),
        )
        for mode in (modes["disaggregated"], modes["co-located"])
    )
    return {name: value / by for name, value, by in zip(MEASURES, other, base, strict=True)}


def judge(name: str, rounds: Sequence[dict[str, float]]) -> Finding:
    """Judges by the time of a request: below 2K it must not fall below PAYS, above 8K it must.

    Fewer than three rounds are not judged, nor are rounds that disagree.
    """
    is_long = name == "disaggregation_long"
    told = ", ".join(f"{spread([one[measure] for one in rounds])} the {measure}" for measure in MEASURES)
    pays = {one[MEASURES[0]] < PAYS for one in rounds}
    if len(rounds) < MIN_ROUNDS:
        holds, by = None, f"{len(rounds)} of the {MIN_ROUNDS} rounds that decide"
    elif len(pays) > 1:
        holds, by = None, f"the {MEASURES[0]}, on which rounds disagree"
    else:
        holds, by = (True in pays) == is_long, f"the {MEASURES[0]}, in all rounds (less than a twentieth is no gain)"
    reason = (
        "a hand-over is a cache hit" if name == "disaggregation_short" else "chunks of long prompts hold decodes up"
    )
    return Finding(f"{reason}; half as many workers prefill", told, holds, by)


FAMILY = Family(
    "Prefill and decode apart",
    {
        "disaggregation_short": "below 2K tokens disaggregation does not pay",
        "disaggregation_long": "above 8K tokens disaggregation pays",
    },
    measure,
)
