"""The choice between cached pages without children: the seam, and the least recently used as its plainest policy."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from wire.ids import BlockKey


class EvictionPolicy(Protocol):
    """The queues of a pool's pages, the position of each page in its own, and the choice between the queues' heads.

    queues, positions: by page; the lowest position of a queue is its head. Every call takes constant time, amortised.
    """

    name: str
    num_queues: int
    queues: "array[int]"
    positions: "array[int]"

    def index(self, page: int, key: BlockKey) -> None:
        """Notes that a page holds a block from now on."""

    def unindex(self, page: int, key: BlockKey) -> None:
        """Notes that a page holds a block no longer: evicted, or withdrawn."""

    def touch(self, page: int) -> None:
        """Counts a use of a page."""

    def inherit(self, parent: int, child: int) -> None:
        """Gives a parent at least the position of a child that it outlives."""

    def choose(self, heads: Sequence[int]) -> int:
        """Returns the page to evict, among the heads of queues that have one."""


class LeastRecentlyUsed:
    """A single queue, in the order of the last use."""

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
