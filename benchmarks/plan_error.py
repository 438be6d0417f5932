"""The error of `baton plan`: what it foretells for a stretch of a trace, against runs of that stretch.

    python benchmarks/plan_error.py --trace azure_conv_2023.csv

A prefill and a decode worker of one thread each serve the demo model. Costs are learned from one stretch of the trace;
the next stretch is foretold with them, and sent `--runs` times, each time with other prompts. The limits are
multiples of the first stretch's medians. The spread is the largest run's figure over the smallest. Times count from the
sending of a request: that the client is late, on a machine that it shares, no plan of a cluster can tell.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.result_file import write_result
from cli.bench.latency import ModeSummary, Record, Slo, summarize
from cli.bench.open_loop import LoadClient
from cli.bench.plan.costs import learn
from cli.bench.plan.sizing import PlannedLoad
from cli.bench.plan.twin_cluster import TwinSettings
from cli.bench.schedule import Arrival, poisson, read_trace, replay, scale
from wire.pools import PoolSizes
from worker.config import BatchSettings

TIMEOUT_S = 120.0
LIMIT_FACTORS = 3.0, 2.0
"""Limits of TTFT and of ITL over the medians of the stretch that costs are learned from."""
FIGURES: tuple[tuple[str, Callable[[ModeSummary], float]], ...] = (
    ("TTFT p50 ms", lambda summary: summary.ttft_ms.p50),
    ("TTFT p90 ms", lambda summary: summary.ttft_ms.p90),
    ("ITL p50 ms", lambda summary: summary.tpot_ms.p50),
    ("goodput, requests a s", lambda summary: summary.goodput_rps),
)


def stretches(options: argparse.Namespace, max_context_len: int) -> list[list[Arrival]]:
    """Cuts the trace into two stretches, the second once for each run, with other prompts."""
    rows, num = read_trace(options.trace), round(options.rate * options.duration)
    length = options.rate, options.duration, options.length_factor, max_context_len
    first, second = (scale(rows[at : at + num], *length) for at in (0, num))
    return [replay(first, 0), *(replay(second, 1 + run) for run in range(options.runs))]


async def serve(address: str, options: argparse.Namespace) -> tuple[list[list[Arrival]], list[list[Record]], int]:
    """Sends a warm-up, then the stretches one after another; returns them, the records, and the context length."""
    async with LoadClient(address, TIMEOUT_S) as client:
        max_context_len = await client.max_context_len()
        await client.run(poisson(4.0, 3.0, 64, 8, 99))
        loads = stretches(options, max_context_len)
        rounds = [await client.run(load) for load in loads]
        return loads, [[replace(one, scheduled_s=one.sent_s) for one in each] for each in rounds], max_context_len


def limits_of(records: Sequence[Record]) -> Slo:
    ttft, tpot = LIMIT_FACTORS
    return Slo(ttft * median(one.ttft_s for one in records), tpot * median(one.tpot_s for one in records))


def foretell(learned_from: Sequence[Record], load: Sequence[Arrival], max_context_len: int) -> ModeSummary:
    """Serves a load on a twin of the cluster, with the costs that some records tell."""
    settings = TwinSettings(costs=learn([learned_from]).costs, batch=BatchSettings(), max_context_len=max_context_len)
    return PlannedLoad(load, settings, limits_of(learned_from)).served_whole_by(PoolSizes(1, 1)).summary


def compare(foretold: ModeSummary, runs: Sequence[ModeSummary]) -> list[list[object]]:
    """Makes a row for each figure: foretold, of the runs, their ratio, and the spread of the runs."""
    rows: list[list[object]] = [["figure", "foretold", "run, median", "foretold / run", "spread of the runs"]]
    for name, pick in FIGURES:
        each = [pick(one) for one in runs]
        mid = median(each)
        rows.append([name, pick(foretold), mid, f"{pick(foretold) / mid:.2f}", f"{max(each) / min(each):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default=None, help="folder of a checkpoint (default: the demo model)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second (default 2)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of each stretch (default 60)")
    parser.add_argument("--length-factor", type=float, default=0.2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", default="plan_error", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    with BatonService("plan", options.model, 1, 1, ["--threads", "1"]) as service:
        service.pin_workers()
        loads, (learned_from, *records), max_context_len = asyncio.run(serve(service.address, options))
    limits = limits_of(learned_from)
    foretold = foretell(learned_from, loads[1], max_context_len)
    runs = [summarize([one], limits) for one in records]
    table = compare(foretold, runs)
    figures = {f"{name}, foretold / run": ratio for name, _, _, ratio, _ in table[1:]}
    learned = learn([learned_from])
    costs: list[str] = [f"{name} {np.median(cost_s):.3g}" for name, cost_s in asdict(learned.costs).items()]
    figures |= {"costs, s": ", ".join(costs), "limits": f"TTFT {limits.ttft_s:.3g} s, ITL {limits.tpot_s:.3g} s"}
    write_result(options.out, figures, {"foretold": asdict(foretold), "runs": [asdict(one) for one in runs]}, table)


if __name__ == "__main__":
    main()
