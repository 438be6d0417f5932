"""The last events of a cluster, for its operator."""

import json
import logging
from collections import deque
from collections.abc import Callable

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

    def encode(self) -> str:
        """Returns JSON, `[{"age_s", "text"}]`, newest last."""
        now = self._clock()
        return json.dumps([{"age_s": round(now - at, 3), "text": text} for at, text in self._events])
