"""Copies of an arena's blocks in cold tiers: the tiers with a copy, the writers' queues, superseded blocks."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

from kv_store.eviction.order import Priority
from kv_store.ledger import Ledger
from wire.ids import SlotId
from wire.tier import COLD_TIERS, FarStatus, Tier, Write

_FULL, _READ, _SUPERSEDED = 1, 2, 4
_IN = {tier: 8 << nth for nth, tier in enumerate(COLD_TIERS)}


class WriteQueues:
    """The full blocks that cold tiers should get, and the state of these tiers. Not thread-safe.

    writes: the rule of each tier, by default DEMOTED. high_water: share of the slots that may have a block's only copy
    before blocks are demoted.
    """

    def __init__(self, ledger: Ledger[SlotId], writes: Mapping[Tier, Write], high_water: float) -> None:
        self.status_of: dict[Tier, FarStatus] = {}
        self._ledger = ledger
        self._writes = writes
        self._num_wanted_lossless = ledger.num_pages - int(ledger.num_pages * high_water)
        self._slots: dict[Tier, OrderedDict[SlotId, None]] = {tier: OrderedDict() for tier in COLD_TIERS}

    def __contains__(self, slot: SlotId) -> bool:
        return any(slot in slots for slots in self._slots.values())

    @property
    def slots(self) -> set[SlotId]:
        """Slots whose block is queued for some tier."""
        return {slot for slots in self._slots.values() for slot in slots}

    @property
    def tiers_up(self) -> list[Tier]:
        """Cold tiers that answer, nearest first."""
        return [tier for tier in COLD_TIERS if tier in self.status_of and self.status_of[tier].state != "broken"]

    def put(self, tier: Tier, slot: SlotId) -> None:
        """Queues a block for a tier, whatever the tier's rule."""
        self._slots[tier][slot] = None

    def put_by(self, rule: Write, slot: SlotId, copies: Container[Tier]) -> None:
        """Queues a block for the tiers of a rule that have no copy."""
        for tier, slots in self._slots.items():
            if self._rule_of(tier) is rule and tier not in copies:
                slots[slot] = None

    def discard(self, slot: SlotId, tiers: Iterable[Tier] = COLD_TIERS) -> None:
        """Removes a block from the queues of these tiers."""
        for tier in tiers:
            self._slots[tier].pop(slot, None)

    def next(self, tier: Tier, max_blocks: int) -> list[SlotId]:
        """Lists blocks to write to a tier, the oldest first, at a cost that depends on `max_blocks` alone.

        Moves listed blocks to the queue's end, so that a block whose write fails delays no other.
        """
        if self._rule_of(tier) is not Write.DEMOTED or self._slots[tier]:
            slots = list(islice(self._slots[tier], max_blocks))
            for slot in slots:
                self._slots[tier].move_to_end(slot)
            return slots
        num_cheap = self._ledger.num_cached(Priority.LEAST) + self._ledger.num_cached(Priority.COPIED)
        num_short = self._num_wanted_lossless - self._ledger.counts().free - num_cheap
        return self._ledger.order.oldest(Priority.ONLY_COPY, min(max_blocks, max(0, num_short)))

    def want_all(self) -> int:
        """Queues each block without a copy for every tier, also later blocks; counts the cached ones."""
        self._writes, self._num_wanted_lossless = {}, self._ledger.num_pages
        return self._ledger.num_cached(Priority.ONLY_COPY)

    def _rule_of(self, tier: Tier) -> Write:
        return self._writes.get(tier, Write.DEMOTED)


class Copies:
    """Copies of the full blocks of an arena, by slot; tails have none. queues: blocks to copy. Not thread-safe."""

    def __init__(self, ledger: Ledger[SlotId], queues: WriteQueues) -> None:
        self._ledger = ledger
        self._queues = queues
        self._flags = bytearray(ledger.num_pages)

    def index(self, slot: SlotId) -> None:
        """Notes a full block that is indexed from now on."""
        self._flags[slot] = _FULL
        self._queues.put_by(Write.ALL, slot, ())

    def note_reads(self, slots: Iterable[SlotId]) -> None:
        """Notes that blocks are read; the first read under a hold is the hand-off and no reuse."""
        for slot in slots:
            if self._flags[slot]:
                if self._flags[slot] & _READ or not self._ledger.num_references(slot):
                    self._queues.put_by(Write.REUSED, slot, self.tiers_of(slot))
                self._flags[slot] |= _READ

    def add(self, tier: Tier, slot: SlotId) -> bool:
        """Notes a copy in a tier; False for a tail."""
        if not self._flags[slot]:
            return False
        self._flags[slot] |= _IN[tier]
        self._queues.discard(slot, [tier])
        self._settle(slot)
        return True

    def remove(self, tier: Tier, slot: SlotId) -> bool:
        """Notes that a tier has lost its copy; False if it had none.

        The block keeps its place in the order: else blocks would be demoted to a small tier again and again.
        """
        had_copy = tier in self.tiers_of(slot)
        self._flags[slot] &= ~_IN[tier]
        return had_copy

    def supersede(self, slot: SlotId) -> None:
        """Has a full block evicted before others, and demoted to no tier, until it is read again."""
        if self._flags[slot]:
            self._flags[slot] |= _SUPERSEDED
            self._settle(slot)

    def restore(self, slots: Iterable[SlotId]) -> None:
        """Gives superseded blocks normal priority."""
        for slot in slots:
            if self._flags[slot] & _SUPERSEDED:
                self._flags[slot] &= ~_SUPERSEDED
                self._settle(slot)

    def want(self, slots: Iterable[SlotId], tier: Tier) -> None:
        """Queues blocks for a tier, whatever its rule, unless some tier has or awaits them."""
        for slot in slots:
            if slot not in self._queues and not self.is_safe(slot, COLD_TIERS):
                self._queues.put(tier, slot)

    def is_safe(self, slot: SlotId, tiers: Sequence[Tier]) -> bool:
        """Returns whether the arena may lose a block: some of these tiers have it, or it is a tail."""
        return not self._flags[slot] or any(self._flags[slot] & _IN[tier] for tier in tiers)

    def tiers_of(self, slot: SlotId) -> list[Tier]:
        """Lists the tiers that have a copy of an indexed block."""
        return [tier for tier in COLD_TIERS if self._flags[slot] & _IN[tier]]

    def unindex(self, slot: SlotId) -> None:
        """Drops the flags of a block that is not indexed any more."""
        if self._flags[slot]:
            self._flags[slot] = 0
            self._queues.discard(slot)

    def is_tail(self, slot: SlotId) -> bool:
        """Returns whether an indexed block is a tail."""
        return not self._flags[slot]

    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""
        slots = {slot for slot in self._ledger.pages if self._flags[slot]} | self._queues.slots
        are_indexed = all(self._ledger.key_of(slot) is not None for slot in slots)
        return [] if are_indexed else ["a block with copies is not indexed"]

    def _settle(self, slot: SlotId) -> None:
        """Sets the priority of a full block by its flags."""
        if self._flags[slot] & _SUPERSEDED:
            priority = Priority.LEAST
        else:
            priority = Priority.COPIED if self.is_safe(slot, COLD_TIERS) else Priority.ONLY_COPY
        self._ledger.set_priority(slot, priority)
