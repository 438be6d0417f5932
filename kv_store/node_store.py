"""The store as a process sees it: arena, other nodes and cold tiers under one lookup, around its device pages.

A block is copied to a device only from bytes with the right checksum, and a read from the arena counts only if its
lease held to the end.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice

from kv_store.block_store import Back, Front, StoreStatus
from kv_store.costs import Costs, LookupS, SourceCosts, Split, SplitRule
from kv_store.device_pool import DevicePool
from kv_store.frame import checksum_of
from kv_store.mapped_arena import MappedArena
from kv_store.misses import FetchMisses
from kv_store.node.arena import Arena
from kv_store.node.directory_port import Block, DirectoryPort, DirectoryStatus, Entry, Hold, KeepHint, Lease
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from kv_store.tiers.contents import HostTier, ListableTier
from kv_store.tiers.far_tiers import FarTiers, Promotion
from wire.block_names import BlockName
from wire.errors import StoreError
from wire.ids import AttemptId, PageId, SlotId
from wire.layout import KVLayout
from wire.tier import Cause, Miss, Tier

HOLD_TTL_S = 10.0
_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.02
_MAX_SUM_THREADS = 4


class NodeControl:
    """The StoreControl of a node's process; thread-safe."""

    def __init__(self, host: MappedArena, far: FarTiers) -> None:
        self._host = host
        self._far = far

    @property
    def listable_tiers(self) -> Sequence[ListableTier]:
        return [HostTier(self._host.directory), *self._far.cold]

    def renew(self, attempt_ids: Sequence[AttemptId]) -> list[AttemptId]:
        return self._host.or_else([], lambda: self._host.directory.renew(attempt_ids, HOLD_TTL_S))

    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> None:
        self._host.or_else(0, lambda: self._host.directory.release_holds(attempt_ids))

    def status(self) -> StoreStatus:
        ask: Callable[[], DirectoryStatus | None] = self._host.directory.records.status
        return StoreStatus(
            directory=self._host.or_else(None, ask),
            cold=self._far.status(),
            block_bytes=self._host.block_bytes,
            num_corrupt=self._host.num_corrupt,
            num_failed=self._host.num_failed,
            prefill_token_s=self._far.costs.prefill_token_s,
        )

    def check(self) -> list[str]:
        return self._host.or_else(["the directory is out of reach"], self._host.directory.records.check)


