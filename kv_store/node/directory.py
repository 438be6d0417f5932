"""The books of a node's arena: slots and their blocks, and the claims of readers, writers and requests on them.

writing   reserve -> commit    a slot that is not indexed and not given to another writer
reading   lease -> release     an indexed slot that keeps its block until release or the lease's end
keeping   hold -> release      a slot that is not evicted until release or the hold's end

Two writers of one block get a slot each; the first commit is indexed, and the other's slot is free again.
"""

import secrets
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from kv_store.eviction.order import EvictionOrder, Priority
from kv_store.eviction.policy import EvictionPolicy, LeastRecentlyUsed
from kv_store.frame import CHECKSUM_BYTES
from kv_store.ledger import Ledger, PageState
from kv_store.node.claims import Holds, Leases, Reservations
from kv_store.node.copies import Copies
from kv_store.node.directory_port import (
    Block,
    DirectoryInfo,
    DirectoryPort,
    DirectoryStatus,
    Entry,
    Hold,
    KeepHint,
    Lease,
    Reservation,
)
from kv_store.node.event_log import (
    EVENT_TIERS,
    MAX_PAGE_BLOCKS,
    NUM_PLACES,
    BlockEventLog,
    BlockEvents,
    EventCursor,
    EventPage,
)
from kv_store.node.sessions import DEFAULT_LIMITS, KeepLimits, Sessions
from kv_store.node.tombstones import Loss, Tombstones
from wire.ids import AttemptId, BlockKey, SlotId
from wire.names import BlockName
from wire.tier import COLD_TIERS, Cause, EventKind, FarStatus, Miss, MissRun, StoredBlock, Tier, Write, runs_of

