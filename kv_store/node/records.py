"""The records of a node's arena: events of its blocks, causes of misses, sessions, copies in cold tiers, and usage.

Beside them its contents, for administration: what it holds, by key.
"""

import threading
from collections.abc import Mapping, Sequence

from kv_store.node.books import Books, exclusive
from kv_store.node.directory_port import Block, ContentsPort, DirectoryStatus, KeepHint, RecordsPort
from kv_store.node.event_log import EVENT_TIERS, MAX_PAGE_BLOCKS, BlockEvents, EventCursor, EventPage
from kv_store.node.tombstones import Loss
from wire.ids import BlockKey
from wire.tier import Cause, EventKind, FarStatus, Miss, MissRun, StoredBlock, Tier, runs_of


class Records(RecordsPort):
    """Answers and notes about the blocks of the arena that `books` are of; thread-safe."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.bell = books.log.bell

    @exclusive
    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.books.ledger.find(key) is not None for key in keys]

    @exclusive
    def retain(self, keys: Sequence[BlockKey], hint: KeepHint) -> int:
        books = self.books
        found = books.find(dict.fromkeys(keys))
        own = [slot for slot in found if books.proof(slot).root_digest == hint.namespace]
        books.touch(own)
        full = [slot for slot in own if not books.copies.is_tail(slot)]
        return books.sessions.note(hint, full, books.shares.max_slots(hint.namespace))

    @exclusive
    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes]) -> list[MissRun]:
        asked = dict(zip(keys, parents, strict=False))
        lost = {key: asked[key] for key in asked if self.books.ledger.find(key) is None}
        causes = self.books.tombstones.why(lost)
        return [*runs_of((causes.get(key, Miss(Cause.BEHIND)) for key in asked), 0, 1)]

    @exclusive
    def mark_cold(self, tier: Tier, stored: Sequence[BlockKey], lost: Sequence[BlockKey]) -> int:
        books, find = self.books, self.books.ledger.find
        for key in lost:
            slot = find(key)
            if books.tombstones.lose_copy(key, tier) if slot is None else books.copies.remove(tier, slot):
                books.log.note(EventKind.REMOVED, tier, key)
        copied = {slot: key for key in stored if (slot := find(key)) is not None}
        marked = [slot for slot in copied if books.copies.add(tier, slot)]
        for slot in marked:
            books.log.note(EventKind.STORED, tier, copied[slot])
        return len(marked)

    @exclusive
    def note_cold(self, cold: FarStatus) -> None:
        """Notes a cold tier as its writer finds it, for the processes that only read there."""
        self.books.queues.status_of[cold.tier] = cold

    @exclusive
    def leave(self) -> int:
        """Has each block that only this arena has written to a cold tier, from now on; counts such blocks."""
        return self.books.queues.want_all()

    @property
    def shares(self) -> Mapping[bytes, float]:
        return self.books.shares.by_namespace

    @exclusive
    def set_shares(self, shares: Mapping[bytes, float]) -> None:
        """Bounds the slots of namespaces, by their roots' digests: beyond its share, a namespace's own go first.

        Writers hold cold tiers to the same shares.
        """
        self.books.shares.set(shares, self.books.blocks())

    @exclusive
    def events(self, after: EventCursor) -> EventPage:
        log, epoch, num_slots = self.books.log, self.books.epoch, self.books.ledger.num_pages
        number, slot = log.number, after.slot
        is_known = after.epoch == epoch and log.reaches(after.number)
        if not is_known or not 0 <= slot < num_slots:
            return self._with_slots(after, 0, [BlockEvents(EventKind.CLEARED, tier, []) for tier in EVENT_TIERS])
        events = log.after(after.number, MAX_PAGE_BLOCKS)
        if slot and number - after.number <= MAX_PAGE_BLOCKS:
            return self._with_slots(after, slot, events)
        last = min(number, after.number + MAX_PAGE_BLOCKS)
        return EventPage(after, EventCursor(epoch, last, slot), events)

    def wait_for_events(self, after: EventCursor, wait_s: float) -> bool:
        news = threading.Event()
        with self.bell.waking(news.set):
            return self._has_events(after) or news.wait(wait_s)

    @exclusive
    def status(self) -> DirectoryStatus:
        books = self.books
        return DirectoryStatus(
            counts=books.ledger.counts(),
            num_leases=len(books.claims.leases),
            num_holds=len(books.claims.holds),
            num_kept=books.sessions.num_kept,
            epoch=books.epoch,
            hits=books.num_read[True],
            misses=books.num_read[False],
            evictions=books.ledger.num_evicted,
            cold=list(books.queues.status_of.values()),
        )

    @exclusive
    def check(self) -> list[str]:
        parts = (self.books.ledger, self.books.copies, self.books.sessions, self.books.claims)
        return [problem for part in parts for problem in part.check()]

    @exclusive
    def _has_events(self, after: EventCursor) -> bool:
        return after != EventCursor(self.books.epoch, self.books.log.number)

    def _with_slots(self, after: EventCursor, first: int, events: list[BlockEvents]) -> EventPage:
        """Adds a part of a snapshot to all events that there are, so that it holds with them."""
        copies, ledger = self.books.copies, self.books.ledger
        slots = ledger.pages[first : first + MAX_PAGE_BLOCKS]
        full = [slot for slot in slots if not copies.is_tail(slot)]
        there = {slot: key for slot in full if (key := ledger.key_of(slot)) is not None}
        for tier in EVENT_TIERS:
            keys = [key for slot, key in there.items() if tier is Tier.HOST or tier in copies.tiers_of(slot)]
            events += [BlockEvents(EventKind.STORED, tier, keys)] if keys else []
        next_slot = (first + len(slots)) % ledger.num_pages
        return EventPage(after, EventCursor(self.books.epoch, self.books.log.number, next_slot), events)


class Contents(ContentsPort):
    """Lists and clears the blocks of the arena that `books` are of; thread-safe."""

    def __init__(self, books: Books, block_bytes: int) -> None:
        self.books = books
        self._block_bytes = block_bytes

    @exclusive
    def keys(self, first_slot: int, num_slots: int) -> list[BlockKey]:
        slots = self.books.ledger.pages[max(0, first_slot) : max(0, first_slot) + max(0, num_slots)]
        return [key for slot in slots if (key := self.books.ledger.key_of(slot)) is not None]

    @exclusive
    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        books = self.books
        found = {key: slot for key in keys if (slot := books.ledger.find(key)) is not None}
        return [
            StoredBlock(key, books.proof(slot).root_digest, self._block_bytes, books.idle_s(slot))
            for key, slot in found.items()
        ]

    @exclusive
    def blocks(self) -> list[Block]:
        """Returns the indexed blocks."""
        return self.books.blocks()

    @exclusive
    def clear(self, keys: Sequence[BlockKey]) -> int:
        return self.books.unindex(self.books.find(keys), Loss.CLEARED)
