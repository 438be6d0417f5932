"""How fast a service answers under open-loop Poisson load, or two of them side by side.

    python benchmarks/serve.py --up --model demo_model/checkpoint --rate 2 --duration 30 --rounds 3
    python benchmarks/serve.py --address 127.0.0.1:50051 --trace conversation.jsonl --length-factor 0.05

Requests are sent at times drawn beforehand, whether or not earlier ones were answered, by this process alone. Each
round has its own prompts and is sent to every service in turn (A B A B), so that whatever else the machine does meets
them alike. `--up` starts both services itself, co-located and disaggregated, and keeps both up throughout.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.machine import MachineState
from benchmarks.serve_report import ServeReport
from cli.bench.latency import LatencyLimits, Record
from cli.bench.open_loop import LoadClient
from cli.bench.schedule import Arrival, poisson, read_trace, replay, scale

_MODES = {"co-located": (0, 2), "disaggregated": (1, 1)}
_WARM_UP_SEED = -1


def main() -> None:
    options = _parse(sys.argv[1:])
    with ExitStack() as services:
        addresses = dict(zip(options.address, options.address, strict=True)) or {
            mode: services.enter_context(BatonService(mode, options.model, prefill, decode)).address
            for mode, (prefill, decode) in _MODES.items()
        }
        report = asyncio.run(_measure(addresses, options))
    print(report.json() if options.json else report.text())
    if any(record.error for rounds in report.rounds_by_mode.values() for one in rounds for record in one):
        sys.exit(1)


async def _measure(addresses: Mapping[str, str], options: argparse.Namespace) -> ServeReport:
    limits = LatencyLimits(options.ttft_limit_ms / 1000, options.tpot_limit_ms / 1000)
    rounds_by_mode: dict[str, list[list[Record]]] = {mode: [] for mode in addresses}
    before = MachineState.measure()
    load = ""
    for number in range(options.rounds):
        for mode, address in addresses.items():
            async with LoadClient(address, options.timeout) as client:
                load, schedule = _load(options, number, await client.max_context_len())
                if number == 0:
                    await client.run(poisson(2.0, 2.0, options.input_len, 2, _WARM_UP_SEED))
                rounds_by_mode[mode].append(await client.run(schedule))
    return ServeReport(load, limits, rounds_by_mode, before, MachineState.measure())


def _load(options: argparse.Namespace, number: int, max_context_len: int) -> tuple[str, list[Arrival]]:
    """Describes the requests of a round, and returns them."""
    seed = options.seed + number
    if options.trace is not None:
        rows = read_trace(options.trace)
        trace = scale(rows, options.rate, options.duration, options.length_factor, max_context_len)
        return f"{options.trace.name}, {options.rounds} rounds of {trace.describe()}", replay(trace, seed)
    lengths = f"{options.input_len} tokens in, {options.output_len} out"
    described = (
        f"Poisson, {options.rate:g} requests a second, {options.rounds} rounds of {options.duration:g} s, {lengths}"
    )
    return described, poisson(options.rate, options.duration, options.input_len, options.output_len, seed)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--address", action="append", default=[], help="a running service; may be given twice")
    target.add_argument("--up", action="store_true", help="start a co-located and a disaggregated service")
    parser.add_argument("--model", default=None, help="checkpoint folder for --up; default: the demo model")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second (default 2)")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals in a round (default 30)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that each service gets (default 3)")
    parser.add_argument("--input-len", type=int, default=200, help="prompt tokens (default 200)")
    parser.add_argument("--output-len", type=int, default=50, help="output tokens (default 50)")
    parser.add_argument("--trace", type=Path, help="Mooncake .jsonl or Azure .csv: arrivals and lengths from there")
    parser.add_argument("--length-factor", type=float, default=0.05, help="multiplies a trace's lengths (default 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-limit-ms", type=float, default=1000.0, help="for goodput (default 1000)")
    parser.add_argument("--tpot-limit-ms", type=float, default=100.0, help="for goodput (default 100)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a request may take (default 120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, every round in it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
