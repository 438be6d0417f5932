"""Where the time of a request went at this worker."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One phase. Milliseconds since the call's arrival; counts that are zero are left out."""

    name: str
    start_ms: float
    duration_ms: float
    counts: Mapping[str, int] = field(default_factory=dict)


class Stopwatch:
    """Divides a request's time into phases without a gap between them. Has no clock: times are given to it."""

    def __init__(self, phases: Sequence[str], arrived_s: float) -> None:
        """`phases` in their order; the first one runs from `arrived_s` on, and any other may be skipped."""
        self._phases = phases
        self._arrived_s = arrived_s
        self._starts_s = {phases[0]: arrived_s}
        self._counts: dict[str, Counter[str]] = {phase: Counter() for phase in phases}

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return next(reversed(self._starts_s))

    def reach(self, phase: str, now_s: float) -> None:
        """Ends the running phase and begins a later one. Does nothing if that one was reached or passed already."""
        if self._phases.index(phase) > self._phases.index(self.phase):
            self._starts_s[phase] = now_s

    def count(self, **amounts: int) -> None:
        """Adds to the counts of the running phase."""
        self._counts[self.phase].update(amounts)

    def spans(self, end_s: float) -> tuple[Span, ...]:
        """The phases so far, the running one ending at `end_s`."""
        starts = list(self._starts_s.items())
        ends_s = [start_s for _, start_s in starts[1:]] + [end_s]
        return tuple(self._span(phase, start_s, end) for (phase, start_s), end in zip(starts, ends_s, strict=True))

    def _span(self, phase: str, start_s: float, end_s: float) -> Span:
        counts = {name: amount for name, amount in self._counts[phase].items() if amount}
        return Span(phase, (start_s - self._arrived_s) * 1000, (end_s - start_s) * 1000, counts)
