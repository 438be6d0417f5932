"""Values that live for a time."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """Values by key, each until its time is over by `clock`. They stay until `expire` takes them out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[K, V] = {}
        self._ends: dict[K, float] = {}
        self._order: list[tuple[float, int, K]] = []
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> list[V]:
        return list(self._values.values())

    def items(self) -> list[tuple[K, V]]:
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V, ttl_s: float) -> None:
        """Stores a value. One that was there keeps its end if that is later."""
        self._values[key] = value
        end = max(self._clock() + ttl_s, self._ends.get(key, float("-inf")))
        if end != self._ends.get(key):
            self._ends[key] = end
            self._num_put += 1
            heapq.heappush(self._order, (end, self._num_put, key))

    def pop(self, key: K) -> V | None:
        self._ends.pop(key, None)
        return self._values.pop(key, None)

    def expire(self) -> list[V]:
        """Takes out the values whose time is over, in the order of their ends."""
        now, expired = self._clock(), []
        while self._order and self._order[0][0] <= now:
            end, _, key = heapq.heappop(self._order)
            if self._ends.get(key) == end:
                del self._ends[key]
                expired.append(self._values.pop(key))
        return expired
