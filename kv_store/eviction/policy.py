"""The LRU policy: evicts the least recently used page first."""

from array import array
from collections.abc import Sequence

from wire.ids import BlockKey


class LeastRecentlyUsed:
    """An EvictionPolicy with one queue, in the order of the last use."""

    name = "least recent use"
    num_queues = 1

    def __init__(self, num_pages: int) -> None:
        self.queues = array("B", bytes(num_pages))
        self.positions = array("Q", bytes(8 * num_pages))
        self._num_uses = 0

    def index(self, page: int, key: BlockKey) -> None:
        """Does nothing: a page has its position by its use."""

    def unindex(self, page: int, key: BlockKey) -> None:
        """Does nothing: no page is remembered."""

    def touch(self, page: int) -> None:
        self._num_uses += 1
        self.positions[page] = self._num_uses

    def inherit(self, parent: int, child: int) -> None:
        if self.positions[parent] < self.positions[child]:
            self.positions[parent] = self.positions[child]

    def choose(self, heads: Sequence[int]) -> int:
        return min(heads, key=self.positions.__getitem__)
