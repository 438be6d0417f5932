"""A worker's way to the cold tier, with faults to order."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from kv_store.tiers.cold_tier import ColdTier
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import FarStatus, StoredBlock

MAX_WAIT_S = 10.0


class ColdGate:
    """A ColdTier. What is `missing` is told to exist and then not given; `on_get` is called before each block of a get.

    `pause` makes the next blocks of a `get` wait, `go_on` lets them go.
    """

    def __init__(self, tier: ColdTier) -> None:
        self.missing: set[BlockKey] = set()
        self.on_get: Callable[[], None] = lambda: None
        self.tier = tier.tier
        self._tier = tier
        self._may_go = threading.Event()
        self._may_go.set()

    def pause(self) -> None:
        self._may_go.clear()

    def go_on(self) -> None:
        self._may_go.set()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._tier.exists(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        for name, payload in zip(names, into, strict=True):
            self.on_get()
            assert self._may_go.wait(MAX_WAIT_S), "nobody let the tier go on"
            checksum = next(self._tier.get([name], [payload]), None)
            if checksum is None or name.key in self.missing:
                return
            yield checksum

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        return self._tier.put(name, payload, checksum)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._tier.delete(keys)

    def key_pages(self) -> Iterator[Sequence[BlockKey]]:
        return self._tier.key_pages()

    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        return self._tier.describe(keys)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._tier.clear(keys)

    def sweep(self, shares: Mapping[bytes, float]) -> None:
        self._tier.sweep(shares)

    def take_lost(self) -> list[BlockKey]:
        return self._tier.take_lost()

    def status(self) -> FarStatus:
        return self._tier.status()

    def close(self) -> None:
        """Leaves the tier to those who share it."""
