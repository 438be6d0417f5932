"""Limits on what is in use at once, and the pace of work that holds up the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from wire.errors import FIXED, Overloaded, reached

RETRY_AFTER_S = 1.0


class Limit:
    """A bound on the units in use at once: requests, or, by weight, bytes or tokens. Belongs to one event loop.

    A refusal is Overloaded, and names the bound as `reached` does. A weight of 0 is always taken.
    """

    def __init__(self, max_units: int, what: str, setting: str = FIXED) -> None:
        self.num_used = 0
        self._max_units = max_units
        self._refusal = reached(max_units, what, setting)

    @property
    def num_free(self) -> int:
        return self._max_units - self.num_used

    def take(self, weight: int = 1) -> None:
        """Takes units. Raises Overloaded where there is no room."""
        if weight and weight > self.num_free:
            raise self.refusal()
        self.num_used += weight

    def release(self, weight: int = 1) -> None:
        """Gives taken units back."""
        self.num_used -= weight

    def refusal(self) -> Overloaded:
        """Makes the error of a taker without room."""
        return Overloaded(self._refusal, RETRY_AFTER_S)

    @asynccontextmanager
    async def taken(self, weight: int = 1) -> AsyncIterator[None]:
        """Has units taken within the context. Raises Overloaded."""
        self.take(weight)
        try:
            yield
        finally:
            self.release(weight)


class Share(AbstractContextManager["Share"]):
    """The units of one holder, taken as it grows, and released together at the end of the context.

    A share is at most as large as the free rest of its limit: however many large ones there are, small ones find room.
    """

    def __init__(self, limit: Limit) -> None:
        self.num_taken = 0
        self._limit = limit

    def take(self, weight: int) -> None:
        """Takes more units. Raises Overloaded."""
        if weight and self.num_taken + weight > self._limit.num_free - weight:
            raise self._limit.refusal()
        self._limit.take(weight)
        self.num_taken += weight

    def __exit__(self, *_: object) -> None:
        self._limit.release(self.num_taken)


class Pace:
    """A pace of work that blocks the event loop: one piece after another, with pauses by its bytes.

    free_bytes: smaller work begins at once. bytes_per_s: of larger work, its pauses included.
    """

    def __init__(self, free_bytes: int, bytes_per_s: int) -> None:
        self._free_bytes = free_bytes
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()

    async def wait(self, num_bytes: int) -> None:
        """Waits in FIFO order; the next piece begins after a pause by these bytes. Its caller bounds the wait."""
        if num_bytes > self._free_bytes:
            await self._turn.acquire()
            asyncio.get_running_loop().call_later(num_bytes / self._bytes_per_s, self._turn.release)
