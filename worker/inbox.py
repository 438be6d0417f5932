"""How other threads reach the engine's thread."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in order of arrival, and a bell. Safe to use from any thread; one thread takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._items: deque[T] = deque()
        self._rung = False
        self._closed = False

    def put(self, item: T) -> bool:
        """Adds an item; False if the inbox is closed and nobody will take it."""
        with self._condition:
            if not self._closed:
                self._items.append(item)
                self._condition.notify()
            return not self._closed

    def ring(self) -> None:
        """Wakes the taker, though there may be nothing to take."""
        with self._condition:
            self._rung = True
            self._condition.notify()

    def take(self, timeout_s: float) -> list[T]:
        """All items, once there are any or the bell has rung or the inbox is closed; blocks at most `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._items or self._rung or self._closed, timeout_s)
            items = list(self._items)
            self._items.clear()
            self._rung = False
            return items

    def close(self) -> None:
        """Lets nothing more in. What is in can still be taken."""
        with self._condition:
            self._closed = True
            self._condition.notify()
