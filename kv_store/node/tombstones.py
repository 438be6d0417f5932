"""A directory's record of lost blocks, and of the parents of resident and lost blocks, in flat memory.

An entry of the ring is a lost block: 64 bits of its key and of its parent's key, the time and the manner of its loss.
The newest entry overwrites the oldest. Both tables use open addressing: each call takes constant time on average.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import COLD_TIERS, Cause, Miss, Tier


class Loss(IntEnum):
    """The manner in which an arena loses a block."""

    ROOM = 0
    SHARE = 1
    CORRUPT = 2
    PURGED = 3
    CLEARED = 4


_MANNERS = {
    Loss.ROOM: "to make room, by {policy}",
    Loss.SHARE: "its tenant was beyond its share of the arena, by {policy}",
    Loss.CORRUPT: "its checksum was wrong",
    Loss.PURGED: "purged after logits that were not finite",
    Loss.CLEARED: "cleared by the operator, from every tier",
}
_DIFFERS = Miss(Cause.DIFFERS)
_IN = {tier: 0x80 >> nth for nth, tier in enumerate(COLD_TIERS)}
_COPIED = sum(_IN.values())


class Tombstones:
    """Up to `num_places` lost blocks, and up to `num_slots` resident blocks. Not thread-safe.

    Records full blocks only. Takes 61 bytes a place and 18 a slot, from the start. policy: the name of the arena's
    eviction policy. clock: monotonic, in seconds.
    """

    def __init__(self, num_places: int, num_slots: int, policy: str, clock: Callable[[], float]) -> None:
        self._manner_texts = [_MANNERS[loss].format(policy=policy) for loss in Loss]
        self._clock = clock
        self._began_s = clock()
        self._forgotten_s: float | None = None
        self._keys, self._parents = (array("Q", bytes(8 * num_places)) for _ in range(2))
        self._times_s = array("d", bytes(8 * num_places))
        self._manners = bytearray(num_places)
        self._next = 0
        self._places = _Table(num_places)
        self._num_children = _Table(num_places + num_slots)

    @property
    def num_bytes(self) -> int:
        ring = (self._keys, self._parents, self._times_s, self._manners)
        return sum(memoryview(one).nbytes for one in ring) + self._places.num_bytes + self._num_children.num_bytes

    def index(self, name: BlockName) -> None:
        """Notes that a block has entered the arena."""
        self._count_child(_mark(name.parent), 1)
        place = self._places.get(_mark(name.key))
        if place:
            self._forget(place - 1)

    def bury(self, key: bytes, parent: bytes, loss: Loss, copies: Iterable[Tier]) -> None:
        """Notes that a block has left the arena. copies: the cold tiers that have it."""
        place = self._next
        if self._keys[place]:
            self._forgotten_s = self._times_s[place]
            self._forget(place)
        self._keys[place], self._parents[place] = _mark(key), _mark(parent)
        self._times_s[place] = self._clock()
        self._manners[place] = loss | sum(_IN[tier] for tier in copies)
        self._places.put(_mark(key), place + 1)
        self._next = (place + 1) % len(self._keys)

    def lose_copy(self, key: bytes, tier: Tier) -> bool:
        """Notes that a cold tier has lost its copy of a lost block; False if it had none."""
        place = self._places.get(_mark(key)) - 1
        if place < 0 or not self._manners[place] & _IN[tier]:
            return False
        self._manners[place] &= ~_IN[tier]
        return True

    def why(self, parent_of: Mapping[BlockKey, bytes]) -> dict[BlockKey, Miss]:
        """Finds the causes of a prompt's missing blocks, in their order.

        The parent of the first block under a root is empty. A block after a different block differs, too.
        """
        misses: dict[BlockKey, Miss] = {}
        unknown = self._unknown
        for key, parent in parent_of.items():
            if place := self._places.get(_mark(key)):
                misses[key] = self._of_lost(place - 1)
            elif misses.get(BlockKey(parent)) is _DIFFERS or (parent and self._num_children.get(_mark(parent))):
                misses[key] = _DIFFERS
            else:
                misses[key] = unknown
        return misses

    def _of_lost(self, place: int) -> Miss:
        how = self._manner_texts[self._manners[place] & ~_COPIED]
        cause = Cause.ELSEWHERE if self._manners[place] & _COPIED else Cause.EVICTED
        return Miss(cause, how, self._clock() - self._times_s[place])

    @property
    def _unknown(self) -> Miss:
        """The cause of a block without a record."""
        if self._forgotten_s is None:
            return Miss(Cause.NEVER_SEEN, age_s=self._clock() - self._began_s)
        return Miss(Cause.NO_LONGER_KNOWN, age_s=self._clock() - self._forgotten_s)

    def _forget(self, place: int) -> None:
        self._places.put(self._keys[place], 0)
        self._count_child(self._parents[place], -1)
        self._keys[place] = 0

    def _count_child(self, parent: int, by: int) -> None:
        self._num_children.put(parent, self._num_children.get(parent) + by)


class _Table:
    """Positive numbers by mark, for up to `capacity` marks: open addressing, linear probing, two thirds full."""

    def __init__(self, capacity: int) -> None:
        self._size = 3 * capacity // 2 + 1
        self._marks = array("Q", bytes(8 * self._size))
        self._numbers = array("I", bytes(4 * self._size))

    @property
    def num_bytes(self) -> int:
        return memoryview(self._marks).nbytes + memoryview(self._numbers).nbytes

    def get(self, mark: int) -> int:
        """Returns the number of a mark; 0 without one."""
        return self._numbers[self._find(mark)]

    def put(self, mark: int, number: int) -> None:
        """Gives a mark a number; 0 removes it."""
        place = self._find(mark)
        if number:
            self._marks[place], self._numbers[place] = mark, number
        elif self._marks[place]:
            self._remove(place)

    def _find(self, mark: int) -> int:
        marks, place = self._marks, mark % self._size
        while (found := marks[place]) and found != mark:
            place = (place + 1) % self._size
        return place

    def _remove(self, hole: int) -> None:
        """Empties a place, and moves later marks of its cluster up, so that no search stops before them."""
        place = hole
        while self._marks[place := (place + 1) % self._size]:
            if (place - self._marks[place]) % self._size >= (place - hole) % self._size:
                self._marks[hole], self._numbers[hole] = self._marks[place], self._numbers[place]
                hole = place
        self._marks[hole] = self._numbers[hole] = 0


def _mark(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") or 1
