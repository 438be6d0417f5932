"""The time that a twin cluster of a hundred workers takes to serve ten thousand requests on virtual time, on one core.

    python benchmarks/twins.py --trace azure_conv_2023.csv

Work costs what `WorkCosts` has without a run: a step 8 ms, 0.3 ms for each token. The rate keeps both pools at some
three quarters of their time.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.result_file import write_result
from cli.bench.latency import Slo
from cli.bench.plan.sizing import PlannedLoad
from cli.bench.plan.twin_cluster import TwinSettings
from cli.bench.schedule import read_trace, replay, scale
from wire.pools import PoolSizes, Role

MAX_CONTEXT_LEN, NUM_SLOTS = 8192, 1 << 18
LIMITS = Slo(1.0, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--prefill", type=int, default=74)
    parser.add_argument("--decode", type=int, default=26)
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=600.0, help="requests a second (default 600)")
    parser.add_argument("--length-factor", type=float, default=0.25)
    parser.add_argument("--out", default="twins", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    rows = read_trace(options.trace)[: options.num_requests]
    trace = scale(rows, options.rate, len(rows) / options.rate, options.length_factor, MAX_CONTEXT_LEN)
    arrivals = replay(trace, 0)
    load = PlannedLoad(arrivals, TwinSettings(max_context_len=MAX_CONTEXT_LEN, num_slots=NUM_SLOTS), LIMITS)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    served = load.served_whole_by(PoolSizes(options.prefill, options.decode))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    num_in, num_out = (sum(each) for each in zip(*((len(one.prompt), one.output_len) for one in arrivals), strict=True))
    figures = {
        "load": trace.describe(),
        "workers": f"{options.prefill} prefill, {options.decode} decode",
        "tokens of prompts, of answers": f"{num_in}, {num_out}",
        "s, and of CPU": f"{wall_s:.0f}, {cpu_s:.0f}",
        "us of CPU a token of the answers": cpu_s / num_out * 1e6,
        "requests ended": served.summary.num_ended,
        "pools busy": ", ".join(f"{role.value} {served.busy[role]:.0%}" for role in Role),
        "TTFT p50 / p99 ms": f"{served.summary.ttft_ms.p50:.0f} / {served.summary.ttft_ms.p99:.0f}",
    }
    write_result(options.out, figures, {"summary": asdict(served.summary)})


if __name__ == "__main__":
    main()
