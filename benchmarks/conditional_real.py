"""Disaggregation always, never and conditional, on real processes: a prefill and a decode worker, a core each.

    python benchmarks/conditional_real.py --trace azure_conv_2023.csv --rate 6
    python benchmarks/conditional_real.py --trace azure_code_2023.csv --rate 4
    python benchmarks/conditional_real.py --trace mooncake_conversation.jsonl --length-factor 0.0625

A run takes four minutes; its rows replace the trace's rows in one table. A service of each mode is up, and rounds
alternate; each round has the trace's next requests, and no two services have a cache in common. Before them each serves
a round that is not counted, in which costs are learned. Limits come from the service without hand-offs, with one
request at a time, by the prompt's length (benchmarks/disaggregation.py). Two services are idle while one serves: the
table has what that takes. Router, client and all else share the cores of its workers.
"""

import asyncio
import json
import math
import re
import shlex
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baton_service import BatonService
from benchmarks.disaggregation import (
    NUM_CORES,
    Mode,
    Services,
    make_model,
    measure_quiet,
    parse,
    schedules,
    take_turns,
)
from benchmarks.machine import MachineState, commit
from benchmarks.result_file import FOLDER, write_result
from cli.bench.latency import Limits
from router.config import Disaggregation

SHORT = "--duration 10 --rate 2 --rounds 3 --quiet-lengths 16,128,512,930 --quiet-requests 3 --out conditional_real"
"""Flags for a run of four minutes; a caller's own come after them."""
FIXED = (Disaggregation.ALWAYS, Disaggregation.NEVER)
HEAD = (
    "trace",
    "mode",
    "good of sent",
    "TTFT p50 / p90 / p99, ms",
    "ITL p99 of running decodes, ms",
    "CPU when idle",
    "why prompts went where",
)
REASON = re.compile(r'^baton_prompt_pools_total{.*reason="(\w+)".*} (\d+)', re.MULTILINE)
Figure = Callable[[Mode, slice], float]


def over_the_better(modes: Mapping[str, Mode], figure: Figure, best: Callable[..., str] = max) -> str:
    """Divides conditional's figure by the better one of both others: all rounds, and lowest .. highest round.

    The better mode is the one of all rounds. best: `max`, or `min` where less is better.
    """
    better = best(FIXED, key=lambda mode: figure(modes[mode], slice(None)))
    parts = [slice(None), *_each(modes[better])]
    pairs = [(figure(modes[Disaggregation.CONDITIONAL], part), figure(modes[better], part)) for part in parts]
    whole, *each = (own / others if others else math.inf for own, others in pairs)
    return f"{whole:.2f} ({min(each):.2f} .. {max(each):.2f}) of {better}"


def num_good(limits: Limits) -> Figure:
    """Returns the figure of goodput: good requests, whose schedule is the same for all modes."""

    def count(mode: Mode, rounds: slice) -> float:
        summary = mode.summary(limits, rounds)
        return summary.good_share * summary.num_sent

    return count


def ttft_p90_ms(limits: Limits) -> Figure:
    return lambda mode, rounds: mode.summary(limits, rounds).ttft_ms.p90


def reasons(metrics: str) -> Counter[str]:
    """Counts prompts by the reason for their pool, from the text of a router's metrics."""
    found = Counter[str]()
    for reason, count in REASON.findall(metrics):
        found[reason] += int(count)
    return found


def read_reasons(services: Mapping[str, BatonService]) -> dict[str, Counter[str]]:
    """Asks each service's router; prompts of a warm-up count, too."""
    found = {}
    for name, service in services.items():
        with urlopen(f"http://{service.status()['metrics_address']}/metrics", timeout=10) as answer:
            found[name] = reasons(answer.read().decode())
    return found


def row(trace: str, name: str, mode: Mode, limits: Limits, idle_share: float, why: Counter[str]) -> list[str]:
    """Puts a mode's figures into a row of the table; `HEAD` names them."""
    one = mode.summary(limits)
    good = f"{one.good_share * one.num_sent:.0f} of {one.num_sent}, {one.num_sent - one.num_ended} lost"
    ttft = f"{one.ttft_ms.p50:.0f} / {one.ttft_ms.p90:.0f} / {one.ttft_ms.p99:.0f}"
    told = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
    return [trace, name, good, ttft, f"{mode.running_itl_p99_ms():.0f}", f"{idle_share:.1%}", told]


