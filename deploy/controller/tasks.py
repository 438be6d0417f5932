"""Tasks that go on when the call that began them has returned."""

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


class Tasks:
    """Those that were begun here and have not ended yet. A failure is logged, and nobody who waits hears of it."""

    def __init__(self) -> None:
        self._unended: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._unended.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Tells all to end. Does not wait for that."""
        for task in self._unended:
            task.cancel()

    async def wait(self) -> None:
        """Returns when all that are under way now have ended, in whatever way."""
        if self._unended:
            await asyncio.wait(self._unended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._unended.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())
