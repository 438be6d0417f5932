"""The state of a node's directory: the blocks in its slots, the claims on them, and the record of lost blocks.

    Directory ── claims on slots ──▶                   ┌─ ledger, proofs: the index         ─┐
    Records ─── records of blocks ─▶  DirectoryState ──┤  claims: leases, holds, reservations├── one lock
    Contents ── lists of blocks ───▶                   └─ copies, sessions, tombstones, log  ┘

A block enters and leaves the index here only, so that copies, sessions, tombstones and events follow it.
"""

import secrets
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from kv_store.eviction.order import EvictionOrder, EvictionPolicy, Priority
from kv_store.frame import CHECKSUM_BYTES
from kv_store.ledger import Ledger
from kv_store.node.claims import Claims
from kv_store.node.copies import Copies, WriteQueues
from kv_store.node.event_log import BlockEventLog
from kv_store.node.messages import Block
from kv_store.node.sessions import KeepLimits, Sessions
from kv_store.node.tombstones import Loss, Tombstones
from wire.block_names import BlockName
from wire.ids import BlockKey, SlotId
from wire.tier import EventKind, Tier, Write

P = ParamSpec("P")
T = TypeVar("T")

_NUM_LOST = 1 << 16
"""Number of lost blocks on record, at most the slots; for a larger arena a quarter of its slots."""


