"""What is kept for which request. A hold is one reference to each of its slots, so that none is evicted."""

from collections import Counter
from collections.abc import Callable, Iterable

from kv_store.ledger import Ledger
from kv_store.node.expiring import Expiring
from wire.directory import Hold
from wire.ids import PageId, RequestId


class Holds:
    """Holds over a ledger's slots, by request."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._held: Expiring[RequestId, dict[PageId, None]] = Expiring(clock)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def references(self) -> Counter[PageId]:
        """Requests that hold each slot."""
        return Counter(slot for held in self._held.values() for slot in held)

    def keep(self, hold: Hold, slots: Iterable[PageId]) -> None:
        """Adds slots to what a request holds, and prolongs that."""
        held = self._held.get(hold.request_id) or {}
        for slot in slots:
            if slot not in held:
                self._ledger.acquire(slot)
                held[slot] = None
        if held:
            self._held.put(hold.request_id, held, hold.ttl_s)

    def renew(self, request_id: RequestId, ttl_s: float) -> bool:
        """False if the request holds nothing."""
        held = self._held.get(request_id)
        if held is not None:
            self._held.put(request_id, held, ttl_s)
        return held is not None

    def release(self, request_id: RequestId) -> bool:
        """False if the request holds nothing."""
        held = self._held.pop(request_id)
        self._let_go(held or {})
        return held is not None

    def expire(self) -> None:
        for held in self._held.expire():
            self._let_go(held)

    def _let_go(self, held: dict[PageId, None]) -> None:
        for slot in reversed(held):  # a prefix's end is evicted before its start
            self._ledger.free(slot)
