"""The ledger of a pool's pages: counts of references and transfers, and the page states that follow from them.

                      indexed by key     not indexed
references            PUBLISHED          OWNED
none, but transfers   CACHED             DRAINING
none                  CACHED             FREE

`allocate` takes a page only from FREE, or from CACHED while no transfer touches it. A worker's device pages and an
arena's slots have the same ledger.
"""

from array import array
from collections import Counter
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
    __hash__ = object.__hash__  # an Enum's own takes longer than the count that it finds


_FREE, _OWNED, _PUBLISHED, _CACHED, _DRAINING = PageState  # an Enum's attribute takes longer than a name


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
        """on_eviction: called with each page that `allocate` evicts, while it is still indexed."""
        self.num_pages = num_pages
        self.pages = cast(Sequence[Page], range(num_pages))
        self.num_evicted = 0
        self._on_eviction = on_eviction
        self._key_to_page: dict[bytes, Page] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._references = array("i", bytes(4 * num_pages))
        self._transfers = array("i", bytes(4 * num_pages))
        self._num = Counter({_FREE: num_pages})
        self._free = [*reversed(self.pages)]
        self._num_cached = Counter[Priority]()
        self.order = order(self._key_to_page, self._keys, policy(num_pages))

    @property
    def num_allocatable(self) -> int:
        """Pages that `allocate` can take now: free pages, and cached pages that no transfer touches."""
        return len(self._free) + len(self.order)

    def allocate(self, num_pages: int) -> list[Page]:
        """Takes pages, first free, then evicted; each gets a reference. Raises OutOfBlocks if there are too few."""
        if num_pages > self.num_allocatable:
            raise OutOfBlocks(f"{num_pages} pages wanted, {self.num_allocatable} allocatable")
        while len(self._free) < num_pages and (victim := self.order.first()) is not None:
            self._on_eviction(victim)
            self.unindex(victim)
            self.num_evicted += 1
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[len(self._free) - num_pages :]
        for page in pages:
            self._references[page] = 1
        self._num[_FREE] -= num_pages
        self._num[_OWNED] += num_pages
        return pages

    def acquire(self, page: Page) -> None:
        """Adds a reference to a page that has a reference or is indexed."""
        if self.state(page) in (_FREE, _DRAINING):
            raise ValueError(f"page {page} is {self.state(page).value}: nothing to share")
        self._change(page, self._references, 1)

    def free(self, page: Page) -> None:
        """Removes a reference; without references a page is cached, draining or free."""
        if not self._references[page]:
            raise ValueError(f"page {page} has no reference to give back")
        self._change(page, self._references, -1)

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
        before = self.state(page)
        if before is _FREE:
            raise ValueError(f"page {page} is free: nothing to index")
        if key in self._key_to_page:
            return self._key_to_page[key] == page
        if self._keys[page] is not None:
            raise ValueError(f"page {page} is indexed already")
        self._key_to_page[key] = page
        self._keys[page] = key
        self.order.index(page, key, priority, parent, owner)
        self._settle(page, before)
        return True

    def unindex(self, page: Page) -> None:
        """Takes a page out of the index. Does nothing if it is not indexed."""
        key, before = self._keys[page], self.state(page)
        if key is not None:
            del self._key_to_page[key]
            self._keys[page] = None
            self._settle(page, before)
            self.order.unindex(page, key)

    def find(self, key: BlockKey) -> Page | None:
        """Finds the page of a key, without a reference and without counting a use."""
        return self._key_to_page.get(key)

    def key_of(self, page: Page) -> BlockKey | None:
        return self._keys[page]

    def begin_transfer(self, page: Page) -> None:
        """Notes a copy to or from a page: even freed, it is not allocated before `end_transfer`."""
        if self.state(page) is _FREE:
            raise ValueError(f"page {page} is free: nothing to transfer")
        self._change(page, self._transfers, 1)

    def end_transfer(self, page: Page) -> None:
        """Ends a transfer of a page."""
        if not self._transfers[page]:
            raise ValueError(f"page {page} has no transfer to end")
        self._change(page, self._transfers, -1)

    def set_priority(self, page: Page, priority: Priority) -> None:
        """Changes the eviction priority of an indexed page."""
        if self.state(page) is _CACHED:
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
            return _PUBLISHED if is_indexed else _OWNED
        if is_indexed:
            return _CACHED
        return _DRAINING if self._transfers[page] else _FREE

    def counts(self) -> LedgerCounts:
        return LedgerCounts(**{state.value: self._num[state] for state in PageState}, total=self.num_pages)

    def check(self) -> list[str]:
        """Lists violated invariants, recounted page by page; empty if none."""
        found = {state: [page for page in self.pages if self.state(page) is state] for state in PageState}
        idle = {page for page in found[_CACHED] if not self._transfers[page]}
        rules = {
            "a count is negative": min([*self._references, *self._transfers], default=0) >= 0,
            "the states do not sum to the pool": self._num.total() == self.num_pages,
            "the counts differ from the pages": all(self._num[state] == len(found[state]) for state in PageState),
            "the counts of cached pages differ from the pages": +self._num_cached
            == Counter(self.order.priority_of(page) for page in found[_CACHED]),
            "the free list differs from the free pages": sorted(self._free) == found[_FREE],
            "the eviction order differs from the idle cached pages": len(self.order) == len(idle)
            and all(page in self.order for page in idle),
        }
        problems = [problem for problem, holds in rules.items() if not holds]
        return problems + self.order.check()

    def _change(self, page: Page, count: "array[int]", by: int) -> None:
        """Changes a count of a page. A page with a reference before and after keeps its state."""
        if not self._references[page]:
            before = self.state(page)
            count[page] += by
            self._settle(page, before)
            return
        count[page] += by
        if not self._references[page]:
            self._settle(page, _OWNED if self._keys[page] is None else _PUBLISHED)

    def _settle(self, page: Page, before: PageState) -> None:
        """Moves a page to the lists and counts of its state."""
        after = self.state(page)
        if after is not before:
            self._leave(page, before)
            self._enter(page, after)
        is_idle = after is _CACHED and not self._transfers[page]
        if is_idle != (before is _CACHED and page in self.order):
            (self.order.add if is_idle else self.order.remove)(page)

    def _leave(self, page: Page, state: PageState) -> None:
        self._num[state] -= 1
        if state is _CACHED:
            self._num_cached[self.order.priority_of(page)] -= 1

    def _enter(self, page: Page, state: PageState) -> None:
        self._num[state] += 1
        if state is _CACHED:
            self._num_cached[self.order.priority_of(page)] += 1
            self.order.touch(page)
        elif state is _FREE:
            self._free.append(page)
