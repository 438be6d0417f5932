"""Where the time of a request went at this worker."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from wire.pools import Role


class Phase(Enum):
    """What a request does or waits for, in this order. docs/timeline.md tells what each one means for each role."""

    QUEUE = "queue"
    WAIT_SLOT = "wait_slot"
    WAIT_PAGES = "wait_pages"
    FETCH = "fetch"
    WAIT_TURN = "wait_turn"
    COMPUTE = "compute"
    PUBLISH = "publish"
    GENERATE = "generate"


_ORDER = tuple(Phase)


@dataclass(frozen=True)
class Span:
    """One phase. Milliseconds since the call's arrival; counts that are zero are left out."""

    name: str
    start_ms: float
    duration_ms: float
    counts: Mapping[str, int] = field(default_factory=dict)


class Stopwatch:
    """Divides a request's time into phases without a gap between them. Has no clock: times are given to it."""

    def __init__(self, role: Role, arrived_s: float) -> None:
        """The queue runs from `arrived_s` on, and any other phase may be skipped. Spans carry the role's name."""
        self._role = role
        self._arrived_s = arrived_s
        self._starts_s = {Phase.QUEUE: arrived_s}
        self._counts: dict[Phase, Counter[str]] = {phase: Counter() for phase in Phase}

    @property
    def phase(self) -> Phase:
        """The phase that runs."""
        return next(reversed(self._starts_s))

    def reach(self, phase: Phase, now_s: float) -> None:
        """Ends the running phase and begins a later one. Does nothing if that one was reached or passed already."""
        if _ORDER.index(phase) > _ORDER.index(self.phase):
            self._starts_s[phase] = now_s

    def count(self, **amounts: int) -> None:
        """Adds to the counts of the running phase."""
        self._counts[self.phase].update(amounts)

    def spans(self, end_s: float) -> tuple[Span, ...]:
        """The phases so far, the running one ending at `end_s`."""
        starts = list(self._starts_s.items())
        ends_s = [start_s for _, start_s in starts[1:]] + [end_s]
        return tuple(self._span(phase, start_s, end) for (phase, start_s), end in zip(starts, ends_s, strict=True))

    def _span(self, phase: Phase, start_s: float, end_s: float) -> Span:
        counts = {name: amount for name, amount in self._counts[phase].items() if amount}
        name = f"{self._role.value}.{phase.value}"
        return Span(name, (start_s - self._arrived_s) * 1000, (end_s - start_s) * 1000, counts)
