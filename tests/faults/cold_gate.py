"""A worker's way to the cold tier, with faults to order."""

import threading
from collections.abc import Callable, Sequence

from kv_store.tiers.cold_tier import ColdStatus, ColdTier
from wire.ids import BlockKey
from wire.keys import BlockName

MAX_WAIT_S = 10.0


class ColdGate:
    """A ColdTier. What is `missing` is told to exist and then not given; `on_get` is called before each `get`.

    `pause` makes the next calls of `get` wait, `go_on` lets them go.
    """

    def __init__(self, tier: ColdTier) -> None:
        self.missing: set[BlockKey] = set()
        self.on_get: Callable[[], None] = lambda: None
        self._tier = tier
        self._may_go = threading.Event()
        self._may_go.set()

    def pause(self) -> None:
        self._may_go.clear()

    def go_on(self) -> None:
        self._may_go.set()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._tier.exists(keys)

    def get(self, name: BlockName, into: memoryview) -> bytes | None:
        self.on_get()
        assert self._may_go.wait(MAX_WAIT_S), "nobody let the tier go on"
        return None if name.key in self.missing else self._tier.get(name, into)

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        return self._tier.put(name, payload, checksum)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._tier.delete(keys)

    def status(self) -> ColdStatus:
        return self._tier.status()

    def close(self) -> None:
        """Leaves the tier to those who share it."""