class DirectoryState:
    """The index, claims and lost blocks of `num_slots` slots.

    Entering its context takes the lock, and ends expired claims and sessions.

    order, policy: determine eviction. high_water, writes: see `kv_store.node.copies.WriteQueues`. keeps: limits of keep
    hints. num_events: length of the event log.
    """

    def __init__(
        self,
        num_slots: int,
        clock: Callable[[], float],
        *,
        order: type[EvictionOrder[SlotId]],
        policy: Callable[[int], EvictionPolicy],
        high_water: float,
        writes: Mapping[Tier, Write],
        keeps: KeepLimits,
        num_events: int,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.ledger = Ledger(num_slots, order, policy, self._bury_evicted)
        self.claims = Claims(self.ledger, clock)
        self.queues = WriteQueues(self.ledger, writes, high_water)
        self.copies = Copies(self.ledger, self.queues)
        self.sessions = Sessions(self.ledger, self.copies, clock, keeps)
        num_lost = max(num_slots // 4, min(num_slots, _NUM_LOST))
        self.tombstones = Tombstones(num_lost, num_slots, self.ledger.order.policy_name, clock)
        self.log = BlockEventLog(num_events)
        self.num_read = Counter[bool]()
        self.shares = SlotShares(self.ledger)
        self._proofs = _Proofs(num_slots)
        self._clock = clock
        self._used_s = array("f", bytes(4 * num_slots))
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.claims.expire()
        self.sessions.expire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def find(self, keys: Iterable[BlockKey]) -> list[SlotId]:
        """Finds the slots of the indexed keys."""
        return [slot for key in keys if (slot := self.ledger.find(key)) is not None]

    def block(self, slot: SlotId) -> Block:
        """Returns the block of an indexed slot."""
        key, parent = self.ledger.key_of(slot), self.ledger.order.parent_of(slot)
        assert key is not None, "the slot is not indexed"
        assert parent is not None, "the slot is not indexed"
        proof = self._proofs.get(slot)
        name = BlockName(key, parent, proof.tokens_digest, proof.root_digest, self.copies.is_tail(slot))
        return Block(slot, name, proof.checksum)

    def blocks(self) -> list[Block]:
        """Returns the indexed blocks."""
        return [self.block(slot) for slot in self.ledger.pages if self.ledger.key_of(slot) is not None]

    def proof(self, slot: SlotId) -> "Proof":
        return self._proofs.get(slot)

    def idle_s(self, slot: SlotId) -> float:
        """Counts the seconds since the last use of an indexed block."""
        return max(0.0, self._clock() - self._used_s[slot])

    def index(self, block: Block) -> None:
        """Indexes a block, unless another slot has it."""
        priority = Priority.LEAST if block.name.is_tail else Priority.ONLY_COPY
        owner = self.shares.owner_of(block.name.root_digest)
        is_new = self.ledger.find(block.name.key) is None
        if self.ledger.index(block.slot, block.name.key, priority, block.name.parent, owner):
            self._proofs.put(block)
            self._used_s[block.slot] = self._clock()
            if not block.name.is_tail:
                self.copies.index(block.slot)
            if is_new and not block.name.is_tail:
                self.tombstones.index(block.name)
                self.log.note(EventKind.STORED, Tier.HOST, block.name.key)

    def unindex(self, slots: Sequence[SlotId], loss: Loss) -> int:
        """Takes blocks out of the index, records their loss, and counts them."""
        for slot in slots:
            self._bury(slot, loss)
            self.ledger.unindex(slot)
            self.forget(slot)
        return len(slots)

    def forget(self, slot: SlotId) -> None:
        """Drops copies and session of a block that has left the index."""
        self.copies.unindex(slot)
        self.sessions.unindex(slot)

    def touch(self, slots: Sequence[SlotId]) -> None:
        """Counts a use of a prefix's blocks, in order."""
        self.copies.restore(slots)
        now_s = self._clock()
        for slot in reversed(slots):
            self.ledger.order.touch(slot)
            self._used_s[slot] = now_s

    def _bury_evicted(self, slot: SlotId) -> None:
        self._bury(slot, Loss.SHARE if self.ledger.order.is_beyond_share(slot) else Loss.ROOM)

    def _bury(self, slot: SlotId, loss: Loss) -> None:
        """Records an indexed full block that is about to be lost."""
        key, parent = self.ledger.key_of(slot), self.ledger.order.parent_of(slot)
        if key is not None and parent is not None and not self.copies.is_tail(slot):
            copies = self.copies.tiers_of(slot)
            is_cleared = loss is Loss.CLEARED
            self.tombstones.bury(key, parent, loss, [] if is_cleared else copies)
            for tier in (Tier.HOST, *(copies if is_cleared else ())):
                self.log.note(EventKind.REMOVED, tier, key)


class SlotShares:
    """The share of the slots (0 to 1) of each tenant, the owner of its namespaces; without a share it is owner 0."""

    def __init__(self, ledger: Ledger[SlotId]) -> None:
        self.by_namespace: Mapping[bytes, float] = {}
        self._ledger = ledger
        self._owners: dict[bytes, int] = {}

    def set(self, shares: Mapping[tuple[bytes, ...], float], blocks: Iterable[Block]) -> None:
        """Sets the shares, by the root digests of a tenant's namespaces, and the owners of the indexed `blocks`."""
        order, num_slots = self._ledger.order, self._ledger.num_pages
        self.by_namespace = {digest: share for digests, share in shares.items() for digest in digests}
        for digests in shares:
            known = [self._owners[one] for one in digests if one in self._owners]
            self._owners |= dict.fromkeys(digests, known[0] if known else len(self._owners) + 1)
        order.max_owned = {self._owners[digests[0]]: int(share * num_slots) for digests, share in shares.items()}
        for block in blocks:
            order.set_owner(block.slot, self.owner_of(block.name.root_digest))

    def owner_of(self, namespace: bytes) -> int:
        """Returns the number of a namespace's owner; 0 for all namespaces without a share."""
        return self._owners.get(namespace, 0)

    def max_slots(self, namespace: bytes) -> int:
        """Returns a namespace's bound in slots; all slots without a share."""
        num_slots = self._ledger.num_pages
        return min(num_slots, self._ledger.order.max_owned.get(self.owner_of(namespace), num_slots))


class Proof(NamedTuple):
    """Digests of a block's tokens and root, and the checksum of its payload."""

    tokens_digest: bytes
    root_digest: bytes
    checksum: bytes


class _Proofs:
    """The proofs of the blocks in slots, in flat memory, with each root's digest once.

    An object for each would take several times as much memory, and garbage collection would visit all of them.
    """

    _PROOF = struct.Struct(f"32s{CHECKSUM_BYTES}s")

    def __init__(self, num_slots: int) -> None:
        self._proofs = bytearray(num_slots * self._PROOF.size)
        self._roots: list[bytes | None] = [None] * num_slots
        self._known = dict[bytes, bytes]()
        self._num_of = Counter[bytes]()

    def put(self, block: Block) -> None:
        """Replaces the slot's proof."""
        before, root = self._roots[block.slot], block.name.root_digest
        self._num_of[root] += 1
        self._roots[block.slot] = self._known.setdefault(root, root)
        if before is not None:
            self._num_of[before] -= 1
            if not self._num_of[before]:
                del self._num_of[before], self._known[before]
        self._PROOF.pack_into(self._proofs, block.slot * self._PROOF.size, block.name.tokens_digest, block.checksum)

    def get(self, slot: SlotId) -> Proof:
        root = self._roots[slot]
        assert root is not None, "the slot has had no block"
        tokens_digest, checksum = self._PROOF.unpack_from(self._proofs, slot * self._PROOF.size)
        return Proof(tokens_digest, root, checksum)


class _Owner(Protocol):
    @property
    def state(self) -> DirectoryState: ...


Owner = TypeVar("Owner", bound=_Owner)


def exclusive(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """A decorator that runs a method within the context of its object's state."""

    @wraps(method)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.state:
            return method(self, *args, **kwargs)

    return run
