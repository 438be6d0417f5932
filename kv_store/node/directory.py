"""The directory of a node's arena: the claims of readers, writers and requests on its slots.

writing   reserve -> commit    a slot that is not indexed and not given to another writer
reading   lease -> release     an indexed slot that keeps its block until release or the lease's end
keeping   hold -> release      a slot that is not evicted until release or the hold's end

Two writers of one block get a slot each; the first commit is indexed, and the other's slot is free again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kv_store.eviction.order import EvictionOrder, EvictionPolicy
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.node.directory_port import DirectoryPort
from kv_store.node.directory_state import DirectoryState, exclusive
from kv_store.node.event_log import NUM_PLACES
from kv_store.node.messages import Block, DirectoryInfo, Entry, Hold, HoldRoom, Lease, Reservation
from kv_store.node.records import Contents, Records
from kv_store.node.sessions import DEFAULT_LIMITS, KeepLimits
from kv_store.node.tombstones import Loss
from wire.block_names import BlockName
from wire.ids import AttemptId, BlockKey, SlotId
from wire.tier import Tier, Write

_MAX_HELD_SHARE = 0.25
"""Beyond this share of the slots, held blocks move to cold tiers; prefill waits at twice this share (`HoldBudget`)."""


@dataclass(frozen=True)
class ColdBatch:
    """Blocks to copy to a cold tier, under a lease."""

    lease_id: int
    blocks: list[Block]


class Directory(DirectoryPort):
    """The directory of `num_slots` slots, without their bytes; thread-safe. `clock` is monotonic, in seconds.

    `kv_store.node.directory_state.DirectoryState` describes the other settings.
    """

    records: Records
    contents: Contents

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
        self.state = DirectoryState(
            num_slots,
            clock,
            order=order,
            policy=policy,
            high_water=high_water,
            writes=writes or {},
            keeps=keeps,
            num_events=num_events,
        )
        self._claims = self.state.claims
        self._info = DirectoryInfo(self.state.epoch, arena_path, num_slots, block_bytes)
        self._max_held = num_slots * _MAX_HELD_SHARE
        self.records = Records(self.state)
        self.contents = Contents(self.state, block_bytes)

    def attach(self) -> DirectoryInfo:
        return self._info

    @exclusive
    def reserve(self, reservation_id: str, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        find = self.state.ledger.find
        self._claims.reservations.end_all_of(reservation_id)
        resident = self.state.find(name.key for name in names)
        self.state.touch(resident)
        self._keep(hold, resident)
        kept = resident if hold is None else []  # a batch must not evict its own prefix
        lease_id = self._claims.leases.take(reservation_id, kept, 1.0)
        taken = self._claims.reservations.take(reservation_id, [name for name in names if find(name.key) is None])
        for slot in taken:
            self.state.forget(slot)
        slots = iter(taken)
        self._claims.leases.end(lease_id)
        given = [next(slots, None) if find(name.key) is None else None for name in names]
        return Reservation(given, len(resident))

    @exclusive
    def commit(self, reservation_id: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        reservations = self._claims.reservations
        written = [block for block in blocks if reservations.name_of(reservation_id, block.slot) == block.name]
        for block in written:
            self.state.index(block)
        resident = self.state.find(block.name.key for block in blocks)
        self._keep(hold, resident)
        for block in reversed(written):  # behind the hold: a held block is not idle for a moment in between
            reservations.end(reservation_id, block.slot)
        return len(resident)

    @exclusive
    def abandon(self, reservation_id: str) -> int:
        return self._claims.reservations.end_all_of(reservation_id)

    @exclusive
    def writer_died(self, writer: str) -> None:
        """Gives back the slots of a writer and reader. Call it only after its process has ended."""
        self._claims.reservations.end_all_of(writer)
        self._claims.leases.end_all_of(writer)

    @exclusive
    def lease(self, reader: str, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
        slots = [self.state.ledger.find(key) for key in keys]
        found = [slot for slot in slots if slot is not None]
        self.state.touch(found)
        self.state.copies.note_reads(found)
        self.state.num_read.update({True: len(found), False: len(keys) - len(found)})
        entries = [None if slot is None else Entry(slot, self.state.proof(slot).checksum) for slot in slots]
        return Lease(self._claims.leases.take(reader, found, ttl_s), entries)

    @exclusive
    def lease_cold(self, tier: Tier, max_blocks: int, ttl_s: float) -> ColdBatch:
        """Leases blocks to write to a tier, the oldest first."""
        slots = self.state.queues.next(tier, max_blocks)
        return ColdBatch(self._claims.leases.take("", slots, ttl_s), [self.state.block(slot) for slot in slots])

    @exclusive
    def release(self, lease_id: int) -> bool:
        return self._claims.leases.end(lease_id)

    @exclusive
    def reject(self, blocks: Sequence[Block]) -> int:
        return self.state.unindex([block.slot for block in blocks if self._is_indexed(block)], Loss.CORRUPT)

    @exclusive
    def delete(self, keys: Sequence[BlockKey]) -> int:
        return self.state.unindex(self.state.find(keys), Loss.PURGED)

    @exclusive
    def renew(self, attempt_ids: Sequence[AttemptId], ttl_s: float) -> list[AttemptId]:
        holds, copies, tiers = self._claims.holds, self.state.copies, self.state.queues.tiers_up
        for attempt_id in attempt_ids:
            holds.end_if_moved(attempt_id, lambda slot: copies.is_safe(slot, tiers))
        return [attempt_id for attempt_id in attempt_ids if not holds.renew(attempt_id, ttl_s)]

    @exclusive
    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> int:
        return sum([self._claims.holds.release(attempt_id) for attempt_id in attempt_ids])

    @exclusive
    def share_room(self, router: str, num_blocks: int, ttl_s: float) -> HoldRoom:
        return self._claims.share_room(router, num_blocks, ttl_s)

    def _is_indexed(self, block: Block) -> bool:
        is_there = self.state.ledger.find(block.name.key) == block.slot
        return is_there and self.state.proof(block.slot).checksum == block.checksum

    def _keep(self, hold: Hold | None, slots: list[SlotId]) -> None:
        if hold is not None:
            self._claims.holds.keep(hold, slots)
            tiers = self.state.queues.tiers_up
            if tiers and self.state.ledger.counts().published > self._max_held:
                self.state.copies.want(self._claims.holds.move(hold.attempt_id), tiers[0])
