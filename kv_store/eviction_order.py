"""The order in which a pool gives up its cached pages: children before parents, and else the least recently used first.

A page may have an owner, by number, whose pages can be asked to go first; 0 is none. Owners share no chain.

A page is counted at its parent as long as both may be evicted, so no chain of parents is ever walked: a page whose last
child goes takes over that child's last use, and stands in the order from then on.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

from wire.ids import BlockKey

Page = TypeVar("Page", bound=int)
"""The id of a page: `PageId` on a device, `SlotId` in an arena."""


class Worth(IntEnum):
    """The cost of losing a cached page. The cheapest are evicted first."""

    TAIL = 0
    COPIED = 1
    ONLY_COPY = 2


class EvictionOrder(Generic[Page]):
    """Pages by worth, and the last use of every page. Each call costs a logarithm of the number of pages, amortised.

    find: the page of a key, if it is findable.
    """

    def __init__(self, pages: Sequence[Page], find: Callable[[bytes], Page | None]) -> None:
        self._find = find
        self._num_uses = 0
        self._last_use = array("Q", bytes(8 * len(pages)))
        self._owners = array("I", bytes(4 * len(pages)))
        self._ranks = [_Rank(pages, self._last_use, self._owners) for _ in Worth]

    def __len__(self) -> int:
        return sum([rank.num_pages for rank in self._ranks])

    def has(self, page: Page, worth: Worth) -> bool:
        return bool(self._ranks[worth].has[page])

    def touch(self, page: Page) -> None:
        """Counts a use of a page, whether it may be evicted or not."""
        self._num_uses += 1
        self._last_use[page] = self._num_uses

    def owner_of(self, page: Page) -> int:
        return self._owners[page]

    def give(self, page: Page, owner: int) -> None:
        """Gives a page to an owner. The page must not be one that may be evicted."""
        self._owners[page] = owner

    def found(self, page: Page, key: BlockKey) -> None:
        """Notes that a page is findable from now on, as the parent of the pages that name its key."""
        for rank in self._ranks:
            rank.num_children[page] = rank.orphans.pop(key, 0)

    def lost(self, page: Page, key: BlockKey) -> None:
        """Notes that a page is findable no more."""
        for rank in self._ranks:
            if rank.num_children[page]:
                rank.count_child(None, key, rank.num_children[page])
                rank.num_children[page] = 0

    def add(self, page: Page, worth: Worth, parent: bytes | None) -> None:
        """Adds a page that may be evicted from now on."""
        rank = self._ranks[worth]
        if parent is not None:
            rank.count_child(self._handed_on(page, parent), parent, 1)
        rank.add(page)

    def remove(self, page: Page, worth: Worth, parent: bytes | None) -> None:
        rank = self._ranks[worth]
        rank.remove(page)
        if parent is not None:
            rank.count_child(self._handed_on(page, parent), parent, -1)

    def first(self, worth: Worth) -> Page | None:
        """Returns the page of a worth that is to go first; None if there is no page."""
        return self._ranks[worth].first()

    def cheapest(self, owners: Iterable[int]) -> Page | None:
        """Returns the page that is to go first: of these owners if they have one, or else of all."""
        for owner in owners:
            for rank in self._ranks:
                if (page := rank.first_of(owner)) is not None:
                    return page
        return next((page for rank in self._ranks if (page := rank.first()) is not None), None)

    def check(self, keys: Sequence[BlockKey | None], parents: Sequence[bytes | None]) -> list[str]:
        """Lists the faults of the books, given the keys of all pages; an empty list is a clean bill."""
        return [problem for rank in self._ranks for problem in rank.check(keys, parents)]

    def _handed_on(self, page: Page, parent: bytes) -> Page | None:
        """Hands a page's last use to its parent; returns the parent, None if it is not findable."""
        above = self._find(parent)
        if above is not None and self._last_use[above] < self._last_use[page]:
            self._last_use[above] = self._last_use[page]
        return above