class NodeStore:
    """The BlockStore of a node's process. Not thread-safe: for the transfer thread; `control` is for any.

    cold: tiers below the arena, nearest first. peer: makes the source of a node's blocks from the address of its port.
    costs: the durations that fetches learn from, and choose by.
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
        self.costs = Costs(layout.block_size, clock)
        self._me = secrets.token_hex(8)
        self._host = MappedArena(layout, arena, directory)
        self._far = FarTiers(cold, peer, clock, self.costs)
        self.control = NodeControl(self._host, self._far)
        self._pool = pool
        self._clock = clock
        # Of a CPU's pages one by one, while they are in its cache; of a GPU's in threads, for copies are faster.
        self._checksums = (
            partial(map, checksum_of) if pool.num_copied_at_once == 1 else partial(_threads().map, checksum_of)
        )
        self._misses = FetchMisses(clock)

    def fence(self) -> None:
        self._pool.fence()

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> list[Tier]:
        search = _Search(self._far.sources(peers), SourceCosts.lookup_s, self.costs.whole)
        return self._fetch(names, pages, search).tiers

    def fetch_front(self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = ()) -> Front:
        search = _Search(self._far.sources(peers), SourceCosts.split_lookup_s, SplitRule(self.costs).divide)
        return self._fetch(names, pages, search)

    def fetch_back(self, back: Back, pages: Sequence[PageId]) -> list[Tier]:
        return self._host.or_else([], lambda: self._reading(back.names, partial(self._copy_back, back, pages)).tiers)

    def misses(self, names: Sequence[BlockName]) -> list[Miss]:
        return self._misses.causes(names, lambda asked: self._host.or_else(None, lambda: self._why(asked)))

    def longest(self, names: Sequence[BlockName], starts: Sequence[int], peers: Sequence[str] = ()) -> slice:
        return self._host.or_else(slice(0, 0), lambda: self._longest(names, starts, peers))

    def _why(self, names: Sequence[BlockName]) -> list[Miss] | None:
        parents = [b"" if name.parent == name.root_digest else name.parent for name in names]
        runs = self._host.directory.records.why([name.key for name in names], parents)
        misses = [run.miss for run in runs for _ in range(run.num_blocks)]
        copied = {name.key for name, miss in zip(names, misses, strict=False) if miss.cause is Cause.ELSEWHERE}
        for tier, keys in self._far.take_lost().items():
            if lost := keys & copied:
                self._host.directory.records.mark_cold(tier, [], [*lost])
        return misses

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        return self._host.or_else(0, lambda: self._write_through(names, pages, hold))

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        keys = [name.key for name in names]
        self._host.or_else(0, lambda: self._host.directory.delete(keys))
        for source in self._far.sources(peers):
            source.delete(keys)

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        keys = [*dict.fromkeys(name.key for name in names)]
        self._host.or_else(0, lambda: self._host.directory.records.keep(keys, hint))

    def _fetch(self, names: Sequence[BlockName], pages: Sequence[PageId], search: "_Search") -> Front:
        self._misses.begin(names)
        copy = partial(self._copy_in, names, pages, search)
        return self._host.or_else(Front([]), lambda: self._reading(names, copy))

    def _reading(self, names: Sequence[BlockName], copy: Callable[[Sequence[Entry | None]], Front]) -> Front:
        """Copies blocks under a lease; none where it ran out."""
        lease = self._lease(names)
        try:
            with self._writing():
                front = copy(lease.entries)
        finally:
            held = self._host.directory.release(lease.lease_id)
        if not held:
            self._misses.note_lost_lease(names[: len(front.tiers)])
        return front if held else replace(front, tiers=[])

    def _longest(self, names: Sequence[BlockName], starts: Sequence[int], peers: Sequence[str]) -> slice:
        """Goes from the end, from hole to hole: blocks before a hole may be used without it."""
        is_here = self._host.directory.records.exists([name.key for name in names])
        missing = [place for place, here in enumerate(is_here) if not here]
        sources = self.costs.worth_asking(self._far.sources(peers), len(missing))
        deadline = self._clock() + self.costs.budget_s(len(missing))
        self._misses.note_hole([names[place] for place in missing], self._far.sources(peers), sources, deadline)
        far = self._far.locate([names[place] for place in reversed(missing)], sources, deadline)
        end = len(names)
        for place, source in zip(reversed(missing), far, strict=True):
            if not end or place < starts[end - 1]:
                break
            if source is None:
                end = place
        return slice(starts[end - 1] if end else 0, end)

    def _write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], attempt_id: AttemptId | None) -> int:
        self._host.attach()
        hold = None if attempt_id is None else Hold(attempt_id, HOLD_TTL_S)
        with self._writing():
            reservation = self._host.directory.reserve(self._me, names, hold)
            wanted = zip(names, pages, reservation.slots, strict=True)
            blocks = self._copy_out(wanted)
            return reservation.num_resident + (self._host.directory.commit(self._me, blocks, hold) if blocks else 0)

    def _lease(self, names: Sequence[BlockName]) -> Lease:
        """Leases blocks for long enough to copy them."""
        self._host.attach()
        ttl_s = _LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(names)
        return self._host.directory.lease(self._me, [name.key for name in names], ttl_s)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Gives back the reserved slots if the body fails before its commit."""
        try:
            yield
        except BaseException:
            self._pool.wait()  # no copy reads a slot, or writes a page, that is somebody else's by then
            with suppress(StoreError):  # else the next batch gives it back
                self._host.directory.abandon(self._me)
            raise

    def _copy_in(
        self, names: Sequence[BlockName], pages: Sequence[PageId], search: "_Search", entries: Sequence[Entry | None]
    ) -> Front:
        """Copies the longest prefix that proves good, and is worth it."""
        holes = [place for place, entry in enumerate(entries) if entry is None]
        deadline = self._clock() + self.costs.budget_s(len(holes))
        missing = [names[hole] for hole in holes]
        worth_asking = self.costs.worth_asking(search.sources, len(holes), search.lookup_s)
        located = [*iter(partial(next, self._far.locate(missing, worth_asking, deadline), None), None)]
        end = holes[len(located)] if len(located) < len(holes) else len(names)
        self._misses.note_hole(names[end:], search.sources, worth_asking, deadline)
        far = dict(zip(holes, located, strict=False))
        found = Back(names[:end], [far.get(place) for place in range(end)], SplitRule(self.costs))
        split = search.divide(found.sources)
        tiers = self._copy(found.part(0, split.num_first), pages, entries, deadline)
        self._misses.note_reads(found.names, len(tiers), split.num_first, far.get(len(tiers)), deadline)
        is_tail = any(name.is_tail for name in found.names[-1:])
        back = found.part(split.num_first, max(split.num_first, split.stop - is_tail))
        return Front(tiers, back if back.names else None)

    def _copy_back(self, back: Back, pages: Sequence[PageId], entries: Sequence[Entry | None]) -> Front:
        """Copies the blocks up to the first one that was in the arena, and is gone."""
        is_gone = [entry is None and source is None for entry, source in zip(entries, back.sources, strict=True)]
        there = back.part(0, is_gone.index(True) if True in is_gone else len(is_gone))
        return Front(self._copy(there, pages, entries, self._clock() + back.rule.group_budget_s(back.sources)))

    def _copy(
        self, found: Back, pages: Sequence[PageId], entries: Sequence[Entry | None], deadline: float
    ) -> list[Tier]:
        """Copies blocks up to the first that is not right; blocks from far tiers go into the arena on the way."""
        entries = entries[: len(found.names)]
        far = [
            (name, source)
            for name, source, entry in zip(found.names, found.sources, entries, strict=True)
            if entry is None and source is not None
        ]
        missing, located = [name for name, _ in far], [source for _, source in far]
        promotion = Promotion(self._host.directory, self._me, missing, located, self._host.payload, self.costs)
        near = self._read_arena(found.names, entries)
        tiers: list[Tier] = []
        with closing(promotion.read(lambda: self._clock() > deadline)) as promoted:
            for entry, page in zip(entries, pages, strict=False):
                verified = next(promoted if entry is None else near, None)
                if verified is None:
                    break
                tier, payload = verified
                self._pool.write_page(page, payload)
                tiers.append(tier)
        self._pool.wait()  # a promoted block that can be found may be evicted
        promotion.commit()
        return tiers

    def _read_arena(
        self, names: Sequence[BlockName], entries: Sequence[Entry | None]
    ) -> Iterator[tuple[Tier, memoryview]]:
        """Yields the payloads of leased blocks, up to the first with a wrong checksum, which it rejects."""
        blocks = [Block(entry.slot, name, entry.checksum) for name, entry in zip(names, entries, strict=False) if entry]
        for block, checksum in zip(
            blocks, self._checksums(self._host.payload(one.slot) for one in blocks), strict=True
        ):
            if checksum != block.checksum:
                self._host.reject(block)
                return
            yield Tier.HOST, self._host.payload(block.slot)

    def _copy_out(self, wanted: Iterable[tuple[BlockName, PageId, SlotId | None]]) -> list[Block]:
        """Copies the pages that have a slot, as many at once as their pool does; one that fails may leave copies."""
        copies = ((name, page, slot) for name, page, slot in wanted if slot is not None)
        blocks: list[Block] = []
        while group := [*islice(copies, self._pool.num_copied_at_once)]:
            for _, page, slot in group:
                self._pool.read_page(page, self._host.payload(slot))
            self._pool.wait()
            sums = self._checksums(self._host.payload(slot) for _, _, slot in group)
            blocks += [Block(slot, name, one) for (name, _, slot), one in zip(group, sums, strict=True)]
        return blocks


@dataclass(frozen=True)
class _Search:
    """The far sources of one fetch, the rule by which they are asked, and the rule by which found blocks are read."""

    sources: Sequence[BlockSource]
    lookup_s: LookupS
    divide: Callable[[Sequence[BlockSource | None]], Split]


@cache
def _threads() -> ThreadPoolExecutor:
    """Makes the threads of this process that take checksums; xxhash leaves the interpreter to others meanwhile."""
    return ThreadPoolExecutor(min(_MAX_SUM_THREADS, os.cpu_count() or 1), "checksums")
