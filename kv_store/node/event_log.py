"""The events of an arena's full blocks, in a ring, and the place of a subscriber in them.

    subscriber                              directory
    after: epoch, number, slot ───────────▶ the events behind `number`, if the ring and the epoch reach back to it;
                                            else `cleared`, and a snapshot, some slots with each page
                               ◀─────────── EventPage: after, cursor, events

The directory knows no subscribers: a silent subscriber costs nothing, and falls out of the ring. Reading a page changes
nothing: a lost page is asked for again, and `after` shows a page that does not continue the last.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from wire.ids import BlockKey
from wire.tier import COLD_TIERS, EventKind, Tier

MAX_PAGE_BLOCKS = 1024
"""Bound on the blocks of a page, and on its slots of a snapshot: 35 KB on a line, and a millisecond of the directory.
"""
NUM_PLACES = 1 << 16
EVENT_TIERS = (Tier.HOST, *COLD_TIERS)
_EVENT = struct.Struct("BB32s")
_KINDS = (EventKind.STORED, EventKind.REMOVED)


@dataclass(frozen=True)
class EventCursor:
    """A subscriber's place in an epoch's events: after event `number`. slot: progress of a snapshot under way, or 0."""

    epoch: str = ""
    number: int = 0
    slot: int = 0


@dataclass(frozen=True)
class BlockEvents:
    """Events of one kind in one tier, in order. CLEARED has no keys: all blocks of the tier are gone."""

    kind: EventKind
    tier: Tier
    keys: list[BlockKey]


@dataclass(frozen=True)
class EventPage:
    """The events between two places."""

    after: EventCursor
    cursor: EventCursor
    events: list[BlockEvents]


class EventSignal:
    """Callbacks that the next `notify` calls once and drops. Thread-safe."""

    def __init__(self) -> None:
        self._wakes: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        return len(self._wakes)

    @contextmanager
    def subscribed(self, wake: Callable[[], object]) -> Iterator[None]:
        """Registers `wake` for the next `notify` within the context, on whose thread it must not block."""
        with self._lock:
            self._wakes.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes = [one for one in self._wakes if one is not wake]

    def notify(self) -> None:
        """Wakes all waiting subscribers; costs next to nothing without any."""
        if self._wakes:
            with self._lock:
                wakes, self._wakes = self._wakes, []
            for wake in wakes:
                wake()


class BlockEventLog:
    """The last `num_places` events of an epoch, 34 bytes each; `number` is the last event's, from 1. Not thread-safe.

    signal: notifies at each event.
    """

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self.number = 0
        self.signal = EventSignal()
        self._num_places = num_places
        self._ring = bytearray(num_places * _EVENT.size)

    def note(self, kind: EventKind, tier: Tier, key: bytes) -> None:
        """Adds an event, overwriting the oldest."""
        at = self.number % self._num_places * _EVENT.size
        _EVENT.pack_into(self._ring, at, _KINDS.index(kind), EVENT_TIERS.index(tier), key)
        self.number += 1
        self.signal.notify()

    def reaches(self, number: int) -> bool:
        """Tells whether all events after a number are in the ring."""
        return max(0, self.number - self._num_places) <= number <= self.number

    def after(self, number: int, max_events: int) -> list[BlockEvents]:
        """Lists at most `max_events` events after a number, which the ring must reach."""
        events = self._read(range(number, min(self.number, number + max_events)))
        groups = groupby(events, key=lambda event: event[:2])
        return [
            BlockEvents(_KINDS[kind], EVENT_TIERS[tier], [BlockKey(key) for _, _, key in group])
            for (kind, tier), group in groups
        ]

    def _read(self, numbers: range) -> Iterator[tuple[int, int, bytes]]:
        for number in numbers:
            kind, tier, key = _EVENT.unpack_from(self._ring, number % self._num_places * _EVENT.size)
            yield kind, tier, key
