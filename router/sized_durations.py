"""Durations learned by a size, as by a number of tokens: a line through medians, and the durations of like sizes."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

MAX_KEPT = 16
"""Bound on the durations of one magnitude."""
MIN_KEPT = 3
"""Least durations of a magnitude that count for the line, so that one may be an outlier."""
MIN_STEP = 1.5
"""Least ratio of two sizes that tell what a unit costs."""


@dataclass(frozen=True)
class LinearDuration:
    """A duration that grows with a size: a fixed part, and as much for each unit."""

    fixed: float
    per_unit: float

    def at(self, size: int) -> float:
        return self.fixed + self.per_unit * size


class SizedDurations:
    """The last durations of each magnitude of their size, in any unit of time. New sizes do not push out old ones.

    line: the median slope between the medians of magnitudes, so that no single duration moves it far; None before two
    magnitudes are known.
    """

    def __init__(self) -> None:
        self.line: LinearDuration | None = None
        self._kept: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, tuple[float, float]] = {}

    def learn(self, size: int, took: float) -> None:
        kept = self._kept.setdefault(magnitude := size.bit_length(), deque(maxlen=MAX_KEPT))
        kept.append((size, took))
        if len(kept) >= MIN_KEPT:
            sizes, all_took = zip(*kept, strict=True)
            self._medians[magnitude] = median(sizes), median(all_took)
            self.line = _fitted(sorted(self._medians.values()))

    def at(self, size: int) -> float | None:
        """Returns the duration between the medians beside a size, or on their straight line; None without a line."""
        if self.line is None:
            return None
        points = sorted(self._medians.values())
        place = min(max(bisect_left(points, (size, 0.0)), 1), len(points) - 1)
        (a, b), (x, y) = points[place - 1], points[place]
        return max(b + max(y - b, 0.0) * (size - a) / max(x - a, 1), 0.0)

    def like(self, size: int) -> list[float]:
        """Returns the durations of sizes of the same magnitude, ascending."""
        return sorted(took for _, took in self._kept.get(size.bit_length(), ()))


def _fitted(points: Sequence[tuple[float, float]]) -> LinearDuration | None:
    """Draws the line through medians, in ascending order of size; neither of its parts is negative."""
    slopes = [(y - b) / (x - a) for (a, b), (x, y) in combinations(points, 2) if x >= MIN_STEP * a]
    if not slopes:
        return None
    per_unit = max(median(slopes), 0.0)
    fixed = median(took - per_unit * size for size, took in points)
    if fixed < 0:
        return LinearDuration(0.0, median(took / max(size, 1) for size, took in points))
    return LinearDuration(fixed, per_unit)
