"""Worth of an arena's blocks: copies in cold tiers, the queue of each tier's writer, and blocks that are superseded."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from kv_store.eviction.order import Priority
from kv_store.ledger import Ledger
from wire.ids import SlotId
from wire.tier import COLD_TIERS, Tier, Write

_FULL, _READ, _SUPERSEDED = 1, 2, 4
_IN = {tier: 8 << nth for nth, tier in enumerate(COLD_TIERS)}


class Copies:
    """Copies of the full blocks of an arena, by slot; tails have none. Not thread-safe.

    writes: the rule of each tier; DEMOTED for a tier without one. high_water: share of the slots that may hold a
    block's only copy before blocks are demoted.
    """

    def __init__(self, ledger: Ledger[SlotId], writes: Mapping[Tier, Write], high_water: float) -> None:
        self._ledger = ledger
        self._writes = writes
        self._num_wanted_lossless = ledger.num_pages - int(ledger.num_pages * high_water)
        self._flags = bytearray(ledger.num_pages)
        self._to_write: dict[Tier, OrderedDict[SlotId, None]] = {tier: OrderedDict() for tier in COLD_TIERS}

    def index(self, slot: SlotId) -> None:
        """Notes a full block that is indexed from now on."""
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
        self._settle(slot)
        return True

    def supersede(self, slot: SlotId) -> None:
        """Has a full block evicted before others, and demoted to no tier, until it is read again."""
        if self._flags[slot]:
            self._flags[slot] |= _SUPERSEDED
            self._settle(slot)

    def restore(self, slots: Iterable[SlotId]) -> None:
        """Gives superseded blocks the priority of any other."""
        for slot in slots:
            if self._flags[slot] & _SUPERSEDED:
                self._flags[slot] &= ~_SUPERSEDED
                self._settle(slot)

    def want(self, slots: Iterable[SlotId], tier: Tier) -> None:
        """Queues blocks for a tier, whatever its rule, unless some tier has or awaits them."""
        for slot in slots:
            is_wanted = any(slot in waiting for waiting in self._to_write.values())
            if not is_wanted and not self.is_safe(slot, COLD_TIERS):
                self._to_write[tier][slot] = None

    def is_safe(self, slot: SlotId, tiers: Sequence[Tier]) -> bool:
        """Returns whether the arena may lose a block: one of these tiers has it, or it is a tail."""
        return not self._flags[slot] or any(self._flags[slot] & _IN[tier] for tier in tiers)

    def has(self, tier: Tier, slot: SlotId) -> bool:
        """Returns whether a tier was given a copy of an indexed block."""
        return bool(self._flags[slot] & _IN[tier])

    def unindex(self, slot: SlotId) -> None:
        """Drops the flags of a block that is not indexed any more."""
        if self._flags[slot]:
            self._flags[slot] = 0
            for slots in self._to_write.values():
                slots.pop(slot, None)

    def wanted(self, tier: Tier, max_blocks: int) -> list[SlotId]:
        """Lists blocks to write to a tier, the oldest first, at a cost that depends on `max_blocks` alone.

        Moves queued blocks to the queue's end, so that a block whose writing fails holds up no other.
        """
        if self._rule_of(tier) is not Write.DEMOTED or self._to_write[tier]:
            slots = list(islice(self._to_write[tier], max_blocks))
            for slot in slots:
                self._to_write[tier].move_to_end(slot)
            return slots
        num_cheap = self._ledger.num_cached(Priority.LEAST) + self._ledger.num_cached(Priority.COPIED)
        num_short = self._num_wanted_lossless - self._ledger.counts().free - num_cheap
        return self._ledger.order.oldest(Priority.ONLY_COPY, min(max_blocks, max(0, num_short)))

    def is_tail(self, slot: SlotId) -> bool:
        """Returns whether an indexed block is a tail."""
        return not self._flags[slot]

    def want_all(self) -> int:
        """Queues each block without a copy, from now on, for every tier; counts the cached ones."""
        self._writes, self._num_wanted_lossless = {}, self._ledger.num_pages
        return self._ledger.num_cached(Priority.ONLY_COPY)

    def check(self) -> list[str]:
        """Lists the faults of the books; an empty list is a clean bill."""
        slots = {slot for slot in self._ledger.pages if self._flags[slot]}.union(*self._to_write.values())
        are_indexed = all(self._ledger.key_of(slot) is not None for slot in slots)
        return [] if are_indexed else ["a block with copies is not indexed"]

    def _settle(self, slot: SlotId) -> None:
        """Sets the priority of a full block by its flags."""
        if self._flags[slot] & _SUPERSEDED:
            priority = Priority.LEAST
        else:
            priority = Priority.COPIED if self.is_safe(slot, COLD_TIERS) else Priority.ONLY_COPY
        self._ledger.set_priority(slot, priority)

    def _rule_of(self, tier: Tier) -> Write:
        return self._writes.get(tier, Write.DEMOTED)

    def _want(self, rule: Write, slot: SlotId) -> None:
        for tier, slots in self._to_write.items():
            if self._rule_of(tier) is rule and not self._flags[slot] & _IN[tier]:
                slots[slot] = None
