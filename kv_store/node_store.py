"""The store as a process sees it: arena, other nodes and cold tiers under one lookup, around its device pages.

A block is copied to a device only from bytes with the right checksum, and a read from the arena counts only if its
lease held to the end.
"""

import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress, islice, takewhile
from typing import TypeVar

from kv_store.block_store import StoreStatus
from kv_store.device_pool import DevicePool
from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort, EpochChanged
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from wire.directory import Block, DirectoryStatus, Entry, Hold, Lease
from wire.errors import ConfigError, StoreError
from wire.ids import BlockKey, PageId, RequestId
from wire.keys import BlockName
from wire.layout import KVLayout
from wire.tier import COLD_TIERS, READ_COUNTS, ColdStatus, Tier

HOLD_TTL_S = 10.0
_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.02
_LOOKUPS_AT_ONCE = 128
_FAR_BUDGET_S = 0.5
_FAR_BUDGET_PER_BLOCK_S = 0.01
_MAX_PEERS = 64
_MAX_SUM_THREADS = 4
T = TypeVar("T")

log = logging.getLogger(__name__)


class NodeStore:
    """A BlockStore. `fetch`, `publish` and `withdraw` are for one thread, the rest for any.

    directory: the arena's. While it is out of reach everything is a miss; after its restart the new arena is mapped.
    cold: tiers below the arena, nearest first. peer: makes the source of a node's blocks from the address of its port.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: Arena,
        directory: DirectoryPort,
        cold: Sequence[ColdTier],
        pool: DevicePool,
        clock: Callable[[], float] = time.monotonic,
        peer: Callable[[str], BlockSource] | None = None,
    ) -> None:
        if arena.block_bytes != layout.block_bytes:
            raise ConfigError(f"an arena of {arena.block_bytes}-byte slots for blocks of {layout.block_bytes} bytes")
        self._me = secrets.token_hex(8)
        self._layout = layout
        self._arena = arena
        self._is_arena_old = False
        self._directory = directory
        self._cold = list(cold)
        self._make_peer = peer
        self._peers: OrderedDict[str, BlockSource] = OrderedDict()
        self._pool = pool
        self._clock = clock
        self._scratch = memoryview(bytearray(layout.payload_bytes))
        # Of a CPU's pages one by one, while they are in its cache; of a GPU's in threads, for copies are faster.
        self._checksums = (
            partial(map, checksum_of) if pool.num_copied_at_once == 1 else partial(_threads().map, checksum_of)
        )
        self._num_corrupt = 0
        self._num_failed = 0
        self._is_passed_over = False

    def fence(self) -> None:
        self._pool.fence()

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], sources: Sequence[str] = ()) -> list[Tier]:
        return self._or_else([], lambda: self._fetch(names, pages, sources))

    def longest(self, names: Sequence[BlockName], starts: Sequence[int], sources: Sequence[str] = ()) -> slice:
        return self._or_else(slice(0, 0), lambda: self._longest(names, starts, sources))

    def publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None) -> int:
        return self._or_else(0, lambda: self._publish(names, pages, hold))

    def withdraw(self, names: Sequence[BlockName], sources: Sequence[str] = ()) -> None:
        keys = [name.key for name in names]
        self._or_else(0, lambda: self._directory.forget(keys))
        for source in (*self._peers_at(sources), *self._cold):
            source.delete(keys)

    def renew(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        return self._or_else([], lambda: self._directory.renew(request_ids, HOLD_TTL_S))

    def release_holds(self, request_ids: Sequence[RequestId]) -> None:
        self._or_else(0, lambda: self._directory.release_holds(request_ids))

    def status(self) -> StoreStatus:
        ask: Callable[[], DirectoryStatus | None] = self._directory.status
        return StoreStatus(
            directory=self._or_else(None, ask),
            cold=[*self._peers_status(), *(tier.status() for tier in self._cold)],
            block_bytes=self._layout.block_bytes,
            num_corrupt=self._num_corrupt,
            num_failed=self._num_failed,
        )

    def check(self) -> list[str]:
        return self._or_else(["the directory is out of reach"], self._directory.check)

    def _fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], addresses: Sequence[str]) -> list[Tier]:
        lease = self._lease(names)
        try:
            with self._writing():
                tiers = self._copy_in(names, lease.entries, pages, [*self._peers_at(addresses), *self._cold])
        finally:
            self._pool.wait()  # no copy reads a slot, or writes a page, that is somebody else's by then
            held = self._directory.release(lease.lease_id)
        return tiers if held else []

    def _longest(self, names: Sequence[BlockName], starts: Sequence[int], addresses: Sequence[str]) -> slice:
        """Goes from the end, from hole to hole: blocks before a hole may be used without it."""
        is_here = self._directory.exists([name.key for name in names])
        missing = [place for place, here in enumerate(is_here) if not here]
        sources, deadline = [*self._peers_at(addresses), *self._cold], self._clock() + _FAR_BUDGET_S
        far = self._far([names[place] for place in reversed(missing)], sources, deadline)
        end = len(names)
        for place, source in zip(reversed(missing), far, strict=True):
            if not end or place < starts[end - 1]:
                break
            if source is None:
                end = place
        return slice(starts[end - 1] if end else 0, end)

    def _publish(self, names: Sequence[BlockName], pages: Sequence[PageId], request_id: RequestId | None) -> int:
        self._attach()
        hold = None if request_id is None else Hold(request_id, HOLD_TTL_S)
        with self._writing():
            reservation = self._directory.reserve(self._me, names, hold)
            wanted = zip(names, pages, reservation.slots, strict=True)
            return reservation.num_resident + self._commit(self._copy_out(wanted), hold)

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

    def _peers_at(self, addresses: Sequence[str]) -> list[BlockSource]:
        """Returns the sources at these addresses. Beyond some number, the least recently used are closed."""
        if self._make_peer is None:
            return []
        for address in addresses:
            if address not in self._peers:
                self._peers[address] = self._make_peer(address)
            self._peers.move_to_end(address)
        while len(self._peers) > max(_MAX_PEERS, len(addresses)):
            self._peers.popitem(last=False)[1].close()
        return [self._peers[address] for address in addresses]

    def _peers_status(self) -> list[ColdStatus]:
        """Sums what the peers tell, if there is any."""
        told = [peer.status() for peer in self._peers.copy().values()]
        if not told:
            return []
        state = "up" if any(status.state == "up" for status in told) else "broken"
        counts = {name: sum(getattr(status, name) for status in told) for name in READ_COUNTS}
        return [ColdStatus(Tier.PEERS, state, **counts)]

    def _locate(
        self,
        names: Sequence[BlockName],
        entries: Sequence[Entry | None],
        sources: Sequence[BlockSource],
        deadline: float,
    ) -> list[Entry | BlockSource]:
        """Finds the nearest place of each block, up to the first hole. Asks no source after the deadline."""
        far = self._far([name for name, entry in zip(names, entries, strict=True) if entry is None], sources, deadline)
        places = (entry or next(far) for entry in entries)
        return [place for place in takewhile(lambda place: place is not None, places) if place is not None]

    def _far(
        self, names: Sequence[BlockName], sources: Sequence[BlockSource], deadline: float
    ) -> Iterator[BlockSource | None]:
        """Yields the nearest source that has each block; asks for some at a time, as far as the caller goes."""
        for start in range(0, len(names), _LOOKUPS_AT_ONCE):
            found: dict[BlockKey, BlockSource] = {}
            asked = names[start : start + _LOOKUPS_AT_ONCE]
            for source in sources:
                if self._clock() > deadline:
                    break
                keys = [name.key for name in asked if _may_have(source, name) and name.key not in found]
                found |= dict.fromkeys(compress(keys, source.exists(keys) if keys else []), source)
            yield from (found.get(name.key) for name in asked)

    def _copy_in(
        self,
        names: Sequence[BlockName],
        entries: Sequence[Entry | None],
        pages: Sequence[PageId],
        sources: Sequence[BlockSource],
    ) -> list[Tier]:
        """Copies the longest prefix that proves good; blocks from far tiers go into the arena on the way."""
        deadline = self._clock() + _FAR_BUDGET_S + _FAR_BUDGET_PER_BLOCK_S * sum(entry is None for entry in entries)
        places = self._locate(names, entries, sources, deadline)
        far_names = [name for name, place in zip(names, places, strict=False) if not isinstance(place, Entry)]
        reserved = self._directory.reserve(self._me, far_names, None).slots if far_names else []
        slots = dict(zip(far_names, reserved, strict=True))
        copied: list[_Source] = []
        sums = self._checksums(self._payload(place.slot) for place in places if isinstance(place, Entry))
        with ExitStack() as stack:
            reads = [stack.enter_context(closing(self._read(one, names, places, slots))) for one in sources]
            for name, place, page in zip(names, places, pages, strict=False):
                if isinstance(place, Entry):
                    source = self._from_arena(name, place, next(sums))
                else:  # after the deadline, computing is quicker
                    source = None if self._clock() > deadline else next(reads[sources.index(place)], None)
                if source is None:
                    break
                self._pool.write_page(page, source.payload)
                copied.append(source)
        if far_names:
            self._promote(copied)
        return [source.tier for source in copied]

    def _read(
        self,
        source: BlockSource,
        names: Sequence[BlockName],
        places: Sequence[Entry | BlockSource],
        slots: Mapping[BlockName, PageId | None],
    ) -> Generator["_Source", None, None]:
        """Reads the blocks whose place is a far tier, each once it is asked for, up to the first that is missing."""
        wanted = [name for name, place in zip(names, places, strict=False) if place is source]
        into = [self._scratch if (slot := slots[name]) is None else self._payload(slot) for name in wanted]
        with closing(source.get(wanted, into)) as checksums:
            for name, payload, checksum in zip(wanted, into, checksums, strict=False):
                slot = slots[name]
                yield _Source(source.tier, payload, None if slot is None else Block(slot, name, checksum))

    def _from_arena(self, name: BlockName, entry: Entry, checksum: bytes) -> "_Source | None":
        """Reads a leased block if its checksum is right; else withdraws it."""
        if checksum == entry.checksum:
            return _Source(Tier.HOST, self._payload(entry.slot), None)
        self._num_corrupt += 1
        log.warning("slot %d of the arena does not hold what was written there: its block is withdrawn", entry.slot)
        self._directory.withdraw([Block(entry.slot, name, entry.checksum)])
        return None

    def _promote(self, copied: Sequence["_Source"]) -> None:
        """Commits blocks from far tiers, and gives back the other slots reserved for them."""
        self._commit([source.promoted for source in copied if source.promoted is not None], None)
        for tier in COLD_TIERS:  # other nodes may lose theirs
            blocks = [source.promoted for source in copied if source.tier is tier and source.promoted is not None]
            if blocks:
                self._directory.mark_cold(tier, [block.name.key for block in blocks])
        self._directory.abandon(self._me)

    def _copy_out(self, wanted: Iterable[tuple[BlockName, PageId, PageId | None]]) -> list[Block]:
        """Copies the pages that have a slot, as many at once as their pool does."""
        copies = ((name, page, slot) for name, page, slot in wanted if slot is not None)
        blocks: list[Block] = []
        try:
            while group := [*islice(copies, self._pool.num_copied_at_once)]:
                for _, page, slot in group:
                    self._pool.read_page(page, self._payload(slot))
                self._pool.wait()
                sums = self._checksums(self._payload(slot) for _, _, slot in group)
                blocks += [Block(slot, name, one) for (name, _, slot), one in zip(group, sums, strict=True)]
        finally:
            self._pool.wait()
        return blocks

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


@cache
def _threads() -> ThreadPoolExecutor:
    """Makes the threads of this process that take checksums; xxhash leaves the interpreter to others meanwhile."""
    return ThreadPoolExecutor(min(_MAX_SUM_THREADS, os.cpu_count() or 1), "checksums")


def _may_have(source: BlockSource, name: BlockName) -> bool:
    """Tails are in arenas only."""
    return source.tier is Tier.PEERS or not name.is_tail


@dataclass(frozen=True)
class _Source:
    """The verified payload of a block, its tier, and the block to commit if the payload stays in the arena."""

    tier: Tier
    payload: memoryview
    promoted: Block | None
