"""The last events of a cluster, for its operator."""

import logging
from collections import deque
from collections.abc import Callable

from router.workers.controller_port import ControllerEvent

MAX_EVENTS = 50

log = logging.getLogger(__name__)


class EventLog:
    """The last 50 events. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)

    def note(self, text: str) -> None:
        log.info("%s", text)
        self._events.append((self._clock(), text))

    def report(self) -> tuple[ControllerEvent, ...]:
        """Returns the events, newest last."""
        now = self._clock()
        return tuple(ControllerEvent(round(now - at, 3), text) for at, text in self._events)
