"""Rows of the page of claims: the words of articles, the arithmetic, the measurement, and whether the claim holds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Finding:
    """The outcome of one claim.

    holds: None where nothing is measured, and `measured` says why. decided_by: the case of several that holds, or not.
    """

    arithmetic: str
    measured: str
    holds: bool | None = None
    decided_by: str = ""


@dataclass(frozen=True)
class Chart:
    """Points of several series: lines where x is a number, bars where it is a name."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]


@dataclass(frozen=True)
class Report:
    """The findings of a family by claim, and the words that name model and baseline."""

    setting: str
    findings: Mapping[str, Finding]
    chart: Chart | None = None


@dataclass(frozen=True)
class Inputs:
    """The files that families read or make: a published trace, None without one, and a scratch folder.

    real: the checkpoint of a real model, in place of random weights.
    """

    trace: Path | None
    scratch: Path
    real: Path | None = None


@dataclass(frozen=True)
class Family:
    """Claims that one measurement settles. `claims` maps each name to the words of the articles."""

    title: str
    claims: Mapping[str, str]
    measure: Callable[[Inputs], Report]


@dataclass
class Stopwatch:
    """Seconds of several ways to do the same, taken in turns."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take_turns(self, ways: Mapping[str, Callable[[], object]], num_rounds: int) -> "Stopwatch":
        """Times each way once a round, each round another one first."""
        names = list(ways)
        for number in range(num_rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began_s = time.perf_counter()
                ways[name]()
                self.seconds.setdefault(name, []).append(time.perf_counter() - began_s)
        return self

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Divides the seconds of two ways, a ratio a round."""
        return [one / other for one, other in zip(self.seconds[slow], self.seconds[fast], strict=True)]


def spread(values: Sequence[float], unit: str = "x", digits: str = ".3g") -> str:
    """Formats the median, with the least and the greatest of several."""
    low, middle, high = (f"{one:{digits}}" for one in (min(values), median(values), max(values)))
    return f"{middle}{unit}" if len(values) == 1 else f"{middle}{unit} ({low} .. {high})"
