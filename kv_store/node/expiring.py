"""Values that expire by a clock, and keys ordered by number."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

_MAX_STALE = 1024
K = TypeVar("K")
V = TypeVar("V")


class Ranking(Generic[K]):
    """Keys ordered by number, the lowest first. Each call takes logarithmic time, amortised."""

    def __init__(self) -> None:
        self._ranks: dict[K, float] = {}
        self._order: list[tuple[float, int, K]] = []
        self._counter = count()

    def put(self, key: K, rank: float) -> None:
        """Sets a key's number."""
        self._ranks[key] = rank
        heapq.heappush(self._order, (rank, next(self._counter), key))
        if len(self._order) > 2 * len(self._ranks) + _MAX_STALE:
            self._order = [(rank, next(self._counter), key) for key, rank in self._ranks.items()]
            heapq.heapify(self._order)

    def discard(self, key: K) -> None:
        """Removes a key, if it is there."""
        self._ranks.pop(key, None)

    def rank_of(self, key: K) -> float | None:
        return self._ranks.get(key)

    def first(self) -> K | None:
        """Returns the key with the lowest number; among equals the earliest."""
        while self._order:
            rank, _, key = self._order[0]
            if self._ranks.get(key) == rank:
                return key
            heapq.heappop(self._order)
        return None


class Expiring(Generic[K, V]):
    """Values by key, each until its end by `clock`; only `expire` removes values past their end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[K, V] = {}
        self._ends = Ranking[K]()

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> list[tuple[K, V]]:
        return [*self._values.items()]

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V, ttl_s: float) -> None:
        """Stores a value. A known key keeps a later end."""
        self._values[key] = value
        end = self._clock() + ttl_s
        self._ends.put(key, max(end, self._ends.rank_of(key) or end))

    def pop(self, key: K) -> V | None:
        self._ends.discard(key)
        return self._values.pop(key, None)

    def expire(self) -> list[V]:
        """Removes and returns the values past their end, in order."""
        now, expired = self._clock(), []
        while (key := self._ends.first()) is not None and (self._ends.rank_of(key) or 0.0) <= now:
            self._ends.discard(key)
            expired.append(self._values.pop(key))
        return expired
