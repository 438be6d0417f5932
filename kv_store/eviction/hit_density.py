"""Least hit density (after Beckmann, Chen and Cidon, NSDI 2018): evicts the page with the fewest expected hits.

Pages are in classes by their number of uses. For each class the policy counts the ages at which pages are read again,
and the ages at which evicted pages are forgotten. Hit density at an age: the expected hits over the expected time until
them. Within a class the oldest page goes first, so only the heads of the classes are compared. Counts decay, so that a
pool follows its traffic. `Ghosts` remember evicted pages, so that late reads count.
"""

from array import array
from collections.abc import Sequence

from kv_store.eviction.ghosts import VALUE_BITS, Ghosts
from kv_store.eviction.policy import LeastRecentlyUsed
from wire.ids import BlockKey

_NUM_CLASSES = 8
_STEPS_OF_AGE = 4
_NUM_AGES = 48 * _STEPS_OF_AGE
_MAX_USES = (1 << _NUM_CLASSES) - 1
_GHOSTS_A_PAGE = 4
_DECAY = 0.99
_PRIOR_READS = 1e-3
_USES_BITS = 8
_USES_MASK = (1 << _USES_BITS) - 1
_MAX_POSITION = (1 << VALUE_BITS - _USES_BITS) - 1


class HitDensity(LeastRecentlyUsed):
    """A policy with a queue a class, in the order of the last use; evicts the head with the least hit density."""

    name = "hit density"
    num_queues = _NUM_CLASSES

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._uses = array("B", bytes(num_pages))
        self._ghosts = Ghosts(max(1, num_pages * _GHOSTS_A_PAGE))
        self._classes = [_Class() for _ in range(_NUM_CLASSES)]
        self._learn_every = max(256, num_pages)

    def index(self, page: int, key: BlockKey) -> None:
        ghost = self._ghosts.take(key) or 0
        self.positions[page], self._uses[page] = ghost >> _USES_BITS, ghost & _USES_MASK
        self._learn_read(page)
        super().touch(page)

    def unindex(self, page: int, key: BlockKey) -> None:
        position = min(self.positions[page], _MAX_POSITION)
        if gone := self._ghosts.remember(key, position << _USES_BITS | self._uses[page]):
            self._classes[_class_of(gone & _USES_MASK)].forgotten[_bucket(self._num_uses - (gone >> _USES_BITS))] += 1

    def touch(self, page: int) -> None:
        self._learn_read(page)
        self._uses[page] = min(self._uses[page] + 1, _MAX_USES)
        self.queues[page] = _class_of(self._uses[page])
        super().touch(page)

    def _learn_read(self, page: int) -> None:
        self.queues[page] = _class_of(self._uses[page])
        if self._uses[page]:
            self._classes[self.queues[page]].read[_bucket(self._num_uses - self.positions[page])] += 1
        if not self._num_uses % self._learn_every:
            for one in self._classes:
                one.learn()

    def choose(self, heads: Sequence[int]) -> int:
        return min(heads, key=self._density)

    def _density(self, page: int) -> tuple[float, int]:
        age = self._num_uses - self.positions[page]
        return self._classes[self.queues[page]].densities[_bucket(age)], self.positions[page]


class _Class:
    """Reads and losses of a class by age, and the hit density at each age."""

    def __init__(self) -> None:
        self.read = [0.0] * _NUM_AGES
        self.forgotten = [0.0] * _NUM_AGES
        self.densities = [1 / _start(bucket + 1) for bucket in range(_NUM_AGES)]

    def learn(self) -> None:
        reads = blocks = stay = 0.0
        for bucket in reversed(range(_NUM_AGES)):
            blocks += self.read[bucket] + self.forgotten[bucket]
            reads += self.read[bucket]
            stay += blocks * (_start(bucket + 1) - _start(bucket))
            self.densities[bucket] = (reads + _PRIOR_READS) / (stay + _start(bucket + 1))
        self.read = [count * _DECAY for count in self.read]
        self.forgotten = [count * _DECAY for count in self.forgotten]


def _class_of(uses: int) -> int:
    """Maps a number of uses to its class: 1, 2 to 3, 4 to 7 ..."""
    return max(uses.bit_length() - 1, 0)


def _bucket(age: int) -> int:
    """Maps an age, in uses of any page, to its bucket: four for each doubling."""
    exponent = (age + 4).bit_length() - 3
    return min(exponent * _STEPS_OF_AGE + ((age + 4 >> exponent) & 3), _NUM_AGES - 1)


def _start(bucket: int) -> int:
    """Returns the least age of a bucket."""
    exponent, step = divmod(bucket, _STEPS_OF_AGE)
    return ((4 + step) << exponent) - 4
