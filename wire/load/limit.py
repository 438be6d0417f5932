"""The limiter: a bound on units in use at once, a holder's share of it, and a rate limit for blocking work."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from wire.errors import FIXED, Overloaded, reached

RETRY_AFTER_S = 1.0


@dataclass(eq=False)
class Limit:
    """A bound on the units in use at once: requests, or, by weight, bytes or tokens. Belongs to one event loop.

    what: the units' name; setting: the bound's setting; both for the message of Overloaded. A weight of 0 is never
    refused.
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
        """Raises Overloaded if fewer units are free."""
        if weight and weight > self.num_free:
            raise self.refusal()

    def take(self, weight: int = 1) -> None:
        """Takes units. Raises Overloaded if fewer are free."""
        self.require(weight)
        self.num_used += weight

    def exceed(self, weight: int = 1) -> None:
        """Takes units, even beyond the bound."""
        self.num_used += weight

    def release(self, weight: int = 1) -> None:
        """Gives taken units back."""
        self.num_used -= weight

    def refusal(self) -> Overloaded:
        """Makes the error that names the bound and its setting."""
        return Overloaded(reached(self.max_units, self.what, self.setting), self.retry_after_s)

    @contextmanager
    def taken(self, weight: int = 1) -> Iterator[None]:
        """Takes units for the length of the context. Raises Overloaded."""
        self.take(weight)
        try:
            yield
        finally:
            self.release(weight)


@dataclass(eq=False)
class Share(AbstractContextManager["Share"]):
    """The units of one holder, taken step by step, and released together at the context's end.

    A share never exceeds the free units, so that large shares leave room for small shares.
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
    """A rate limit for work that blocks the event loop: one piece at a time, with pauses between.

    free_bytes: pieces up to this size do not wait. bytes_per_s: the rate of larger pieces, from start to start.
    """

    def __init__(self, free_bytes: int, bytes_per_s: int) -> None:
        self._free_bytes = free_bytes
        self._bytes_per_s = bytes_per_s
        self._lock = asyncio.Lock()

    async def wait(self, num_bytes: int) -> None:
        """Waits in FIFO order; the next piece begins `num_bytes / bytes_per_s` later. The caller bounds the wait."""
        if num_bytes > self._free_bytes:
            await self._lock.acquire()
            asyncio.get_running_loop().call_later(num_bytes / self._bytes_per_s, self._lock.release)