class IdleTime:
    """The CPU time that services take while others serve, as a share of both cores."""

    def __init__(self, services: Mapping[str, BatonService]) -> None:
        self._services = services
        self._began_s = time.monotonic()
        self._before_s = self._cpu_s()

    def shares(self, modes: Mapping[str, Mode]) -> dict[str, float]:
        """Returns each service's share. modes: what each took while it served."""
        all_s, now_s = time.monotonic() - self._began_s, self._cpu_s()
        shares = {}
        for name, mode in modes.items():
            busy_s = sum(seconds for part, seconds in mode.cpu_s.items() if part != "client")
            idle_s = all_s - sum(max(record.ended_s for record in one) for one in mode.rounds)
            shares[name] = (now_s[name] - self._before_s[name] - busy_s) / (NUM_CORES * idle_s)
        return shares

    def _cpu_s(self) -> dict[str, float]:
        return {name: sum(service.cpu_s().values()) for name, service in self._services.items()}


def measure(options: Namespace) -> dict[str, Any]:
    """Serves the rounds of a trace in all modes; returns what is kept of it."""
    before = MachineState.measure()
    (_, learned), *rounds = schedules(options)
    with TemporaryDirectory() as name, ExitStack() as ended:
        model = options.model or make_model(Path(name, "model"), options.hidden_size, options.layers)
        services = {mode.value: Services(model, Path(name), options).of_mode(mode) for mode in Disaggregation}
        for service in services.values():
            ended.enter_context(service).pin_workers()
        asyncio.run(take_turns(services, [learned], options.timeout))
        limits = asyncio.run(measure_quiet(services[Disaggregation.NEVER].address, options))
        before_reasons, idle = read_reasons(services), IdleTime(services)
        modes = asyncio.run(take_turns(services, [schedule for _, schedule in rounds], options.timeout))
        idle_shares = idle.shares(modes)
        why = {name: each - before_reasons[name] for name, each in read_reasons(services).items()}
    trace, random = options.trace.stem, f"random, hidden size {options.hidden_size}, {options.layers} layers"
    return {
        "rows": [row(trace, name, modes[name], limits, idle_shares[name], why[name]) for name in modes],
        "figures": {
            "goodput, conditional / the better": over_the_better(modes, num_good(limits)),
            "TTFT p90, conditional / the better": over_the_better(modes, ttft_p90_ms(limits), min),
            "load": f"{len(rounds)} rounds, the first of {rounds[0][0].describe()}",
            "model": f"{options.model or random}, {options.dtype}",
            "limits by prompt length, ms": ", ".join(map(limits.describe, limits.lengths)),
            "run": f"{shlex.join(sys.argv[1:])}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, "
            f"load average before {before.load_average:.2f}",
        },
        "rounds": {name: [asdict(mode.summary(limits, one)) for one in _each(mode)] for name, mode in modes.items()},
    }


def _each(mode: Mode) -> list[slice]:
    return [slice(at, at + 1) for at in range(len(mode.rounds))]


def tabulate(kept: Mapping[str, Any]) -> tuple[dict[str, str], list[Sequence[object]]]:
    """Returns the figures of all traces, and the table of all modes."""
    figures = {f"{trace}: {name}": one for trace, each in kept.items() for name, one in each["figures"].items()}
    rows: Iterable[Sequence[object]] = (each for one in kept.values() for each in one["rows"])
    return figures, [HEAD, *rows]


def read(name: str) -> dict[str, Any]:
    """Reads what is kept of each trace."""
    file = FOLDER / f"{name}.json"
    kept: dict[str, Any] = json.loads(file.read_text())["details"] if file.exists() else {}
    return kept


def main() -> None:
    options = parse([*SHORT.split(), *sys.argv[1:]])
    kept = {**read(options.out), options.trace.stem: measure(options)}
    figures, table = tabulate(kept)
    write_result(options.out, figures, kept, table)


if __name__ == "__main__":
    main()
