"""The store as a process sees it: arena and cold tier under one lookup, around the process's device pages.

A block is copied to a device only from bytes with the right checksum, and a read from the arena counts only if its
lease held to the end.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from kv_store.block_store import StoreStatus
from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort, EpochChanged
from kv_store.tiers.cold_tier import ColdTier
from wire.directory import Block, DirectoryStatus, Entry, Hold, Lease
from wire.errors import ConfigError, StoreError
from wire.frame import checksum_of
from wire.ids import PageId, RequestId
from wire.keys import BlockName
from wire.layout import KVLayout
from wire.tier import Tier

HOLD_TTL_S = 10.0
_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.02
_COLD_LOOKUPS_AT_ONCE = 128
_COLD_BUDGET_S = 0.5
_COLD_BUDGET_PER_BLOCK_S = 0.01
T = TypeVar("T")

log = logging.getLogger(__name__)


class NodeStore:
    """A BlockStore. `fetch`, `publish` and `withdraw` are for one thread, the rest for any.

    directory: the arena's. While it is out of reach everything is a miss; after its restart the new arena is mapped.
    cold: None for no cold tier.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: Arena,
        directory: DirectoryPort,
        cold: ColdTier | None,
        pool: DevicePool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if arena.block_bytes != layout.block_bytes:
            raise ConfigError(f"an arena of {arena.block_bytes}-byte slots for blocks of {layout.block_bytes} bytes")
        self._me = secrets.token_hex(8)
        self._layout = layout
        self._arena = arena
        self._is_arena_old = False
        self._directory = directory
        self._cold = cold
        self._pool = pool
        self._clock = clock
        self._scratch = memoryview(bytearray(layout.payload_bytes))
        self._num_corrupt = 0
        self._num_failed = 0
        self._is_passed_over = False

    def fence(self) -> None:
        self._pool.fence()

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId]) -> list[Tier]:
        return self._or_else([], lambda: self._fetch(names, pages))

    def publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None) -> int:
        return self._or_else(0, lambda: self._publish(names, pages, hold))

    def withdraw(self, names: Sequence[BlockName]) -> None:
        self._or_else(None, lambda: self._withdraw(names))
        if self._cold is not None:
            self._cold.delete([name.key for name in names])

    def renew(self, request_ids: Sequence[RequestId]) -> None:
        self._or_else(0, lambda: self._directory.renew(request_ids, HOLD_TTL_S))

    def release_holds(self, request_ids: Sequence[RequestId]) -> None:
        self._or_else(0, lambda: self._directory.release_holds(request_ids))

    def status(self) -> StoreStatus:
        ask: Callable[[], DirectoryStatus | None] = self._directory.status
        return StoreStatus(
            directory=self._or_else(None, ask),
            cold=None if self._cold is None else self._cold.status(),
            block_bytes=self._layout.block_bytes,
            num_corrupt=self._num_corrupt,
            num_failed=self._num_failed,
        )

    def check(self) -> list[str]:
        return self._or_else(["the directory is out of reach"], self._directory.check)

    def _fetch(self, names: Sequence[BlockName], pages: Sequence[PageId]) -> list[Tier]:
        lease = self._lease(names)
        try:
            with self._writing():
                tiers = self._copy_in(names, lease.entries, pages)
        finally:
            held = self._directory.release(lease.lease_id)
        return tiers if held else []

    def _publish(self, names: Sequence[BlockName], pages: Sequence[PageId], request_id: RequestId | None) -> int:
        self._attach()
        hold = None if request_id is None else Hold(request_id, HOLD_TTL_S)
        with self._writing():
            reservation = self._directory.reserve(self._me, names, hold)
            blocks = [
                self._copy_out(name, page, slot)
                for name, page, slot in zip(names, pages, reservation.slots, strict=True)
                if slot is not None
            ]
            return reservation.num_resident + self._commit(blocks, hold)

    def _withdraw(self, names: Sequence[BlockName]) -> None:
        lease = self._lease(names)
        try:
            found = zip(names, lease.entries, strict=True)
            self._directory.withdraw([Block(entry.slot, name, entry.checksum) for name, entry in found if entry])
        finally:
            self._directory.release(lease.lease_id)

    def _attach(self) -> None:
        """Maps the directory's arena anew if it has restarted. Comes before all that is done with slots."""
        if not self._is_arena_old:
            return
        arena = Arena.open(self._directory.attach().arena_path)
        if arena.block_bytes != self._arena.block_bytes:
            arena.close()
            raise StoreError(f"the new arena has slots of {arena.block_bytes} bytes")
        self._arena.close()
        self._arena = arena
        self._is_arena_old = False

    def _lease(self, names: Sequence[BlockName]) -> Lease:
        """Leases blocks for long enough to copy them."""
        self._attach()
        ttl_s = _LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(names)
        return self._directory.lease(self._me, [name.key for name in names], ttl_s)

    def _commit(self, blocks: Sequence[Block], hold: Hold | None) -> int:
        return self._directory.commit(self._me, blocks, hold) if blocks else 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Gives back the reserved slots if the body fails before its commit."""
        try:
            yield
        except BaseException:
            with suppress(StoreError):  # else the next batch gives it back
                self._directory.abandon(self._me)
            raise

    def _payload(self, slot: PageId) -> memoryview:
        return self._arena.slot(slot)[: self._layout.payload_bytes]

    def _prefix_len(self, names: Sequence[BlockName], entries: Sequence[Entry | None]) -> int:
        """Measures the longest prefix of `names` without a hole, over both tiers."""
        holes = [index for index, entry in enumerate(entries) if entry is None]
        for start in range(0, len(holes), _COLD_LOOKUPS_AT_ONCE):
            asked = holes[start : start + _COLD_LOOKUPS_AT_ONCE]
            for index, there in zip(asked, self._in_cold([names[index] for index in asked]), strict=True):
                if not there:
                    return index
        return len(names)

    def _in_cold(self, names: Sequence[BlockName]) -> list[bool]:
        if self._cold is None:
            return [False] * len(names)
        there = self._cold.exists([name.key for name in names if not name.is_tail])
        return there + [False] * (len(names) - len(there))  # a tail comes last, and is never there

    def _copy_in(
        self, names: Sequence[BlockName], entries: Sequence[Entry | None], pages: Sequence[PageId]
    ) -> list[Tier]:
        """Copies the longest prefix that proves good; blocks from the cold tier go into the arena on the way."""
        num_blocks = self._prefix_len(names, entries)
        cold_names = [name for name, entry in zip(names[:num_blocks], entries, strict=False) if entry is None]
        slots = iter(self._directory.reserve(self._me, cold_names, None).slots if cold_names else [])
        copied: list[_Source] = []
        deadline = self._clock() + _COLD_BUDGET_S + _COLD_BUDGET_PER_BLOCK_S * len(cold_names)
        for name, entry, page in zip(names[:num_blocks], entries, pages, strict=False):
            source = self._from_cold(name, next(slots), deadline) if entry is None else self._from_arena(name, entry)
            if source is None:
                break
            self._pool.write_page(page, source.payload)
            copied.append(source)
        if cold_names:
            self._promote([source.promoted for source in copied if source.promoted is not None])
        return [source.tier for source in copied]

    def _from_arena(self, name: BlockName, entry: Entry) -> "_Source | None":
        """Reads a leased block if its checksum is right; else withdraws it."""
        payload = self._payload(entry.slot)
        if checksum_of(payload) == entry.checksum:
            return _Source(Tier.HOST, payload, None)
        self._num_corrupt += 1
        log.warning("slot %d of the arena does not hold what was written there: its block is withdrawn", entry.slot)
        self._directory.withdraw([Block(entry.slot, name, entry.checksum)])
        return None

    def _from_cold(self, name: BlockName, slot: PageId | None, deadline: float) -> "_Source | None":
        """Reads a block from the cold tier; None also after the deadline, when computing is quicker."""
        if self._clock() > deadline:
            return None
        into = self._scratch if slot is None else self._payload(slot)
        checksum = None if self._cold is None else self._cold.get(name, into)
        if checksum is None:
            return None
        return _Source(Tier.REDIS, into, None if slot is None else Block(slot, name, checksum))

    def _promote(self, blocks: Sequence[Block]) -> None:
        """Commits blocks from the cold tier, and gives back the other slots reserved for them."""
        self._commit(blocks, None)
        self._directory.mark_cold([block.name.key for block in blocks])
        self._directory.abandon(self._me)

    def _copy_out(self, name: BlockName, page: PageId, slot: PageId) -> Block:
        payload = self._payload(slot)
        self._pool.read_page(page, payload)
        return Block(slot, name, checksum_of(payload))

    def _or_else(self, otherwise: T, action: Callable[[], T]) -> T:
        """Runs an action; returns `otherwise` and counts a failure if the directory is out of reach."""
        try:
            answer = action()
        except EpochChanged:
            log.warning("the arena's directory has restarted: what was in it is lost")
            self._is_arena_old = True
        except StoreError as error:
            if not self._is_passed_over:
                log.warning("the host tier is passed over: %s", error)
            self._is_passed_over = True
        else:
            self._is_passed_over = False
            return answer
        self._num_failed += 1
        return otherwise


@dataclass(frozen=True)
class _Source:
    """The verified payload of a block, its tier, and the block to commit if the payload stays in the arena."""

    tier: Tier
    payload: memoryview
    promoted: Block | None
