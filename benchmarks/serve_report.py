"""Figures of a serving benchmark, for people and for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import MachineState
from cli.bench.latency import (
    LATENCIES,
    LatencyLimits,
    ModeSummary,
    Percentiles,
    Record,
    describe_limits,
    rates,
    summarize,
    without_nan,
)

_WIDTH = 26


@dataclass(frozen=True)
class ServeReport:
    """All rounds of every mode, which were interleaved in one run, and the machine before and after."""

    load: str
    limits: LatencyLimits
    rounds_by_mode: Mapping[str, Sequence[Sequence[Record]]]
    machine_before: MachineState
    machine_after: MachineState

    def text(self) -> str:
        """A table with a column a mode, and with two modes the ratio of the second to the first."""
        summaries = {mode: summarize(rounds, self.limits) for mode, rounds in self.rounds_by_mode.items()}
        lines = [self.load, "", _line("", summaries), *_latency_lines(summaries)]
        told = [rates(summary) for summary in summaries.values()]
        lines += [*(_line(name, [one[name] for one in told]) for name in told[0]), describe_limits(self.limits)]
        lines += self._ratio_lines()
        lines += ["", f"before: {self.machine_before.describe()}", f"after:  {self.machine_after.describe()}"]
        return "\n".join(lines)

    def json(self) -> str:
        """Formats the report as one object; figures without values are null."""
        report = {
            "load": self.load,
            "limits": asdict(self.limits),
            "machine": {"before": asdict(self.machine_before), "after": asdict(self.machine_after)},
            "modes": {
                mode: {
                    "all": asdict(summarize(rounds, self.limits)),
                    "rounds": [asdict(summarize([one], self.limits)) for one in rounds],
                }
                for mode, rounds in self.rounds_by_mode.items()
            },
        }
        return json.dumps(without_nan(report), indent=2, allow_nan=False)

    def _ratio_lines(self) -> list[str]:
        if len(self.rounds_by_mode) != 2:
            return []
        (first, firsts), (second, seconds) = self.rounds_by_mode.items()
        lines = ["", f"{second} / {first}, all rounds (lowest .. highest round)"]
        for name, pick in LATENCIES[:4]:
            whole = _ratio(pick(summarize(seconds, self.limits)), pick(summarize(firsts, self.limits)))
            each = [
                _ratio(pick(summarize([b], self.limits)), pick(summarize([a], self.limits)))
                for a, b in zip(firsts, seconds, strict=True)
            ]
            lines.append(f"{name[:-3]:{_WIDTH}}p50 {whole:.2f} ({min(each):.2f} .. {max(each):.2f})")
        return lines


def _latency_lines(summaries: Mapping[str, ModeSummary]) -> list[str]:
    lines = [_line("p50 / p90 / p99", [""] * len(summaries))]
    for name, pick in LATENCIES:
        lines.append(_line(name, [_three(pick(summary)) for summary in summaries.values()]))
    return lines


def _line(name: str, cells: Mapping[str, Any] | Sequence[str]) -> str:
    return (f"{name:{_WIDTH}}" + "".join(f"{cell:{_WIDTH}}" for cell in cells)).rstrip()


def _three(figures: Percentiles) -> str:
    return f"{figures.p50:.1f} / {figures.p90:.1f} / {figures.p99:.1f}"


def _ratio(figures: Percentiles, base: Percentiles) -> float:
    return figures.p50 / base.p50 if base.p50 else math.nan
