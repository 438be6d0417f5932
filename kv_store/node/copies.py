"""Copies of an arena's blocks in cold tiers: the tiers that have each block, and the blocks to be written to each."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice

from kv_store.ledger import Ledger, Worth
from wire.ids import PageId
from wire.tier import COLD_TIERS, Tier, Write


class Copies:
    """Copies of full blocks that are found in the arena, by slot; tails have none. Not thread-safe.

    writes: the rule of each tier; a tier without one is given DEMOTED blocks. high_water: share of the slots that may
    hold a block's only copy before blocks are demoted.
    """

    def __init__(self, ledger: Ledger, writes: Mapping[Tier, Write], high_water: float) -> None:
        self._ledger = ledger
        self._writes = writes
        self._num_wanted_lossless = ledger.num_pages - int(ledger.num_pages * high_water)
        self._tiers: dict[PageId, set[Tier]] = {}
        self._read: set[PageId] = set()
        self._to_write: dict[Tier, OrderedDict[PageId, None]] = {tier: OrderedDict() for tier in COLD_TIERS}

    def begin(self, slot: PageId) -> None:
        """Notes a new block."""
        self._tiers[slot] = set()
        self._want(Write.ALL, slot)

    def note_reads(self, slots: Iterable[PageId]) -> None:
        """Notes that blocks are read; a block's first read while a hold keeps it is its hand-off, and no reuse."""
        for slot in filter(self._tiers.__contains__, slots):
            if slot in self._read or not self._ledger.num_references(slot):
                self._want(Write.REUSED, slot)
            self._read.add(slot)

    def add(self, tier: Tier, slot: PageId) -> bool:
        """Notes a copy in a tier; False for a tail."""
        if slot not in self._tiers:
            return False
        self._tiers[slot].add(tier)
        self._to_write[tier].pop(slot, None)
        self._ledger.revalue(slot, Worth.COPIED)
        return True

    def end(self, slot: PageId) -> None:
        """Forgets a block that is no longer found."""
        self._read.discard(slot)
        if self._tiers.pop(slot, None) is not None:
            for slots in self._to_write.values():
                slots.pop(slot, None)

    def wanted(self, tier: Tier, max_blocks: int) -> list[PageId]:
        """Lists blocks to be written to a tier, the oldest first, at a cost that follows from `max_blocks` alone."""
        if self._rule_of(tier) is not Write.DEMOTED:
            return list(islice(self._to_write[tier], max_blocks))
        num_cheap = self._ledger.num_cached(Worth.TAIL) + self._ledger.num_cached(Worth.COPIED)
        num_short = self._num_wanted_lossless - self._ledger.counts().free - num_cheap
        return self._ledger.oldest(Worth.ONLY_COPY, min(max_blocks, max(0, num_short)))

    def want_all(self) -> int:
        """Wants a copy, from now on, of each block that has none; counts blocks without."""
        self._writes, self._num_wanted_lossless = {}, self._ledger.num_pages
        return self._ledger.num_cached(Worth.ONLY_COPY)

    def check(self) -> list[str]:
        """Lists the faults of the books; an empty list is a clean bill."""
        slots = self._read.union(self._tiers, *self._to_write.values())
        return ["a block with copies is not found"] if any(self._ledger.key_of(slot) is None for slot in slots) else []

    def _rule_of(self, tier: Tier) -> Write:
        return self._writes.get(tier, Write.DEMOTED)

    def _want(self, rule: Write, slot: PageId) -> None:
        for tier, slots in self._to_write.items():
            if self._rule_of(tier) is rule and tier not in self._tiers[slot]:
                slots[slot] = None
