"""The host tier of a library: an arena and its directory in this process, as a cold tier."""

import time
from collections.abc import Callable

from kv_store.frame import checksum_of
from kv_store.mapped_arena import ArenaBlocks
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node.messages import Block, Hold
from kv_store.tiers.contents import HostTier
from wire.block_names import BlockName
from wire.errors import ConfigError
from wire.ids import AttemptId, BlockKey
from wire.layout import KVLayout

_ME = "library"
_LEASE_TTL_S = 60.0


class ArenaTier(ArenaBlocks, HostTier):
    """A ColdTier that keeps the most recently used blocks in at most `max_bytes` of memory. For one thread.

    A held block is not evicted until its hold ends. Raises ConfigError if not one block fits.
    """

    def __init__(self, layout: KVLayout, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_bytes < layout.block_bytes:
            raise ConfigError(f"host_memory: a block of this model takes {layout.block_bytes} bytes")
        num_slots = max_bytes // layout.block_bytes
        directory = Directory(num_slots, clock, block_bytes=layout.block_bytes)
        arena = Arena.anonymous(layout.block_bytes, num_slots)
        super().__init__(directory, arena, layout.payload_bytes, _ME, _LEASE_TTL_S)

    def put(self, name: BlockName, payload: memoryview, checksum: bytes) -> bool:
        return self._store(name, payload, checksum, None)

    def hold(self, attempt_id: AttemptId, name: BlockName, payload: memoryview, ttl_s: float) -> bool:
        """Stores a block unless it is here, and holds it for `ttl_s` seconds; False if held blocks fill the arena."""
        return self._store(name, payload, checksum_of(payload), Hold(attempt_id, ttl_s))

    def release(self, attempt_id: AttemptId) -> None:
        """Ends a hold, if there is one."""
        self._directory.release_holds([attempt_id])

    def take_lost(self) -> list[BlockKey]:
        """Returns none: no directory is told of this arena's blocks."""
        return []

    def _store(self, name: BlockName, payload: memoryview, checksum: bytes, hold: Hold | None) -> bool:
        reservation = self._directory.reserve(_ME, [name], hold)
        [slot] = reservation.slots
        if slot is None:
            self._counted["refused"] += 1 - reservation.num_resident
            return reservation.num_resident == 1
        self._payload(slot)[:] = payload
        self._counted["written"] += 1
        return self._directory.commit(_ME, [Block(slot, name, checksum)], hold) == 1