class StartFirst(EvictionOrder[Page]):
    """The same without regard to parents: a prefix's start, used least of late, goes first where rows have windows."""

    def add(self, page: Page, worth: Worth, parent: bytes | None) -> None:
        super().add(page, worth, None)

    def remove(self, page: Page, worth: Worth, parent: bytes | None) -> None:
        super().remove(page, worth, None)

    def check(self, keys: Sequence[BlockKey | None], parents: Sequence[bytes | None]) -> list[str]:
        return super().check(keys, [None] * len(parents))


class _Rank(Generic[Page]):
    """The pages of one worth.

    num_children: for each page, its children in this rank. orphans: the same by key, for parents that are not findable.
    The queue of its owner has every page without children, and may have others; an entry is a last use times the
    number of all pages, plus the page. An entry that is out of date is put right when it comes first. queued_for: for
    each page, the owner in whose queue its entry is, plus 1; 0 without one.
    """

    def __init__(self, pages: Sequence[Page], last_use: "array[int]", owners: "array[int]") -> None:
        self._pages = pages
        self.num_pages = 0
        self.has = bytearray(len(last_use))
        self.num_children = array("I", bytes(4 * len(last_use)))
        self.orphans = Counter[bytes]()
        self._last_use = last_use
        self._owners = owners
        self._queues: dict[int, list[int]] = {}
        self._queued_for = array("I", bytes(4 * len(last_use)))

    def add(self, page: Page) -> None:
        self.has[page] = 1
        self.num_pages += 1
        if not self.num_children[page]:
            self._enqueue(page)

    def remove(self, page: Page) -> None:
        self.has[page] = 0
        self.num_pages -= 1

    def count_child(self, parent: Page | None, key: bytes, by: int) -> None:
        if parent is None:
            self.orphans[key] += by
            if not self.orphans[key]:
                del self.orphans[key]
            return
        self.num_children[parent] += by
        if self.has[parent] and not self.num_children[parent]:
            self._enqueue(parent)

    def first_of(self, owner: int) -> Page | None:
        queue = self._queues.get(owner, [])
        while queue:
            used, number = divmod(queue[0], len(self.has))
            page = self._pages[number]
            if self._queued_for[page] != owner + 1:
                heappop(queue)
            elif not self.has[page] or self.num_children[page]:
                self._queued_for[page] = 0
                heappop(queue)
            elif used != self._last_use[page]:
                heapreplace(queue, self._entry(page))
            else:
                return page
        return None

    def first(self) -> Page | None:
        firsts = [page for owner in self._queues if (page := self.first_of(owner)) is not None]
        if firsts:
            return min(firsts, key=self._last_use.__getitem__)
        return self._pages[self.has.find(1)] if self.num_pages else None  # keys in a circle: all have children

    def check(self, keys: Sequence[BlockKey | None], parents: Sequence[bytes | None]) -> Iterable[str]:
        pages = [page for page in self._pages if self.has[page]]
        children = Counter(parent for page in pages if (parent := parents[page]) is not None)
        known = {key: num for key, num in zip(keys, self.num_children, strict=True) if num and key is not None}
        if children != self.orphans + Counter(known) or sum(self.num_children) != sum(known.values()):
            yield "pages have other children than are counted"
        if not all(self.num_children[page] or self._queued_for[page] == self._owners[page] + 1 for page in pages):
            yield "a page that may be evicted is not in the queue of its owner"
        queued = [(entry % len(self.has), owner + 1) for owner, queue in self._queues.items() for entry in queue]
        noted = [(page, queued_for) for page, queued_for in enumerate(self._queued_for) if queued_for]
        if sorted({one for one in queued if self._queued_for[one[0]] == one[1]}) != noted:
            yield "the queues differ from what is noted of them"

    def _enqueue(self, page: Page) -> None:
        owner = self._owners[page]
        if self._queued_for[page] != owner + 1:
            self._queued_for[page] = owner + 1
            heappush(self._queues.setdefault(owner, []), self._entry(page))

    def _entry(self, page: Page) -> int:
        return self._last_use[page] * len(self.has) + page