_MAX_HELD_SHARE = 0.25
"""Beyond this share of the slots, held blocks are moved to cold tiers; prefill waits at twice of it (`HoldBudget`)."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ColdBatch:
    """Blocks to copy to a cold tier, under a lease."""

    lease_id: int
    blocks: list[Block]


def _exclusive(method: Callable[Concatenate["Directory", P], T]) -> Callable[Concatenate["Directory", P], T]:
    """Lets one caller in at a time, after the claims that have run out are ended."""

    @wraps(method)
    def exclusive(self: "Directory", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            self._leases.expire()
            self._holds.expire()
            self._sessions.expire()
            return method(self, *args, **kwargs)

    return exclusive


class Directory(DirectoryPort):
    """The directory of `num_slots` slots, without their bytes; thread-safe. `clock` is monotonic, in seconds.

    order, policy: of eviction. high_water, writes: as in `kv_store.node.copies.Copies`. keeps: bounds on hints.
    num_events: places of the log.
    """

    def __init__(
        self,
        num_slots: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        arena_path: str = "",
        block_bytes: int = 0,
        order: type[EvictionOrder[SlotId]] = EvictionOrder,
        policy: Callable[[int], EvictionPolicy] = LeastRecentlyUsed,
        high_water: float = 0.75,
        writes: Mapping[Tier, Write] | None = None,
        keeps: KeepLimits = DEFAULT_LIMITS,
        num_events: int = NUM_PLACES,
    ) -> None:
        self._info = DirectoryInfo(secrets.token_hex(8), arena_path, num_slots, block_bytes)
        self._ledger = Ledger(num_slots, order, policy, self._bury_evicted)
        self._tombstones = Tombstones(num_slots, self._ledger.order.policy_name, clock)
        self._log = BlockEventLog(num_events)
        self._leases = Leases(self._ledger, clock)
        self._holds = Holds(self._ledger, clock)
        self._reservations = Reservations(self._ledger)
        self._num_read = Counter[bool]()
        self._copies = Copies(self._ledger, writes or {}, high_water)
        self._blocks = _Blocks(self._ledger, self._copies)
        self._sessions = Sessions(self._ledger, self._copies, clock, keeps)
        self._cold: dict[Tier, FarStatus] = {}
        self.shares: Mapping[bytes, float] = {}
        self._owners: dict[bytes, int] = {}
        self._max_held = num_slots * _MAX_HELD_SHARE
        self._clock = clock
        self._used_s = array("f", bytes(4 * num_slots))
        self._lock = threading.Lock()

    def info(self) -> DirectoryInfo:
        return self._info

    def attach(self) -> DirectoryInfo:
        return self._info

    @_exclusive
    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._ledger.find(key) is not None for key in keys]

    @_exclusive
    def reserve(self, writer: str, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        self._reservations.end_all_of(writer)
        resident = self._find(name.key for name in names)
        self._touch(resident)
        self._keep(hold, resident)
        lease_id = self._leases.take(writer, resident, 1.0)  # a batch must not evict its own prefix
        missing = [name for name in names if self._ledger.find(name.key) is None]
        taken = self._reservations.take(writer, missing)
        for slot in taken:
            self._forget(slot)
        slots = iter(taken)
        self._leases.end(lease_id)
        given = [next(slots, None) if self._ledger.find(name.key) is None else None for name in names]
        return Reservation(given, len(resident))

    @_exclusive
    def commit(self, writer: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        written = [block for block in blocks if self._reservations.name_of(writer, block.slot) == block.name]
        for block in written:
            self._index(block)
        for block in reversed(written):
            self._reservations.end(writer, block.slot)
        resident = self._find(block.name.key for block in blocks)
        self._keep(hold, resident)
        return len(resident)

    @_exclusive
    def abandon(self, writer: str) -> int:
        return self._reservations.end_all_of(writer)

    @_exclusive
    def writer_died(self, writer: str) -> None:
        """Gives back the slots of a writer and reader. To be called only once its process is gone."""
        self._reservations.end_all_of(writer)
        self._leases.end_all_of(writer)

    @_exclusive
    def lease(self, reader: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
        slots = [self._ledger.find(key) for key in keys]
        found = [slot for slot in slots if slot is not None]
        self._touch(found)
        self._copies.note_reads(found)
        self._num_read.update({True: len(found), False: len(keys) - len(found)})
        entries = [None if slot is None else Entry(slot, self._blocks.checksum(slot)) for slot in slots]
        return Lease(self._leases.take(reader, found, ttl_s), entries)

    @_exclusive
    def release(self, lease_id: int) -> bool:
        return self._leases.end(lease_id)

    @_exclusive
    def reject(self, blocks: Sequence[Block]) -> int:
        return self._unindex([block.slot for block in blocks if self._is_indexed(block)], Loss.CORRUPT)

    @_exclusive
    def delete(self, keys: Sequence[BlockKey]) -> int:
        return self._unindex(self._find(keys), Loss.PURGED)

    @_exclusive
    def keys(self, first_slot: int, num_slots: int) -> list[BlockKey]:
        slots = self._ledger.pages[max(0, first_slot) : max(0, first_slot) + max(0, num_slots)]
        return [key for slot in slots if (key := self._ledger.key_of(slot)) is not None]

    @_exclusive
    def describe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        now_s, num_bytes = self._clock(), self._info.block_bytes
        found = {key: slot for key in keys if (slot := self._ledger.find(key)) is not None}
        return [
            StoredBlock(key, self._blocks.root_digest(slot), num_bytes, max(0.0, now_s - self._used_s[slot]))
            for key, slot in found.items()
        ]

    @_exclusive
    def clear(self, keys: Sequence[BlockKey]) -> int:
        return self._unindex(self._find(keys), Loss.CLEARED)

    @_exclusive
    def retain(self, keys: Sequence[BlockKey], hint: KeepHint) -> int:
        found = self._find(dict.fromkeys(keys))
        own = [slot for slot in found if self._blocks.root_digest(slot) == hint.namespace]
        self._touch(own)
        full = [slot for slot in own if not self._copies.is_tail(slot)]
        owner, num_slots = self._owners.get(hint.namespace, 0), self._info.num_slots
        return self._sessions.note(hint, full, min(num_slots, self._ledger.order.max_owned.get(owner, num_slots)))

    @_exclusive
    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes]) -> list[MissRun]:
        asked = dict(zip(keys, parents, strict=False))
        causes = self._tombstones.why({key: asked[key] for key in asked if self._ledger.find(key) is None})
        return [*runs_of((causes.get(key, Miss(Cause.BEHIND)) for key in asked), 0, 1)]

    @_exclusive
    def renew(self, attempt_ids: Sequence[AttemptId], ttl_s: float) -> list[AttemptId]:
        tiers = self._tiers_up
        for attempt_id in attempt_ids:
            self._holds.end_if_moved(attempt_id, lambda slot: self._copies.is_safe(slot, tiers))
        return [attempt_id for attempt_id in attempt_ids if not self._holds.renew(attempt_id, ttl_s)]

    @_exclusive
    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> int:
        return sum([self._holds.release(attempt_id) for attempt_id in attempt_ids])

    @_exclusive
    def cold_candidates(self, tier: Tier, max_blocks: int, ttl_s: float) -> ColdBatch:
        """Leases blocks to be written to a tier, the oldest first."""
        slots = self._copies.wanted(tier, max_blocks)
        return ColdBatch(self._leases.take("", slots, ttl_s), [self._blocks.get(slot) for slot in slots])

    @_exclusive
    def mark_cold(self, tier: Tier, keys: Sequence[BlockKey]) -> int:
        copied = {slot: key for key in keys if (slot := self._ledger.find(key)) is not None}
        marked = [slot for slot in copied if self._copies.add(tier, slot)]
        for slot in marked:
            self._log.note(EventKind.STORED, tier, copied[slot])
        return len(marked)

    @_exclusive
    def leave(self) -> int:
        """Has each block that only this arena has written to a cold tier, from now on; counts such blocks."""
        return self._copies.want_all()

    @_exclusive
    def set_shares(self, shares: Mapping[bytes, float]) -> None:
        """Bounds the slots of namespaces, by their roots' digests: beyond its share, a namespace's own go first.

        Writers hold cold tiers to the same shares.
        """
        self.shares = shares
        for digest in shares:
            self._owners.setdefault(digest, len(self._owners) + 1)
        self._ledger.order.max_owned = {
            self._owners[digest]: int(share * self._info.num_slots) for digest, share in shares.items()
        }
        for block in self._indexed():
            self._ledger.order.set_owner(block.slot, self._owners.get(block.name.root_digest, 0))

    @_exclusive
    def note_cold(self, cold: FarStatus) -> None:
        """Notes a cold tier as its writer finds it, for the processes that only read there."""
        self._cold[cold.tier] = cold

    @_exclusive
    def events(self, after: EventCursor) -> EventPage:
        number, slot = self._log.number, after.slot
        is_known = after.epoch == self._info.epoch and self._log.reaches(after.number)
        if not is_known or not 0 <= slot < self._info.num_slots:
            return self._with_slots(after, 0, [BlockEvents(EventKind.CLEARED, tier, []) for tier in EVENT_TIERS])
        events = self._log.after(after.number, MAX_PAGE_BLOCKS)
        if slot and number - after.number <= MAX_PAGE_BLOCKS:
            return self._with_slots(after, slot, events)
        last = min(number, after.number + MAX_PAGE_BLOCKS)
        return EventPage(after, EventCursor(self._info.epoch, last, slot), events)

    @_exclusive
    def status(self) -> DirectoryStatus:
        return DirectoryStatus(
            counts=self._ledger.counts(),
            num_leases=len(self._leases),
            num_holds=len(self._holds),
            num_kept=self._sessions.num_kept,
            epoch=self._info.epoch,
            hits=self._num_read[True],
            misses=self._num_read[False],
            evictions=self._ledger.num_evicted,
            cold=list(self._cold.values()),
        )

    @_exclusive
    def blocks(self) -> list[Block]:
        """Returns the indexed blocks."""
        return self._indexed()

    @_exclusive
    def visit_idle(self, visit: Callable[[list[Block]], None]) -> None:
        """Shows the indexed blocks that no process reads or writes; none begins to before `visit` returns."""
        visit([block for block in self._indexed() if not self._ledger.num_transfers(block.slot)])

    @_exclusive
    def check(self) -> list[str]:
        writing, references = self._reservations.transfers, self._holds.references
        transfers = writing + self._leases.transfers
        slots = self._ledger.pages
        rules = {
            "references differ from holds": all(
                self._ledger.num_references(slot) == references[slot] for slot in slots
            ),
            "transfers differ from claims": all(self._ledger.num_transfers(slot) == transfers[slot] for slot in slots),
            "a slot has two writers": all(num == 1 for num in writing.values()),
            "a slot that is written to does not drain": all(
                self._ledger.state(slot) is PageState.DRAINING for slot in writing
            ),
        }
        problems = [problem for problem, holds in rules.items() if not holds]
        return self._ledger.check() + self._copies.check() + self._sessions.check() + problems

    def _with_slots(self, after: EventCursor, first: int, events: list[BlockEvents]) -> EventPage:
        """Adds a part of a snapshot to all events that there are, so that it holds with them."""
        slots = self._ledger.pages[first : first + MAX_PAGE_BLOCKS]
        full = [slot for slot in slots if not self._copies.is_tail(slot)]
        there = {slot: key for slot in full if (key := self._ledger.key_of(slot)) is not None}
        for tier in EVENT_TIERS:
            keys = [key for slot, key in there.items() if tier is Tier.HOST or self._copies.has(tier, slot)]
            events += [BlockEvents(EventKind.STORED, tier, keys)] if keys else []
        next_slot = (first + len(slots)) % self._info.num_slots
        return EventPage(after, EventCursor(self._info.epoch, self._log.number, next_slot), events)

    def _find(self, keys: Iterable[BlockKey]) -> list[SlotId]:
        return [slot for key in keys if (slot := self._ledger.find(key)) is not None]

    def _unindex(self, slots: Sequence[SlotId], loss: Loss) -> int:
        for slot in slots:
            self._bury(slot, loss)
            self._ledger.unindex(slot)
            self._forget(slot)
        return len(slots)

    def _forget(self, slot: SlotId) -> None:
        """Drops copies and session of a block that has left the index."""
        self._copies.unindex(slot)
        self._sessions.unindex(slot)

    def _bury_evicted(self, slot: SlotId) -> None:
        self._bury(slot, Loss.SHARE if self._ledger.order.is_beyond_share(slot) else Loss.ROOM)

    def _bury(self, slot: SlotId, loss: Loss) -> None:
        """Remembers an indexed full block that is about to be lost."""
        key, parent = self._ledger.key_of(slot), self._ledger.order.parent_of(slot)
        if key is not None and parent is not None and not self._copies.is_tail(slot):
            is_copied = loss is not Loss.CLEARED and self._copies.is_safe(slot, COLD_TIERS)
            self._tombstones.bury(key, parent, loss, is_copied)
            self._log.note(EventKind.REMOVED, Tier.HOST, key)

    def _indexed(self) -> list[Block]:
        return [self._blocks.get(slot) for slot in self._ledger.pages if self._ledger.key_of(slot) is not None]

    def _is_indexed(self, block: Block) -> bool:
        return self._ledger.find(block.name.key) == block.slot and self._blocks.checksum(block.slot) == block.checksum

    def _keep(self, hold: Hold | None, slots: list[SlotId]) -> None:
        if hold is not None:
            self._holds.keep(hold, slots)
            if self._tiers_up and self._ledger.counts().published > self._max_held:
                self._copies.want(self._holds.move(hold.attempt_id), self._tiers_up[0])

    @property
    def _tiers_up(self) -> list[Tier]:
        """Cold tiers that answer, nearest first."""
        return [tier for tier in COLD_TIERS if tier in self._cold and self._cold[tier].state != "broken"]

    def _index(self, block: Block) -> None:
        priority = Priority.LEAST if block.name.is_tail else Priority.ONLY_COPY
        owner = self._owners.get(block.name.root_digest, 0)
        is_new = self._ledger.find(block.name.key) is None
        if self._ledger.index(block.slot, block.name.key, priority, block.name.parent, owner):
            self._blocks.put(block)
            self._used_s[block.slot] = self._clock()
            if not block.name.is_tail:
                self._copies.index(block.slot)
            if is_new and not block.name.is_tail:
                self._tombstones.index(block.name)
                self._log.note(EventKind.STORED, Tier.HOST, block.name.key)

    def _touch(self, slots: Sequence[SlotId]) -> None:
        self._copies.restore(slots)
        now_s = self._clock()
        for slot in reversed(slots):
            self._ledger.order.touch(slot)
            self._used_s[slot] = now_s


class _Blocks:
    """Digests and checksums of the blocks in slots, in flat memory; the ledger has the rest of their names.

    An object each would take several times as much, and every collection of garbage would visit them all.
    """

    _PROOFS = struct.Struct("32s32s16s")

    def __init__(self, ledger: Ledger[SlotId], copies: Copies) -> None:
        self._ledger = ledger
        self._copies = copies
        self._proofs = bytearray(ledger.num_pages * self._PROOFS.size)

    def put(self, block: Block) -> None:
        proofs = (block.name.tokens_digest, block.name.root_digest, block.checksum)
        self._PROOFS.pack_into(self._proofs, block.slot * self._PROOFS.size, *proofs)

    def get(self, slot: SlotId) -> Block:
        """Returns the block of an indexed slot."""
        key, parent = self._ledger.key_of(slot), self._ledger.order.parent_of(slot)
        assert key is not None, "the slot is not indexed"
        assert parent is not None, "the slot is not indexed"
        tokens_digest, root_digest, checksum = self._PROOFS.unpack_from(self._proofs, slot * self._PROOFS.size)
        name = BlockName(key, parent, tokens_digest, root_digest, self._copies.is_tail(slot))
        return Block(slot, name, checksum)

    def root_digest(self, slot: SlotId) -> bytes:
        start = slot * self._PROOFS.size + 32
        return bytes(self._proofs[start : start + 32])

    def checksum(self, slot: SlotId) -> bytes:
        end = (slot + 1) * self._PROOFS.size
        return bytes(self._proofs[end - CHECKSUM_BYTES : end])
