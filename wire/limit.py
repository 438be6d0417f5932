"""The limiter: a bound on what is in use at once, shares of it, and the pace of work that holds up the event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from wire.errors import FIXED, Overloaded, reached

RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class Limit:
    """A bound on the units in use at once: requests, or, by weight, bytes or tokens. Belongs to one event loop.

    A refusal is Overloaded, and names the bound as `reached` does. A weight of 0 is always taken.
    """

    max_units: int
    what: str
    setting: str = FIXED
    retry_after_s: float | None = RETRY_AFTER_S
    num_used: int = 0

    @property
    def num_free(self) -> int:
        return self.max_units - self.num_used

    def require(self, weight: int = 1) -> None:
        """Raises Overloaded where there is no room."""
        if weight and weight > self.num_free:
            raise self.refusal()

    def take(self, weight: int = 1) -> None:
        """Takes units. Raises Overloaded where there is no room."""
        self.require(weight)
        self.num_used += weight

    def release(self, weight: int = 1) -> None:
        """Gives taken units back."""
        self.num_used -= weight

    def refusal(self) -> Overloaded:
        """Makes the error of a taker without room."""
        return Overloaded(reached(self.max_units, self.what, self.setting), self.retry_after_s)

    @contextmanager
    def taken(self, weight: int = 1) -> Iterator[None]:
        """Has units taken within the context. Raises Overloaded."""
        self.take(weight)
        try:
            yield
        finally:
            self.release(weight)


@dataclass(eq=False)
class Share(AbstractContextManager["Share"]):
    """The units of one holder, taken as it grows, and released together at the end of the context.

    A share is at most as large as the free rest of its limit: however many large ones there are, small ones find room.
    """

    limit: Limit
    num_taken: int = 0

    def take(self, weight: int) -> None:
        """Takes more units. Raises Overloaded."""
        if weight and self.num_taken + weight > self.limit.num_free - weight:
            raise self.limit.refusal()
        self.limit.take(weight)
        self.num_taken += weight

    def __exit__(self, *_: object) -> None:
        self.limit.release(self.num_taken)


class Pace:
    """A pace of work that blocks the event loop: one piece after another, with pauses by its bytes.

    free_bytes: smaller work begins at once. bytes_per_s: of larger work, its pauses included.
    """

    def __init__(self, free_bytes: int, bytes_per_s: int) -> None:
        self._free_bytes = free_bytes
        self._bytes_per_s = bytes_per_s
        self._lock = asyncio.Lock()

    async def wait(self, num_bytes: int) -> None:
        """Waits in FIFO order; the next piece begins after a pause by these bytes. Its caller bounds the wait."""
        if num_bytes > self._free_bytes:
            await self._lock.acquire()
            asyncio.get_running_loop().call_later(num_bytes / self._bytes_per_s, self._lock.release)
