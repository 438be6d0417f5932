"""Copies of an arena's blocks in cold tiers: the tiers that have each block, and the blocks to be written to each."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from kv_store.eviction_order import Worth
from kv_store.ledger import Ledger
from wire.ids import SlotId
from wire.tier import COLD_TIERS, Tier, Write

_FULL, _READ = 1, 2
_IN = {tier: 4 << nth for nth, tier in enumerate(COLD_TIERS)}


class Copies:
    """Copies of full blocks that are found in the arena, by slot; tails have none. Not thread-safe.

    writes: the rule of each tier; a tier without one is given DEMOTED blocks. high_water: share of the slots that may
    hold a block's only copy before blocks are demoted.
    """

    def __init__(self, ledger: Ledger[SlotId], writes: Mapping[Tier, Write], high_water: float) -> None:
        self._ledger = ledger
        self._writes = writes
        self._num_wanted_lossless = ledger.num_pages - int(ledger.num_pages * high_water)
        self._flags = bytearray(ledger.num_pages)
        self._to_write: dict[Tier, OrderedDict[SlotId, None]] = {tier: OrderedDict() for tier in COLD_TIERS}

    def begin(self, slot: SlotId) -> None:
        """Notes a new block."""
        self._flags[slot] = _FULL
        self._want(Write.ALL, slot)

    def note_reads(self, slots: Iterable[SlotId]) -> None:
        """Notes that blocks are read; a block's first read while a hold keeps it is its hand-off, and no reuse."""
        for slot in slots:
            if self._flags[slot]:
                if self._flags[slot] & _READ or not self._ledger.num_references(slot):
                    self._want(Write.REUSED, slot)
                self._flags[slot] |= _READ

    def add(self, tier: Tier, slot: SlotId) -> bool:
        """Notes a copy in a tier; False for a tail."""
        if not self._flags[slot]:
            return False
        self._flags[slot] |= _IN[tier]
        self._to_write[tier].pop(slot, None)
        self._ledger.revalue(slot, Worth.COPIED)
        return True

    def want(self, slots: Iterable[SlotId], tier: Tier) -> None:
        """Has blocks written to a tier, whatever its rule, but for blocks that a tier has or is to get."""
        for slot in slots:
            is_wanted = any(slot in waiting for waiting in self._to_write.values())
            if not is_wanted and not self.is_safe(slot, COLD_TIERS):
                self._to_write[tier][slot] = None

    def is_safe(self, slot: SlotId, tiers: Sequence[Tier]) -> bool:
        """Tells whether one of these tiers has a block, or no tier is ever to have it."""
        return not self._flags[slot] or any(self._flags[slot] & _IN[tier] for tier in tiers)

    def end(self, slot: SlotId) -> None:
        """Forgets a block that is no longer found."""
        if self._flags[slot]:
            self._flags[slot] = 0
            for slots in self._to_write.values():
                slots.pop(slot, None)

    def wanted(self, tier: Tier, max_blocks: int) -> list[SlotId]:
        """Lists blocks to be written to a tier, the oldest first, at a cost that follows from `max_blocks` alone.

        Blocks that wait for it go to the end: one that cannot be written holds up no other.
        """
        if self._rule_of(tier) is not Write.DEMOTED or self._to_write[tier]:
            slots = list(islice(self._to_write[tier], max_blocks))
            for slot in slots:
                self._to_write[tier].move_to_end(slot)
            return slots
        num_cheap = self._ledger.num_cached(Worth.TAIL) + self._ledger.num_cached(Worth.COPIED)
        num_short = self._num_wanted_lossless - self._ledger.counts().free - num_cheap
        return self._ledger.oldest(Worth.ONLY_COPY, min(max_blocks, max(0, num_short)))

    def want_all(self) -> int:
        """Wants a copy, from now on, of each block that has none; counts blocks without."""
        self._writes, self._num_wanted_lossless = {}, self._ledger.num_pages
        return self._ledger.num_cached(Worth.ONLY_COPY)

    def check(self) -> list[str]:
        """Lists the faults of the books; an empty list is a clean bill."""
        slots = {slot for slot in self._ledger.pages if self._flags[slot]}.union(*self._to_write.values())
        return ["a block with copies is not found"] if any(self._ledger.key_of(slot) is None for slot in slots) else []

    def _rule_of(self, tier: Tier) -> Write:
        return self._writes.get(tier, Write.DEMOTED)

    def _want(self, rule: Write, slot: SlotId) -> None:
        for tier, slots in self._to_write.items():
            if self._rule_of(tier) is rule and not self._flags[slot] & _IN[tier]:
                slots[slot] = None
