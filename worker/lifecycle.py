"""A request's life at a worker, decided purely: events in, instructions out. Each role brings its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.events import Event
from engine.request import EngineRequest
from wire.errors import BatonError
from worker.instructions import Instruction


@dataclass(frozen=True)
class Withdrawn:
    """The request is over whatever the engine does: cancelled, out of time, replaced, drained, or the step failed."""

    error: BatonError


class Lifecycle(Protocol):
    """Has no clock: `now_s` are readings of one monotonic clock, that of the arrival too."""

    def start(self) -> list[Instruction]:
        """What a new request begins with."""
        ...

    def handle(self, events: Sequence[Event | Withdrawn], now_s: float) -> list[Instruction]:
        """What is to be done after the events of one step, in order. After the end nothing."""
        ...


NewLifecycle = Callable[[EngineRequest, float], Lifecycle]
"""Makes the lifecycle of a request that arrived at a reading of the clock."""
