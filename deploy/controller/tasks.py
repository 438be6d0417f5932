"""Tasks that outlive the calls that began them, steps that are tried until they succeed, and the events they note."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine

from router.workers.controller_port import ControllerEvent
from wire.errors import BatonError

PAUSE_S = 1.0
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


class Tasks:
    """The tasks begun here that have not ended yet. A failure is logged; waiting for the tasks does not raise it."""

    def __init__(self) -> None:
        self._unended: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._unended.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancels all tasks. Does not wait for their end."""
        for task in self._unended:
            task.cancel()

    async def wait(self) -> None:
        """Returns when all tasks that are under way now have ended, in whatever way."""
        if self._unended:
            await asyncio.wait(self._unended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._unended.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())


async def repeat(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """Takes one step after another, until cancelled; notes failures as `persist` does, and goes on a second later."""
    while True:
        await persist(what, step, events)


async def persist(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """Takes the same step until it succeeds, and tries again a second after a failure.

    Notes a failure as an event unless it is for the reason of the one before.
    """
    noted = ""
    while True:
        try:
            return await step()
        except Exception as error:
            log.exception("%s failed", what)
            if (reason := reason_of(error)) != noted:
                events.note(f"{what} failed, and goes on: {reason}")
            noted = reason
            await asyncio.sleep(PAUSE_S)


def reason_of(error: Exception) -> str:
    """Returns the words of an error for an event."""
    return error.message if isinstance(error, BatonError) else repr(error)
