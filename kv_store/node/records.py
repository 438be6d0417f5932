"""The records of a node's arena: events of its blocks, causes of misses, sessions, copies in cold tiers, and usage.

Also its contents, by key, for administration.
"""

import threading
from collections.abc import Mapping, Sequence

from kv_store.node.directory_port import ContentsPort, RecordsPort
from kv_store.node.directory_state import DirectoryState, exclusive
from kv_store.node.event_log import EVENT_TIERS, MAX_PAGE_BLOCKS, BlockEvents, EventCursor, EventPage
from kv_store.node.messages import DirectoryStatus, KeepHint
from kv_store.node.tombstones import Loss
from wire.ids import BlockKey
from wire.tier import Cause, EventKind, FarStatus, Miss, MissRun, StoredBlock, Tier, runs_of


class Records(RecordsPort):
    """The calls of `RecordsPort` over a DirectoryState; thread-safe."""

    def __init__(self, state: DirectoryState) -> None:
        self.state = state
        self.signal = state.log.signal

    @exclusive
    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.state.ledger.find(key) is not None for key in keys]

    @exclusive
    def keep(self, keys: Sequence[BlockKey], hint: KeepHint) -> int:
        state = self.state
        found = state.find(dict.fromkeys(keys))
        own = [slot for slot in found if state.proof(slot).root_digest == hint.namespace]
        state.touch(own)
        full = [slot for slot in own if not state.copies.is_tail(slot)]
        return state.sessions.note(hint, full, state.shares.max_slots(hint.namespace))

    @exclusive
    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes]) -> list[MissRun]:
        asked = dict(zip(keys, parents, strict=False))
        lost = {key: asked[key] for key in asked if self.state.ledger.find(key) is None}
        causes, here = self.state.tombstones.why(lost), Miss(Cause.BEHIND)
        return [*runs_of((causes.get(key, here) for key in asked), 1)]

    @exclusive
    def mark_cold(self, tier: Tier, stored: Sequence[BlockKey], lost: Sequence[BlockKey]) -> int:
        state, find = self.state, self.state.ledger.find
        for key in lost:
            slot = find(key)
            if state.tombstones.lose_copy(key, tier) if slot is None else state.copies.remove(tier, slot):
                state.log.note(EventKind.REMOVED, tier, key)
        copied = {slot: key for key in stored if (slot := find(key)) is not None}
        marked = [slot for slot in copied if state.copies.add(tier, slot)]
        for slot in marked:
            state.log.note(EventKind.STORED, tier, copied[slot])
        return len(marked)

    @exclusive
    def note_cold(self, cold: FarStatus) -> None:
        """Notes the writer's state of a cold tier, for processes that only read there."""
        self.state.queues.status_of[cold.tier] = cold

    @exclusive
    def leave(self) -> int:
        """Begins to write each block that only this arena has to a cold tier; counts such blocks."""
        return self.state.queues.want_all()

    @property
    def shares(self) -> Mapping[bytes, float]:
        return self.state.shares.by_namespace

    @exclusive
    def set_shares(self, shares: Mapping[tuple[bytes, ...], float]) -> None:
        """Bounds the slots of tenants, by the digests of their namespaces' roots: beyond its share, its own go first.

        Writers apply the same shares to cold tiers, there to each namespace.
        """
        self.state.shares.set(shares, self.state.blocks())

    @exclusive
    def events(self, after: EventCursor) -> EventPage:
        log, epoch, num_slots = self.state.log, self.state.epoch, self.state.ledger.num_pages
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
        with self.signal.subscribed(news.set):
            return self._has_events(after) or news.wait(wait_s)

    @exclusive
    def status(self) -> DirectoryStatus:
        state = self.state
        return DirectoryStatus(
            counts=state.ledger.counts(),
            num_leases=len(state.claims.leases),
            num_holds=len(state.claims.holds),
            num_kept=state.sessions.num_kept,
            epoch=state.epoch,
            hits=state.num_read[True],
            misses=state.num_read[False],
            evictions=state.ledger.num_evicted,
            cold=list(state.queues.status_of.values()),
        )

    @exclusive
    def check(self) -> list[str]:
        parts = (self.state.ledger, self.state.copies, self.state.sessions, self.state.claims)
        return [problem for part in parts for problem in part.check()]

    @exclusive
    def _has_events(self, after: EventCursor) -> bool:
        return after != EventCursor(self.state.epoch, self.state.log.number)

    def _with_slots(self, after: EventCursor, first: int, events: list[BlockEvents]) -> EventPage:
        """Adds a part of a snapshot to all present events, so that both together are true."""
        copies, ledger = self.state.copies, self.state.ledger
        slots = ledger.pages[first : first + MAX_PAGE_BLOCKS]
        full = [slot for slot in slots if not copies.is_tail(slot)]
        there = {slot: key for slot in full if (key := ledger.key_of(slot)) is not None}
        for tier in EVENT_TIERS:
            keys = [key for slot, key in there.items() if tier is Tier.HOST or tier in copies.tiers_of(slot)]
            events += [BlockEvents(EventKind.STORED, tier, keys)] if keys else []
        next_slot = (first + len(slots)) % ledger.num_pages
        return EventPage(after, EventCursor(self.state.epoch, self.state.log.number, next_slot), events)


class Contents(ContentsPort):
    """The calls of `ContentsPort` over a DirectoryState; thread-safe. block_bytes: bytes of a slot."""

    def __init__(self, state: DirectoryState, block_bytes: int) -> None:
        self.state = state
        self._block_bytes = block_bytes

    @exclusive
    def keys(self, first_slot: int, num_slots: int) -> list[BlockKey]:
        slots = self.state.ledger.pages[max(0, first_slot) : max(0, first_slot) + max(0, num_slots)]
        return [key for slot in slots if (key := self.state.ledger.key_of(slot)) is not None]

    @exclusive
    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        state = self.state
        found = {key: slot for key in keys if (slot := state.ledger.find(key)) is not None}
        return [
            StoredBlock(key, state.proof(slot).root_digest, self._block_bytes, state.idle_s(slot))
            for key, slot in found.items()
        ]

    @exclusive
    def clear(self, keys: Sequence[BlockKey]) -> int:
        return self.state.unindex(self.state.find(keys), Loss.CLEARED)
