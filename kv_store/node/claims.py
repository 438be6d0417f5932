"""Claims on the slots of an arena: leases of readers, holds of attempts, reservations of writers.

A lease or a reservation is a transfer on its slots, which are then not allocated; a hold is a reference.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kv_store.ledger import Ledger, PageState
from kv_store.node.expiring import Expiring
from kv_store.node.messages import NO_LEASE, Hold, HoldRoom
from wire.block_names import BlockName
from wire.ids import AttemptId, SlotId


@dataclass(frozen=True)
class _Reading:
    reader: str
    slots: list[SlotId]


class Leases:
    """Leases over a ledger's slots, by id."""

    def __init__(self, ledger: Ledger[SlotId], clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._readings: Expiring[int, _Reading] = Expiring(clock)
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def transfers(self) -> Counter[SlotId]:
        """Leases on each slot."""
        return Counter(slot for _, reading in self._readings.items() for slot in reading.slots)

    def take(self, reader: str, slots: list[SlotId], ttl_s: float) -> int:
        """Takes a lease and returns its id, NO_LEASE without slots. Other ids are never used twice."""
        if not slots:
            return NO_LEASE
        for slot in slots:
            self._ledger.begin_transfer(slot)
        self._num_taken += 1
        self._readings.put(self._num_taken, _Reading(reader, slots), ttl_s)
        return self._num_taken

    def end(self, lease_id: int) -> bool:
        """Ends a lease; returns False if it has ended before."""
        reading = self._readings.pop(lease_id)
        if reading is not None:
            self._stop(reading)
        return reading is not None or lease_id == NO_LEASE

    def end_all_of(self, reader: str) -> None:
        for lease_id, reading in self._readings.items():
            if reading.reader == reader:
                self.end(lease_id)

    def expire(self) -> None:
        for reading in self._readings.expire():
            self._stop(reading)

    def _stop(self, reading: _Reading) -> None:
        for slot in reversed(reading.slots):  # children before their parents, which costs the ledger less
            self._ledger.end_transfer(slot)


@dataclass
class _Held:
    """The slots of a hold, in order; once it moves, also its slots without a copy in a cold tier."""

    slots: dict[SlotId, None] = field(default_factory=dict)
    to_move: list[SlotId] | None = None


class Holds:
    """Holds over a ledger's slots, by attempt."""

    def __init__(self, ledger: Ledger[SlotId], clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._held: Expiring[AttemptId, _Held] = Expiring(clock)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def references(self) -> Counter[SlotId]:
        """Holds on each slot."""
        return Counter(slot for _, held in self._held.items() for slot in held.slots)

    def keep(self, hold: Hold, slots: Iterable[SlotId]) -> None:
        """Adds slots to an attempt's hold, which does not move then until it is told again, and prolongs it."""
        held = self._held.get(hold.attempt_id) or _Held()
        for slot in slots:
            if slot not in held.slots:
                self._ledger.acquire(slot)
                held.slots[slot], held.to_move = None, None
        if held.slots:
            self._held.put(hold.attempt_id, held, hold.ttl_s)

    def move(self, attempt_id: AttemptId) -> list[SlotId]:
        """Marks an attempt's hold for early release, once cold tiers have its blocks; returns its slots."""
        held = self._held.get(attempt_id) or _Held()
        held.to_move = list(held.slots)
        return list(held.slots)

    def end_if_moved(self, attempt_id: AttemptId, is_safe: Callable[[SlotId], bool]) -> None:
        """Ends a moving hold, once the arena may lose all its slots."""
        held = self._held.get(attempt_id)
        if held is None or held.to_move is None:
            return
        while held.to_move and is_safe(held.to_move[-1]):
            held.to_move.pop()
        if not held.to_move:
            self.release(attempt_id)

    def renew(self, attempt_id: AttemptId, ttl_s: float) -> bool:
        """Prolongs an attempt's hold; returns False if there is none."""
        held = self._held.get(attempt_id)
        if held is not None:
            self._held.put(attempt_id, held, ttl_s)
        return held is not None

    def release(self, attempt_id: AttemptId) -> bool:
        """Ends an attempt's hold; returns False if there is none."""
        held = self._held.pop(attempt_id)
        self._let_go(held or _Held())
        return held is not None

    def expire(self) -> None:
        for held in self._held.expire():
            self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        for slot in reversed(held.slots):  # a prefix's end is evicted before its start
            self._ledger.free(slot)


class Reservations:
    """Reserved slots by reservation, without a time limit: only the writer, or its death, ends a reservation."""

    def __init__(self, ledger: Ledger[SlotId]) -> None:
        self._ledger = ledger
        self._writing: dict[str, dict[SlotId, BlockName]] = {}

    @property
    def transfers(self) -> Counter[SlotId]:
        """Writers of each slot."""
        return Counter(slot for names in self._writing.values() for slot in names)

    def take(self, reservation_id: str, names: list[BlockName]) -> list[SlotId]:
        """Reserves slots for the first of `names`, as many as are allocatable. The slots drain meanwhile."""
        slots = sorted(
            self._ledger.allocate(min(len(names), self._ledger.num_allocatable))
        )  # one copy may take neighbours
        for slot in slots:
            self._ledger.begin_transfer(slot)
            self._ledger.free(slot)
        self._writing.setdefault(reservation_id, {}).update(zip(slots, names, strict=False))
        return slots

    def name_of(self, reservation_id: str, slot: SlotId) -> BlockName | None:
        """Names the block that is written to a slot; None if the slot is not of this reservation."""
        return self._writing.get(reservation_id, {}).get(slot)

    def end(self, reservation_id: str, slot: SlotId) -> None:
        """Takes one slot out of a reservation."""
        del self._writing[reservation_id][slot]
        self._ledger.end_transfer(slot)

    def end_all_of(self, reservation_id: str) -> int:
        """Ends a reservation, and counts its slots."""
        slots = self._writing.pop(reservation_id, {})
        for slot in slots:
            self._ledger.end_transfer(slot)
        return len(slots)


class Claims:
    """All claims on the slots of an arena."""

    def __init__(self, ledger: Ledger[SlotId], clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self.leases = Leases(ledger, clock)
        self.holds = Holds(ledger, clock)
        self.reservations = Reservations(ledger)
        self._asked: Expiring[str, int] = Expiring(clock)

    def expire(self) -> None:
        """Ends expired leases and holds, and forgets routers that ask for no room any more."""
        self.leases.expire()
        self.holds.expire()
        self._asked.expire()

    def share_room(self, router: str, num_blocks: int, ttl_s: float) -> HoldRoom:
        """Notes the slots that a router's holds take or will take, for `ttl_s`; returns the others' slots."""
        self._asked.pop(router)
        others = [taken for _, taken in self._asked.items()]
        if num_blocks:
            self._asked.put(router, num_blocks, ttl_s)
        return HoldRoom(sum(others), len(others) + 1)

    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""
        ledger, writing, references = self._ledger, self.reservations.transfers, self.holds.references
        transfers = writing + self.leases.transfers
        rules = {
            "references differ from holds": all(
                ledger.num_references(slot) == references[slot] for slot in ledger.pages
            ),
            "transfers differ from claims": all(ledger.num_transfers(slot) == transfers[slot] for slot in ledger.pages),
            "a slot has two writers": all(num == 1 for num in writing.values()),
            "a slot that is written to does not drain": all(
                ledger.state(slot) is PageState.DRAINING for slot in writing
            ),
        }
        return [problem for problem, holds in rules.items() if not holds]
