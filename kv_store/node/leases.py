"""Who reads which slots. A lease is a transfer on each of its slots, so that none is given out while it lasts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kv_store.ledger import Ledger
from kv_store.node.expiring import Expiring
from wire.ids import PageId


@dataclass(frozen=True)
class _Reading:
    reader: str
    slots: list[PageId]


class Leases:
    """Leases over a ledger's slots, by id."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._readings: Expiring[int, _Reading] = Expiring(clock)
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def transfers(self) -> Counter[PageId]:
        """Leases on each slot."""
        return Counter(slot for reading in self._readings.values() for slot in reading.slots)

    def take(self, reader: str, slots: list[PageId], ttl_s: float) -> int:
        """The id of a new lease. Ids are never used twice."""
        for slot in slots:
            self._ledger.begin_transfer(slot)
        self._num_taken += 1
        self._readings.put(self._num_taken, _Reading(reader, slots), ttl_s)
        return self._num_taken

    def end(self, lease_id: int) -> bool:
        """False if it has ended before."""
        reading = self._readings.pop(lease_id)
        if reading is not None:
            self._stop(reading)
        return reading is not None

    def end_all_of(self, reader: str) -> None:
        for lease_id, reading in self._readings.items():
            if reading.reader == reader:
                self.end(lease_id)

    def expire(self) -> None:
        for reading in self._readings.expire():
            self._stop(reading)

    def _stop(self, reading: _Reading) -> None:
        for slot in reading.slots:
            self._ledger.end_transfer(slot)
