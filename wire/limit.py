"""Limits on what is in use at once, and the pace of work that holds up the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from wire.errors import FIXED, Overloaded, reached

RETRY_AFTER_S = 1.0


class Limit:
    """A bound on the units in use at once: requests, or, by weight, bytes or tokens. Belongs to one event loop.

    A taker beyond it is refused, or waits: the first come first, `max_waiting` at most, `max_wait_s` each. A refusal
    is Overloaded, and names the bound as `reached` does. A weight of 0 is always taken at once; a weight over
    `max_units` never. A taker that is cancelled, or waits in vain, has taken nothing.
    """

    def __init__(
        self, max_units: int, what: str, setting: str = FIXED, max_waiting: int = 0, max_wait_s: float = 0.0
    ) -> None:
        self.num_used = 0
        self._max_units = max_units
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        waiting = f"; up to {max_waiting:,} wait for it, {max_wait_s:g} s each" if max_waiting else ""
        self._refusal = reached(max_units, what, setting) + waiting
        self._num_waiting = 0
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def take(self, weight: int = 1) -> None:
        """Takes units without waiting. Raises Overloaded where there is no room, or others wait for it."""
        if weight and (self._num_waiting or not self._has_room(weight)):
            raise Overloaded(self._refusal, RETRY_AFTER_S)
        self.num_used += weight

    def release(self, weight: int = 1) -> None:
        """Gives taken units back."""
        self.num_used -= weight
        self._released.set()

    @asynccontextmanager
    async def taken(self, weight: int = 1) -> AsyncIterator[None]:
        """Has units taken within the context, and waits for them where takers may. Raises Overloaded."""
        await self._wait(weight)
        try:
            yield
        finally:
            self.release(weight)

    async def _wait(self, weight: int) -> None:
        if not weight or self._num_waiting >= self._max_waiting:
            self.take(weight)
            return
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s), self._turn:
                while not self._has_room(weight):
                    self._released.clear()
                    await self._released.wait()
                self.num_used += weight
        except TimeoutError as error:
            raise Overloaded(self._refusal, RETRY_AFTER_S) from error
        finally:
            self._num_waiting -= 1

    def _has_room(self, weight: int) -> bool:
        return self.num_used + weight <= self._max_units


class Pace:
    """Turns of work that holds up the event loop by its bytes: one at a time, with time for all else between.

    free_bytes: work of no more needs no turn. bytes_per_s: turns take, with the time behind them.
    """

    def __init__(self, free_bytes: int, bytes_per_s: int) -> None:
        self._free_bytes = free_bytes
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()

    async def wait(self, num_bytes: int) -> None:
        """Waits for a turn, the first come first; the next begins after a time by these bytes. Its caller bounds it."""
        if num_bytes > self._free_bytes:
            await self._turn.acquire()
            asyncio.get_running_loop().call_later(num_bytes / self._bytes_per_s, self._turn.release)
