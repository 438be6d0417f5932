"""The host tier as a process uses it: the arena's bytes, by leave of its directory."""

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort
from wire.directory import Block, Entry, Hold, Lease, Reservation
from wire.errors import ConfigError, StoreError
from wire.frame import checksum_of
from wire.ids import PageId
from wire.keys import BlockName
from wire.layout import KVLayout

_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.02

log = logging.getLogger(__name__)


class HostTier:
    """Reads and writes of slots. StoreError if the directory is out of reach. For one thread, but for `lose`."""

    def __init__(self, layout: KVLayout, arena: Arena, directory: DirectoryPort) -> None:
        if arena.block_bytes != layout.block_bytes:
            raise ConfigError(f"an arena of {arena.block_bytes}-byte slots for blocks of {layout.block_bytes} bytes")
        self.num_corrupt = 0
        self._payload_bytes = layout.payload_bytes
        self._arena = arena
        self._directory = directory
        self._is_lost = False
        self._me = secrets.token_hex(8)

    def lose(self) -> None:
        """Notes a restart of the directory: the mapped arena is that of another epoch."""
        self._is_lost = True

    def attach(self) -> None:
        """Maps the directory's arena anew if it was lost. To be called before the methods below."""
        if not self._is_lost:
            return
        info = self._directory.attach()
        arena = Arena.open(info.arena_path)
        if arena.block_bytes != self._arena.block_bytes:
            arena.close()
            raise StoreError(f"the new arena has slots of {arena.block_bytes} bytes")
        self._arena.close()
        self._arena = arena
        self._is_lost = False

    def payload(self, slot: PageId) -> memoryview:
        return self._arena.slot(slot)[: self._payload_bytes]

    def lease(self, names: Sequence[BlockName]) -> Lease:
        """Leases blocks for long enough to copy them."""
        ttl_s = _LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(names)
        return self._directory.lease(self._me, [name.key for name in names], ttl_s)

    def release(self, lease: Lease) -> bool:
        return self._directory.release(lease.lease_id)

    def read(self, name: BlockName, entry: Entry) -> memoryview | None:
        """Reads a leased block's payload if its checksum is right; else withdraws the block."""
        payload = self.payload(entry.slot)
        if checksum_of(payload) == entry.checksum:
            return payload
        self.num_corrupt += 1
        log.warning("slot %d of the arena does not hold what was written there: its block is withdrawn", entry.slot)
        self._directory.withdraw([Block(entry.slot, name, entry.checksum)])
        return None

    def withdraw(self, names: Sequence[BlockName]) -> None:
        """Makes blocks unfindable, with any bytes."""
        self.attach()
        lease = self.lease(names)
        try:
            found = zip(names, lease.entries, strict=True)
            self._directory.withdraw([Block(entry.slot, name, entry.checksum) for name, entry in found if entry])
        finally:
            self.release(lease)

    def reserve(self, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        return self._directory.reserve(self._me, names, hold)

    def commit(self, blocks: Sequence[Block], hold: Hold | None) -> int:
        return self._directory.commit(self._me, blocks, hold) if blocks else 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Gives back the reserved slots if the body fails before its commit."""
        try:
            yield
        except BaseException:
            with suppress(StoreError):  # else the next batch gives it back
                self._directory.abandon(self._me)
            raise

    def promote(self, blocks: Sequence[Block]) -> None:
        """Commits blocks from the cold tier, and gives back the other slots reserved for them."""
        self.commit(blocks, None)
        self._directory.mark_cold([block.name.key for block in blocks])
        self._directory.abandon(self._me)
