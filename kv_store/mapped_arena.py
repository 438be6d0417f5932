"""The mapping of a node's arena in one of its processes, with the directory; leases of its blocks."""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort, EpochChanged
from kv_store.node.messages import NO_LEASE, Block, Entry
from wire.block_names import BlockName
from wire.errors import ConfigError, StoreError
from wire.ids import BlockKey, SlotId
from wire.layout import KVLayout
from wire.tier import FarStatus, Tier

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Leased:
    """Entries of blocks under a lease. has_held: the lease had not expired at its release; else no read counts."""

    entries: Sequence[Entry | None]
    has_held: bool = False


@contextmanager
def leased(directory: DirectoryPort, reader: str, keys: Sequence[BlockKey], ttl_s: float) -> Iterator[Leased]:
    """Leases blocks until the body ends. Raises StoreError without the directory."""
    lease = directory.lease(reader, keys, ttl_s)
    blocks = Leased(lease.entries)
    try:
        yield blocks
    finally:
        blocks.has_held = lease.lease_id == NO_LEASE or directory.release(lease.lease_id)


class MappedArena:
    """The mapping of a node's arena, replaced after a restart of its directory.

    num_failed: calls that failed because the directory was unreachable or had restarted. num_corrupt: blocks rejected
    for a wrong checksum.
    """

    def __init__(self, layout: KVLayout, arena: Arena, directory: DirectoryPort) -> None:
        if arena.block_bytes != layout.block_bytes:
            raise ConfigError(f"an arena of {arena.block_bytes}-byte slots for blocks of {layout.block_bytes} bytes")
        self.directory = directory
        self.num_failed = self.num_corrupt = 0
        self._arena = arena
        self._is_stale = self._is_unreachable = False
        self._scratch = memoryview(bytearray(layout.payload_bytes))

    @property
    def block_bytes(self) -> int:
        return self._arena.block_bytes

    def attach(self) -> None:
        """Maps the new arena if the directory has restarted. Call it before any use of a slot. Raises StoreError."""
        if not self._is_stale:
            return
        arena = Arena.open(self.directory.attach().arena_path)
        if arena.block_bytes != self.block_bytes:
            arena.close()
            raise StoreError(f"the new arena has slots of {arena.block_bytes} bytes")
        self._arena.close()
        self._arena = arena
        self._is_stale = False

    def payload(self, slot: SlotId | None) -> memoryview:
        """Views the payload of a slot; for None, a buffer for one block at a time."""
        return self._scratch if slot is None else self._arena.slot(slot)[: len(self._scratch)]

    def payloads(self, first: SlotId, num_slots: int) -> memoryview:
        """Views the payloads of consecutive slots, if `joins_payloads`."""
        return self._arena.slot(first, num_slots)

    @property
    def joins_payloads(self) -> bool:
        """Whether payloads fill their slots, so that a copy may take several."""
        return len(self._scratch) == self.block_bytes

    def reject(self, tier: Tier, name: BlockName, slot: SlotId | None, checksum: bytes) -> None:
        """Rejects a block with another checksum after its copy to a page: takes it out of the index, if it is there."""
        self.num_corrupt += 1
        log.warning("block %s of tier %s came to its page with a wrong checksum", name.key.hex()[:16], tier)
        if slot is not None:
            self.directory.reject([Block(slot, name, checksum)])

    def or_else(self, otherwise: T, action: Callable[[], T]) -> T:
        """Runs an action; if the directory is unreachable, counts a failure and returns `otherwise`."""
        try:
            answer = action()
        except EpochChanged:
            log.warning("the arena's directory has restarted: what was in it is lost")
            self._is_stale = True
        except StoreError as error:
            if not self._is_unreachable:
                log.warning("the host tier is passed over: %s", error)
            self._is_unreachable = True
        else:
            self._is_unreachable = False
            return answer
        self.num_failed += 1
        return otherwise


class ArenaBlocks:
    """A BlockSource over an arena and its directory in this process. reader, ttl_s: its leases'. For one thread."""

    tier = Tier.HOST

    def __init__(self, directory: DirectoryPort, arena: Arena, payload_bytes: int, reader: str, ttl_s: float) -> None:
        self._directory = directory
        self._arena = arena
        self._payload_bytes = payload_bytes
        self._reader = reader
        self._ttl_s = ttl_s
        self._counted = Counter[str]()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._directory.records.exists(keys)

    def get(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> Generator[bytes, None, None]:
        with leased(self._directory, self._reader, [name.key for name in names], self._ttl_s) as blocks:
            for name, entry, payload in zip(names, blocks.entries, into, strict=True):
                if entry is None:
                    self._counted["misses"] += 1
                    return
                payload[:] = self._payload(entry.slot)
                if checksum_of(payload) != entry.checksum:
                    self._counted["corrupt"] += 1
                    self._reject(Block(entry.slot, name, entry.checksum))
                    return
                self._counted["hits"] += 1
                yield entry.checksum

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._directory.delete(keys)

    def status(self) -> FarStatus:
        return FarStatus(tier=self.tier, state="up", **self._counted)

    def close(self) -> None:
        self._arena.close()

    def _payload(self, slot: SlotId) -> memoryview:
        return self._arena.slot(slot)[: self._payload_bytes]

    def _reject(self, block: Block) -> None:
        self._directory.reject([block])
