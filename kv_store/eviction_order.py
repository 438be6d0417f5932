"""The order in which cached pages are evicted: children before parents, and else the least recently used first.

An owner is a number, 0 for none; a page beyond its owner's bound is evicted before others. Owners share no chain.

A page is counted at its parent as long as both may be evicted, so no call follows a chain of parents: a page whose last
child is evicted takes over that child's last use, and stands in the order from then on.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar, cast

from wire.ids import BlockKey

Page = TypeVar("Page", bound=int)
"""The id of a page: `PageId` on a device, `SlotId` in an arena."""


class Priority(IntEnum):
    """The eviction priority of a cached page: pages of the lowest are evicted first."""

    TAIL = 0
    COPIED = 1
    ONLY_COPY = 2


class EvictionOrder(Generic[Page]):
    """Priority, parent, owner and last use of each indexed page, and the order of eviction of idle cached ones.

    Each call costs a logarithm of the number of pages, amortised. key_to_page, keys: the index of the ledger, read
    here and changed there. max_owned: for each owner with a bound, the indexed pages that it keeps; beyond it, its
    cached ones are evicted before any other.
    """

    def __init__(self, key_to_page: Mapping[bytes, Page], keys: Sequence[BlockKey | None]) -> None:
        pages = cast(Sequence[Page], range(len(keys)))
        self.max_owned: Mapping[int, int] = {}
        self._key_to_page = key_to_page
        self._keys = keys
        self._num_uses = 0
        self._last_use = array("Q", bytes(8 * len(keys)))
        self._owners = array("I", bytes(4 * len(keys)))
        self._num_owned = Counter[int]()
        self._parents: list[bytes | None] = [None] * len(keys)
        self._priorities = [Priority.ONLY_COPY] * len(keys)
        self._ranks = [_Rank(pages, self._last_use, self._owners) for _ in Priority]

    def __len__(self) -> int:
        return sum([rank.num_pages for rank in self._ranks])

    def __contains__(self, page: Page) -> bool:
        return bool(self._ranks[self._priorities[page]].has[page])

    def priority_of(self, page: Page) -> Priority:
        return self._priorities[page]

    def parent_of(self, page: Page) -> bytes | None:
        return self._parents[page]

    def touch(self, page: Page) -> None:
        """Counts a use of a page, cached or not, and once it is evicted of its parent."""
        self._num_uses += 1
        self._last_use[page] = self._num_uses

    def index(self, page: Page, key: BlockKey, priority: Priority, parent: bytes | None, owner: int) -> None:
        """Notes a page that is indexed from now on, also as the parent of the pages that name its key."""
        above = None if parent is None else self._key_to_page.get(parent)
        self._parents[page] = parent if above is None else self._keys[above]  # equal, and no second copy
        self._priorities[page] = priority
        self._owners[page] = owner
        self._num_owned[owner] += 1
        for rank in self._ranks:
            rank.num_children[page] = rank.orphans.pop(key, 0)

    def unindex(self, page: Page, key: BlockKey) -> None:
        """Notes that a page, no longer idle and cached, is not indexed any more."""
        self._num_owned[self._owners[page]] -= 1
        self._parents[page] = None
        for rank in self._ranks:
            if rank.num_children[page]:
                rank.count_child(None, key, rank.num_children[page])
                rank.num_children[page] = 0

    def add(self, page: Page) -> None:
        """Adds a page that may be evicted from now on."""
        rank, parent = self._ranks[self._priorities[page]], self._evicted_after(page)
        if parent is not None:
            rank.count_child(self._with_use_of(page, parent), parent, 1)
        rank.add(page)

    def remove(self, page: Page) -> None:
        """Removes a page that may not be evicted any more."""
        rank, parent = self._ranks[self._priorities[page]], self._evicted_after(page)
        rank.remove(page)
        if parent is not None:
            rank.count_child(self._with_use_of(page, parent), parent, -1)

    def set_priority(self, page: Page, priority: Priority) -> None:
        with self._out_of_order(page):
            self._priorities[page] = priority

    def set_owner(self, page: Page, owner: int) -> None:
        """Gives an indexed page to another owner."""
        with self._out_of_order(page):
            self._num_owned[self._owners[page]] -= 1
            self._num_owned[owner] += 1
            self._owners[page] = owner

    def first(self) -> Page | None:
        """Returns the page to evict first: of an owner beyond its bound if it has one, or else of all."""
        for owner, most in self.max_owned.items():
            if self._num_owned[owner] > most:
                for rank in self._ranks:
                    if (page := rank.first_of(owner)) is not None:
                        return page
        return next((page for rank in self._ranks if (page := rank.first()) is not None), None)

    def oldest(self, priority: Priority, num_pages: int) -> list[Page]:
        """Lists the up to `num_pages` pages of a priority that are evicted first."""
        pages: list[Page] = []
        while len(pages) < num_pages and (page := self._ranks[priority].first()) is not None:
            self.remove(page)  # its parent may be next
            pages.append(page)
        for page in pages:
            self.add(page)
        return pages

    def check(self) -> list[str]:
        """Lists the faults of the books; an empty list is a clean bill."""
        parents = [self._evicted_after(page) for page in self._ranks[0].pages]
        owned = Counter(owner for owner, key in zip(self._owners, self._keys, strict=True) if key is not None)
        problems = [] if +self._num_owned == owned else ["the counts of owners differ from the pages"]
        return problems + [problem for rank in self._ranks for problem in rank.check(self._keys, parents)]

    @contextmanager
    def _out_of_order(self, page: Page) -> Iterator[None]:
        """Takes a page out of the order, if it is there, while what decides its place changes."""
        is_idle = page in self
        if is_idle:
            self.remove(page)
        yield
        if is_idle:
            self.add(page)

    def _evicted_after(self, page: Page) -> bytes | None:
        """Returns the key of the block that is evicted after a page, as soon as it may be."""
        return self._parents[page]

    def _with_use_of(self, page: Page, parent: bytes) -> Page | None:
        """Gives a page's last use to its parent; returns the parent, None if it is not indexed."""
        above = self._key_to_page.get(parent)
        if above is not None and self._last_use[above] < self._last_use[page]:
            self._last_use[above] = self._last_use[page]
        return above


class StartFirst(EvictionOrder[Page]):
    """The same without regard to parents: a prefix's start, used least of late, goes first where rows have windows."""

    def _evicted_after(self, page: Page) -> bytes | None:
        return None


class _Rank(Generic[Page]):
    """The pages of one priority.

    num_children: for each page, its children in this rank. orphans: the same by key, for parents that are not indexed.
    The queue of its owner has every page without children, and may have others; an entry is a last use times the
    number of all pages, plus the page. An entry that is out of date is put right when it comes first. queued_for: for
    each page, the owner in whose queue its entry is, plus 1; 0 without one.
    """

    def __init__(self, pages: Sequence[Page], last_use: "array[int]", owners: "array[int]") -> None:
        self.pages = pages
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
            page = self.pages[number]
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
        return self.pages[self.has.find(1)] if self.num_pages else None  # keys in a circle: all have children

    def check(self, keys: Sequence[BlockKey | None], parents: Sequence[bytes | None]) -> Iterable[str]:
        pages = [page for page in self.pages if self.has[page]]
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
