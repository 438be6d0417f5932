"""The host tier of a library: an arena and its directory in this process, behind the seam of cold tiers."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence

from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.directory_port import Block, Hold
from kv_store.tiers.contents import HostTier
from wire.block_names import BlockName
from wire.errors import ConfigError
from wire.ids import AttemptId, BlockKey
from wire.layout import KVLayout
from wire.tier import FarStatus

_ME = "library"
_LEASE_TTL_S = 60.0


class ArenaTier(HostTier):
    """A ColdTier that keeps the most recently used blocks in at most `max_bytes` of memory. For one thread.

    A held block is not evicted until its hold ends. Raises ConfigError if not one block fits.
    """

    def __init__(self, layout: KVLayout, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_bytes < layout.block_bytes:
            raise ConfigError(f"host_memory: a block of this model takes {layout.block_bytes} bytes")
        num_slots = max_bytes // layout.block_bytes
        self._payload_bytes = layout.payload_bytes
        super().__init__(Directory(num_slots, clock, block_bytes=layout.block_bytes))
        self._arena = Arena.anonymous(layout.block_bytes, num_slots)
        self._counted = Counter[str]()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._directory.records.exists(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        lease = self._directory.lease(_ME, [name.key for name in names], _LEASE_TTL_S)
        try:
            for name, entry, payload in zip(names, lease.entries, into, strict=True):
                if entry is None:
                    self._counted["misses"] += 1
                    return
                payload[:] = self._arena.slot(entry.slot)[: self._payload_bytes]
                if checksum_of(payload) != entry.checksum:
                    self._counted["corrupt"] += 1
                    self._directory.reject([Block(entry.slot, name, entry.checksum)])
                    return
                self._counted["hits"] += 1
                yield entry.checksum
        finally:
            self._directory.release(lease.lease_id)

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        return self._store(name, payload, checksum, None)

    def hold(self, attempt_id: AttemptId, name: BlockName, payload: memoryview, ttl_s: float) -> bool:
        """Stores a block unless it is here, and holds it for `ttl_s` seconds; False if held blocks fill the arena."""
        return self._store(name, payload, checksum_of(payload), Hold(attempt_id, ttl_s))

    def release(self, attempt_id: AttemptId) -> None:
        """Ends a hold, if there is one."""
        self._directory.release_holds([attempt_id])

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._directory.delete(keys)

    def take_lost(self) -> list[BlockKey]:
        """Returns none: no directory is told of this arena's blocks."""
        return []

    def status(self) -> FarStatus:
        return FarStatus(self.tier, "up", **self._counted)

    def close(self) -> None:
        self._arena.close()

    def _store(self, name: BlockName, payload: memoryview, checksum: bytes, hold: Hold | None) -> bool:
        reservation = self._directory.reserve(_ME, [name], hold)
        [slot] = reservation.slots
        if slot is None:
            self._counted["refused"] += 1 - reservation.num_resident
            return reservation.num_resident == 1
        self._arena.slot(slot)[: self._payload_bytes] = payload
        self._counted["written"] += 1
        return self._directory.commit(_ME, [Block(slot, name, checksum)], hold) == 1
