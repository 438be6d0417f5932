"""Disaggregation always, never and conditional, on real processes: a prefill and a decode worker, a core each.

    python benchmarks/conditional_real.py --trace azure_code_2023.csv

A service of each mode is up, and rounds alternate; each round has the trace's next requests, and no two services have
a cache in common. Before them each serves a round that is not counted, in which costs are learned. Limits come from the
service without hand-offs, with one request at a time, by the prompt's length (benchmarks/disaggregation.py). Two
services are idle while one serves; router, client and all else share the cores of its workers.
"""

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.disaggregation import Mode, Services, make_model, measure_quiet, parse, schedules, tabulate, take_turns
from benchmarks.machine import MachineState
from benchmarks.result_file import write_result
from cli.bench.latency import Limits
from router.config import Disaggregation

SHORT = "--duration 12 --rate 2 --rounds 3 --quiet-lengths 16,128,512,930 --quiet-requests 3 --out conditional_real"
"""Flags for a run of five minutes; a caller's own come after them."""
FIXED = (Disaggregation.ALWAYS, Disaggregation.NEVER)


def over_the_better(modes: dict[str, Mode], limits: Limits) -> dict[str, str]:
    """Divides conditional's goodput by the better one of both others: all rounds, and lowest .. highest round.

    The better mode is the one of all rounds.
    """

    def goodput(mode: str, rounds: slice) -> float:
        return modes[mode].summary(limits, rounds).goodput_rps

    better = max(FIXED, key=lambda mode: goodput(mode, slice(None)))
    num_rounds = len(modes[better].rounds)
    parts = [slice(None), *(slice(at, at + 1) for at in range(num_rounds))]
    whole, *each = (goodput(Disaggregation.CONDITIONAL, part) / max(goodput(better, part), 1e-9) for part in parts)
    return {f"goodput, conditional / {better}, the better": f"{whole:.2f} ({min(each):.2f} .. {max(each):.2f})"}


def main() -> None:
    options = parse([*SHORT.split(), *sys.argv[1:]])
    before = MachineState.measure()
    (_, learned), *rounds = schedules(options)
    with TemporaryDirectory() as name, ExitStack() as ended:
        model = options.model or make_model(Path(name, "model"), options.hidden_size, options.layers)
        services = {mode.value: Services(model, Path(name), options).of_mode(mode) for mode in Disaggregation}
        for service in services.values():
            ended.enter_context(service).pin_workers()
        asyncio.run(take_turns(services, [learned], options.timeout))
        limits = asyncio.run(measure_quiet(services[Disaggregation.NEVER].address, options))
        modes = asyncio.run(take_turns(services, [schedule for _, schedule in rounds], options.timeout))
    random = f"random, hidden size {options.hidden_size}, {options.layers} layers"
    figures = {
        **over_the_better(modes, limits),
        "load": f"{options.trace.name}, {len(rounds)} rounds, the first of {rounds[0][0].describe()}",
        "model": f"{options.model or random}, {options.dtype}",
        "limits by prompt length, ms": ", ".join(map(limits.describe, limits.lengths)),
        "load average before": before.load_average,
    }
    each = [slice(at, at + 1) for at in range(len(rounds))]
    details = {
        "limits": asdict(limits),
        "rounds": {name: [asdict(mode.summary(limits, one)) for one in each] for name, mode in modes.items()},
    }
    write_result(options.out, figures, details, tabulate(modes, limits))


if __name__ == "__main__":
    main()
