"""The store of a node's process: arena, other nodes and cold tiers under one lookup, below its device pages.

A block counts as read only if its checksum is right in its page, after the copy, and if the lease of its slot in the
arena held to the end.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, groupby, islice, takewhile
from typing import TypeVar

from kv_store.block_store import NOTHING, ReadResult, StoreStatus
from kv_store.device_pool import DevicePool, Fence
from kv_store.mapped_arena import Leased, MappedArena, leased
from kv_store.node.arena import Arena
from kv_store.node.directory_port import DirectoryPort
from kv_store.node.messages import Block, DirectoryStatus, Entry, Hold, HoldRoom, KeepHint
from kv_store.prefix.costs import Costs, SourceCosts
from kv_store.prefix.misses import LEASE_LOST, UNREACHED, causes, failures
from kv_store.prefix.plan import FRONT, Needs, Read, plan_split, plan_whole
from kv_store.prefix.sources import FarLookup, FarTiers, read
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from kv_store.tiers.contents import HostTier, ListableTier
from wire.block_names import BlockName
from wire.errors import StoreError
from wire.ids import AttemptId, PageId, SlotId
from wire.layout import KVLayout
from wire.tier import COLD_TIERS, Cause, Miss, Tier

HOLD_TTL_S = 10.0
RESERVED_AT_ONCE = 512
"""Blocks whose slots are reserved in one call: a gibibyte of an 8B model's."""
_LEASE_TTL_S = 5.0
_LEASE_TTL_PER_BLOCK_S = 0.02


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

    def share_room(self, router: str, num_blocks: int) -> HoldRoom:
        directory = self._host.directory
        return self._host.or_else(HoldRoom(), lambda: directory.share_room(router, num_blocks, HOLD_TTL_S))

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
    """The BlockStore of a node's process. For the transfer thread alone; `control` is thread-safe.

    cold: tiers below the arena, nearest first. peer: makes the source of a node's blocks from the address of its port.
    costs: the durations that fetches learn, and choose by.
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
        self._num_ids = count()
        self._idle_ids = deque[str]()
        self._host = MappedArena(layout, arena, directory)
        self._far = FarTiers(cold, peer, clock, self.costs)
        self.control = NodeControl(self._host, self._far)
        self._pool = pool
        self._clock = clock
        pool.follow(pool.fence())
        pool.begin_checksums([PageId(0)])()  # compiles what later ones need

    def fence(self) -> Fence:
        return self._pool.fence()

    def follow(self, fence: Fence) -> None:
        self._pool.follow(fence)

    def fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = (), needs: Needs = FRONT
    ) -> ReadResult:
        fetch = self._fetch if needs.starts is None else self._fetch_window
        unreached = ReadResult([UNREACHED] * len(names))
        return self._host.or_else(unreached, lambda: fetch(names, pages, peers, needs))

    def read(self, step: Read, pages: Sequence[PageId]) -> ReadResult:
        return self._host.or_else(NOTHING, lambda: self._read(step, pages))

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

    def _fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str], needs: Needs
    ) -> ReadResult:
        """Reads blocks, by a plan, up to the first that no tier has."""
        with self._leased(names) as lease:
            missing = [name for name, entry in zip(names, lease.entries, strict=True) if entry is None]
            lookup_s = SourceCosts.split_lookup_s if needs.splits else SourceCosts.lookup_s
            lookup = FarLookup(self._far, missing, peers, lookup_s)
            found = self._found(names, lease.entries, lookup)
            unasked = lookup.unasked if len(found.names) < len(names) else None
            front, later = (plan_split if needs.splits else plan_whole)(found, lookup.probes)
            tiers = self._carry_out(front, pages, lease.entries, lambda: lookup.is_late)
            failed = failures(front.sources[len(tiers) :], lookup.is_late)
        read = tiers if lease.has_held else [LEASE_LOST] * len(tiers)
        computed = [Miss(Cause.CHEAPER)] * (len(found.names) - len(front.names))
        return ReadResult([*read, *failed, *computed, *self._causes(names[len(found.names) :], unasked)], later)

    def _found(
        self, names: Sequence[BlockName], entries: Sequence[Entry | None], far: Iterable[BlockSource | None]
    ) -> Read:
        """Finds the source of each block, up to the first without any. far: sources of blocks without an entry."""
        sources = iter(far)
        where = takewhile(lambda one: one is not None, (next(sources) if one is None else one for one in entries))
        found = [None if isinstance(one, Entry) else one for one in where]
        return Read(names[: len(found)], found, self.costs)

    def _fetch_window(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str], needs: Needs
    ) -> ReadResult:
        """Reads the blocks that the last usable block needs, found by a lookup from the end."""
        is_here = self._host.directory.records.exists([name.key for name in names])
        missing = [place for place, here in reversed([*enumerate(is_here)]) if not here]
        lookup = FarLookup(self._far, [names[place] for place in missing], peers)
        end = needs.usable_end((place, source is not None) for place, source in zip(missing, lookup, strict=True))
        places = needs.places(end)
        reading = self._fetch([names[place] for place in places], pages, peers, FRONT)
        block_at = dict(zip(places, reading.blocks, strict=True))
        blocks = [block_at.get(place, Miss(Cause.NOT_READ)) for place in range(end)]
        return ReadResult([*blocks, *self._causes(names[end:], lookup.unasked)])

    def _read(self, step: Read, pages: Sequence[PageId]) -> ReadResult:
        """Reads blocks up to the first that has left the arena meanwhile."""
        with self._leased(step.names) as lease:
            far = (source for entry, source in zip(lease.entries, step.sources, strict=True) if entry is None)
            there, deadline = self._found(step.names, lease.entries, far), self._clock() + 2 * step.group_s
            tiers = self._carry_out(there, pages, lease.entries, lambda: self._clock() > deadline)
        return ReadResult(tiers if lease.has_held else [])

    def _causes(self, names: Sequence[BlockName], unasked: Miss | None) -> list[Miss]:
        return causes(names, unasked, lambda asked: self._host.or_else(None, lambda: self._why(asked)))

    def _write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], attempt_id: AttemptId | None) -> int:
        """Publishes blocks by parts: a reservation of all would leave other writers without slots meanwhile."""
        self._host.attach()
        hold = None if attempt_id is None else Hold(attempt_id, HOLD_TTL_S)
        parts = [slice(start, start + RESERVED_AT_ONCE) for start in range(0, len(names), RESERVED_AT_ONCE)]
        return sum(self._publish(names[part], pages[part], hold) for part in parts)

    def _publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: Hold | None) -> int:
        """Reserves slots for all blocks in one call, and commits them in batches, each while the next is copied."""
        num_at_once = self._pool.num_copied_at_once
        if num_at_once == 1:  # in host memory nothing is copied meanwhile
            num_at_once = max(1, len(names))
        with self._writing() as reservation_id:
            reservation = self._host.directory.reserve(reservation_id, names, hold)
            placed = zip(names, pages, reservation.slots, strict=True)
            chosen = [(name, page, slot) for name, page, slot in placed if slot is not None]
            copies = _with_next_begun(map(self._begin_out, _batches(chosen, num_at_once)))
            written = (self._host.directory.commit(reservation_id, copied(), hold) for copied in copies)
            return reservation.num_resident + sum(written)

    def _begin_out(self, batch: Sequence[tuple[BlockName, PageId, SlotId]]) -> Callable[[], list[Block]]:
        """Begins to copy pages to slots; returns the function that waits for it, and returns the blocks."""
        groups = _batches(((page, slot) for _, page, slot in batch), self._pool.num_copied_at_once)
        waits = [self._pool.begin_out(self._copies(group), [page for page, _ in group]) for group in groups]

        def copied() -> list[Block]:
            sums = (one for wait in waits for one in wait())
            return [Block(slot, name, one) for (name, _, slot), one in zip(batch, sums, strict=True)]

        return copied

    @contextmanager
    def _leased(self, names: Sequence[BlockName]) -> Iterator[Leased]:
        """Leases blocks for the time of copying them."""
        self._host.attach()
        ttl_s = _LEASE_TTL_S + _LEASE_TTL_PER_BLOCK_S * len(names)
        with leased(self._host.directory, self._me, [name.key for name in names], ttl_s) as blocks:
            yield blocks

    @contextmanager
    def _writing(self) -> Iterator[str]:
        """Yields the id of a reservation, under which no other is open; abandons it if the body fails."""
        try:
            reservation_id = self._idle_ids.pop()
        except IndexError:
            reservation_id = f"{self._me}.{next(self._num_ids)}"
        try:
            yield reservation_id
        except BaseException:
            self._pool.wait()  # no copy reads a slot, or writes a page, that is somebody else's by then
            with suppress(StoreError):  # else the id's next reservation gives it back
                self._host.directory.abandon(reservation_id)
            raise
        finally:
            self._idle_ids.append(reservation_id)

    def _carry_out(
        self, step: Read, pages: Sequence[PageId], entries: Sequence[Entry | None], is_late: Callable[[], bool]
    ) -> list[Tier]:
        """Copies blocks up to the first wrong block; blocks from far tiers also go into the arena."""
        with self._writing() as reservation_id:
            lacking = [name for name, source in zip(step.names, step.sources, strict=True) if source is not None]
            reserved = iter(self._host.directory.reserve(reservation_id, lacking, None).slots if lacking else ())
            here = [entry.checksum for entry in entries[: len(step.names)] if entry is not None]
            slots = [next(reserved) if entry is None else entry.slot for entry in entries[: len(step.names)]]

            def get(
                source: BlockSource | None, names: Sequence[BlockName], into: Sequence[memoryview]
            ) -> Generator[bytes, None, None]:
                if source is None:
                    return (checksum for checksum in here)
                return self.costs.timed(source, source.get(names, into), is_late)

            with closing(read(step.names, step.sources, [*map(self._host.payload, slots)], get)) as blocks:
                found = (
                    _Found(page, name, slot, Tier.HOST if source is None else source.tier, checksum)
                    for page, name, slot, (source, checksum) in zip(pages, step.names, slots, blocks, strict=False)
                )
                right = self._copy_in(found, 1 if None in slots else self._pool.num_copied_at_once)
            if lacking:
                self._promote(reservation_id, right)
            return [one.tier for one in right]

    def _copy_in(self, found: Iterator["_Found"], num_at_once: int) -> list["_Found"]:
        """Copies blocks to their pages, up to the first with another checksum there, which it rejects."""
        right: list[_Found] = []
        wrong: list[_Found] = []

        def begin(group: Sequence[_Found]) -> tuple[Sequence[_Found], Callable[[], list[bytes]]]:
            copies = self._copies([(one.page, one.slot) for one in group])
            return group, self._pool.begin_in(copies, [one.page for one in group])

        groups = _batches(takewhile(lambda _: not wrong, found), num_at_once)
        for group, wait in _with_next_begun(map(begin, groups)):
            for one, checksum in zip(group, wait(), strict=True):
                (wrong if wrong or checksum != one.checksum else right).append(one)
        for one in wrong[:1]:
            self._host.reject(one.tier, one.name, one.slot, one.checksum)
        return right

    def _copies(self, places: Sequence[tuple[PageId, SlotId | None]]) -> Iterator[tuple[PageId, memoryview]]:
        """Yields the copies between pages and slots: neighbours on both sides go together."""
        if len(places) == 1 or not self._host.joins_payloads:
            yield from ((page, self._host.payload(slot)) for page, slot in places)
            return
        known = sorted((page, slot) for page, slot in places if slot is not None)
        for _, run in groupby(enumerate(known), lambda one: (one[1][0] - one[0], one[1][1] - one[0])):
            [(_, (page, slot)), *more] = run
            yield page, self._host.payloads(slot, 1 + len(more))

    def _promote(self, reservation_id: str, found: Sequence["_Found"]) -> None:
        """Commits blocks from far tiers to the arena, and abandons the other reserved slots."""
        far = [(one, one.slot) for one in found if one.tier is not Tier.HOST and one.slot is not None]
        if far:
            blocks = [Block(slot, one.name, one.checksum) for one, slot in far]
            self._host.directory.commit(reservation_id, blocks, None)
        for tier in COLD_TIERS:  # other nodes may lose theirs
            if keys := [one.name.key for one, _ in far if one.tier is tier]:
                self._host.directory.records.mark_cold(tier, keys, [])
        self._host.directory.abandon(reservation_id)


@dataclass(frozen=True)
class _Found:
    """A block that a read has brought to a slot, or to the buffer for one block, and the page to copy it to."""

    page: PageId
    name: BlockName
    slot: SlotId | None
    tier: Tier
    checksum: bytes


T = TypeVar("T")


def _batches(items: Iterable[T], num_at_once: int) -> Iterator[list[T]]:
    """Cuts items into lists, each made when it is asked for."""
    left = iter(items)
    return iter(lambda: [*islice(left, num_at_once)], [])


def _with_next_begun(items: Iterable[T]) -> Iterator[T]:
    """Yields each item once the next has been made, too."""
    begun = deque[T]()
    for item in items:
        begun.append(item)
        if len(begun) > 1:
            yield begun.popleft()
    yield from begun
