"""The ledger of a pool's pages: counts of references and transfers, and the page states that follow from them.

                      indexed by key     not indexed
references            PUBLISHED          OWNED
none, but transfers   CACHED             DRAINING
none                  CACHED             FREE

`allocate` takes a page only from FREE, or from CACHED while no transfer touches it. A worker's device pages and an
arena's slots have the same ledger.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Generic, cast

from kv_store.eviction.order import EvictionOrder, EvictionPolicy, Page, Priority
from kv_store.eviction.policy import LeastRecentlyUsed
from wire.errors import StoreError
from wire.ids import BlockKey
from wire.tier import LedgerCounts


class OutOfBlocks(StoreError):
    """Fewer pages are allocatable than requested; nothing has changed."""


class PageState(Enum):
    """The state of a page, derived from its counts and never stored."""

    FREE = "free"
    OWNED = "owned"
    PUBLISHED = "published"
    CACHED = "cached"
    DRAINING = "draining"


class Ledger(Generic[Page]):
    """The ledger of `num_pages` pages. Not thread-safe.

    A page counts as used when it becomes cached, and when `order.touch` is called. A page is evicted before its parent,
    unless the order ignores parents; for pages without parents, callers free a sequence's last page first.
    """

    def __init__(
        self,
        num_pages: int,
        order: type[EvictionOrder[Page]] = EvictionOrder,
        policy: Callable[[int], EvictionPolicy] = LeastRecentlyUsed,
        on_eviction: Callable[[Page], None] = lambda _: None,
    ) -> None:
        """on_eviction: called with each page that is evicted, while it is still indexed."""
        self.num_pages = num_pages
        self.pages = cast(Sequence[Page], range(num_pages))
        self.num_evicted = 0
        self._on_eviction = on_eviction
        self._key_to_page: dict[bytes, Page] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._references = array("i", bytes(4 * num_pages))
        self._transfers = array("i", bytes(4 * num_pages))
        self._free = [*reversed(self.pages)]
        self._num_draining = 0
        self._num_cached = [0 for _ in Priority]
        self.order = order(self._key_to_page, self._keys, policy(num_pages))

    @property
    def num_allocatable(self) -> int:
        """Pages that `allocate` can take now: free pages, and cached pages that no transfer touches."""
        return len(self._free) + len(self.order)

    def allocate(self, num_pages: int) -> list[Page]:
        """Takes pages, first free, then evicted; each gets a reference. Raises OutOfBlocks if there are too few."""
        if num_pages > self.num_allocatable:
            raise OutOfBlocks(f"{num_pages} pages wanted, {self.num_allocatable} allocatable")
        self.reclaim(num_pages)
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[len(self._free) - num_pages :]
        for page in pages:
            self._references[page] = 1
        return pages

    def reclaim(self, num_free: int) -> None:
        """Evicts pages until `num_free` are free, or none can be evicted."""
        while len(self._free) < num_free and (victim := self.order.first()) is not None:
            self._on_eviction(victim)
            self.unindex(victim)
            self.num_evicted += 1

    def acquire(self, page: Page) -> None:
        """Adds a reference to a page that has a reference or is indexed."""
        if not self._references[page]:
            if self._keys[page] is None:
                raise ValueError(f"page {page} is {self.state(page).value}: nothing to share")
            self._num_cached[self.order.priority_of(page)] -= 1
            if not self._transfers[page]:
                self.order.remove(page)
        self._references[page] += 1

    def free(self, page: Page) -> None:
        """Removes a reference; without references a page is cached, draining or free."""
        if not self._references[page]:
            raise ValueError(f"page {page} has no reference to give back")
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._keys[page] is None:
            self._vacate(page)
        else:
            self._cache(page)
            if not self._transfers[page]:
                self.order.add(page)

    def index(
        self,
        page: Page,
        key: BlockKey,
        priority: Priority = Priority.ONLY_COPY,
        parent: bytes | None = None,
        owner: int = 0,
    ) -> bool:
        """Indexes a page under a key. If another page has the key, returns False and changes nothing.

        parent: the key of the block before it, which is evicted later. owner: a number, 0 for none.
        """
        if not self._references[page] and self.state(page) is PageState.FREE:
            raise ValueError(f"page {page} is free: nothing to index")
        if key in self._key_to_page:
            return self._key_to_page[key] == page
        if self._keys[page] is not None:
            raise ValueError(f"page {page} is indexed already")
        self._key_to_page[key] = page
        self._keys[page] = key
        self.order.index(page, key, priority, parent, owner)
        if not self._references[page]:
            self._num_draining -= 1
            self._cache(page)
        return True

    def unindex(self, page: Page) -> None:
        """Takes a page out of the index. Does nothing if it is not indexed."""
        key = self._keys[page]
        if key is None:
            return
        del self._key_to_page[key]
        self._keys[page] = None
        if not self._references[page]:
            self._num_cached[self.order.priority_of(page)] -= 1
            if not self._transfers[page]:
                self.order.remove(page)
            self._vacate(page)
        self.order.unindex(page, key)

    def find(self, key: BlockKey) -> Page | None:
        """Finds the page of a key, without a reference and without counting a use."""
        return self._key_to_page.get(key)

    def key_of(self, page: Page) -> BlockKey | None:
        return self._keys[page]

    def begin_transfer(self, page: Page) -> None:
        """Notes a copy to or from a page: even freed, it is not allocated before `end_transfer`."""
        if not (self._references[page] or self._transfers[page]):
            if self._keys[page] is None:
                raise ValueError(f"page {page} is free: nothing to transfer")
            self.order.remove(page)
        self._transfers[page] += 1

    def end_transfer(self, page: Page) -> None:
        """Ends a transfer of a page."""
        if not self._transfers[page]:
            raise ValueError(f"page {page} has no transfer to end")
        self._transfers[page] -= 1
        if self._references[page] or self._transfers[page]:
            return
        if self._keys[page] is None:
            self._num_draining -= 1
            self._free.append(page)
        else:
            self.order.add(page)

    def set_priority(self, page: Page, priority: Priority) -> None:
        """Changes the eviction priority of an indexed page."""
        if self.state(page) is PageState.CACHED:
            self._num_cached[self.order.priority_of(page)] -= 1
            self._num_cached[priority] += 1
        self.order.set_priority(page, priority)

    def num_cached(self, priority: Priority) -> int:
        return self._num_cached[priority]

    def num_references(self, page: Page) -> int:
        return self._references[page]

    def num_transfers(self, page: Page) -> int:
        return self._transfers[page]

    def state(self, page: Page) -> PageState:
        """Derives a page's state from its counts."""
        is_indexed = self._keys[page] is not None
        if self._references[page]:
            return PageState.PUBLISHED if is_indexed else PageState.OWNED
        if is_indexed:
            return PageState.CACHED
        return PageState.DRAINING if self._transfers[page] else PageState.FREE

    def counts(self) -> LedgerCounts:
        num_free, num_indexed, num_cached = len(self._free), len(self._key_to_page), sum(self._num_cached)
        return LedgerCounts(
            free=num_free,
            owned=self.num_pages - num_free - num_indexed - self._num_draining,
            published=num_indexed - num_cached,
            cached=num_cached,
            draining=self._num_draining,
            total=self.num_pages,
        )

    def check(self) -> list[str]:
        """Lists violated invariants, recounted page by page; empty if none."""
        found = {state: [page for page in self.pages if self.state(page) is state] for state in PageState}
        idle = {page for page in found[PageState.CACHED] if not self._transfers[page]}
        counts, cached = self.counts(), [self.order.priority_of(page) for page in found[PageState.CACHED]]
        rules = {
            "a count is negative": min([*self._references, *self._transfers], default=0) >= 0,
            "the counts differ from the pages": all(getattr(counts, one.value) == len(found[one]) for one in PageState),
            "the counts of cached pages differ from the pages": self._num_cached
            == [cached.count(priority) for priority in Priority],
            "the free list differs from the free pages": sorted(self._free) == found[PageState.FREE],
            "the eviction order differs from the idle cached pages": len(self.order) == len(idle)
            and all(page in self.order for page in idle),
        }
        problems = [problem for problem, holds in rules.items() if not holds]
        return problems + self.order.check()

    def _vacate(self, page: Page) -> None:
        """Frees a page without references and key, once no transfer touches it."""
        if self.state(page) is PageState.DRAINING:
            self._num_draining += 1
        else:
            self._free.append(page)

    def _cache(self, page: Page) -> None:
        """Counts an indexed page without references as cached, and as used."""
        self._num_cached[self.order.priority_of(page)] += 1
        self.order.touch(page)
