"""The time that a request spent at this worker, by phase."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from wire.pools import Role


class Phase(Enum):
    """The phases of a request, in this order. docs/timeline.md explains each phase for each role."""

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
    """A phase, in milliseconds since the arrival; it leaves out counts of zero."""

    name: str
    start_ms: float
    duration_ms: float
    counts: Mapping[str, int] = field(default_factory=dict)


class Stopwatch:
    """A division of a request's time into phases without a gap. It has no clock: callers pass readings."""

    def __init__(self, role: Role, arrived_s: float) -> None:
        """Starts the queue at `arrived_s`; any other phase may be missing. Spans carry the role's name."""
        self._role = role
        self._arrived_s = arrived_s
        self._starts_s = {Phase.QUEUE: arrived_s}
        self._counts: dict[Phase, Counter[str]] = {phase: Counter() for phase in Phase}

    @property
    def phase(self) -> Phase:
        """The phase that runs."""
        return next(reversed(self._starts_s))

    def begin_phase(self, phase: Phase, now_s: float) -> None:
        """Ends the running phase and begins a later one. Does nothing for the running phase and earlier ones."""
        if _ORDER.index(phase) > _ORDER.index(self.phase):
            self._starts_s[phase] = now_s

    def count(self, **amounts: int) -> None:
        """Adds to the counts of the running phase."""
        self._counts[self.phase].update(amounts)

    def spans(self, end_s: float) -> tuple[Span, ...]:
        """Lists the phases so far, the running phase with `end_s` as its end."""
        starts = list(self._starts_s.items())
        ends_s = [start_s for _, start_s in starts[1:]] + [end_s]
        return tuple(self._span(phase, start_s, end) for (phase, start_s), end in zip(starts, ends_s, strict=True))

    def _span(self, phase: Phase, start_s: float, end_s: float) -> Span:
        counts = {name: amount for name, amount in self._counts[phase].items() if amount}
        name = f"{self._role.value}.{phase.value}"
        return Span(name, (start_s - self._arrived_s) * 1000, (end_s - start_s) * 1000, counts)
