"""The books of a pool's pages: counts of references and of transfers, and the states that follow from them.

                      findable by key    not findable
references            PUBLISHED          OWNED
none, but transfers   CACHED             DRAINING
none                  CACHED             FREE

A page is given out only from FREE, or from CACHED while no transfer touches it. Serves a worker's device pages and an
arena's slots alike.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Generic, cast

from kv_store.eviction_order import EvictionOrder, Page, Worth
from wire.errors import StoreError
from wire.ids import BlockKey
from wire.tier import BlockCounts


class OutOfBlocks(StoreError):
    """Fewer pages can be given out than were asked for; nothing was changed."""


class PageState(Enum):
    """Derived from a page's counts, never stored."""

    FREE = "free"
    OWNED = "owned"
    PUBLISHED = "published"
    CACHED = "cached"
    DRAINING = "draining"


class Ledger(Generic[Page]):
    """The books of `num_pages` pages. Not thread-safe.

    A page is used when it is published, when its last reference goes, and when it is touched. One with a parent is
    evicted before that, if the order is by families; of others, callers free the last page of a sequence first.
    max_owned: for each owner with a bound, the findable pages that it keeps; beyond it, its cached ones are evicted
    before any other.
    """

    def __init__(self, num_pages: int, order: type[EvictionOrder[Page]] = EvictionOrder) -> None:
        self.num_pages = num_pages
        self.pages = cast(Sequence[Page], range(num_pages))
        self.num_evicted = 0
        self.max_owned: Mapping[int, int] = {}
        self._num_owned = Counter[int]()
        self._key_to_page: dict[bytes, Page] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._parents: list[bytes | None] = [None] * num_pages
        self._references = array("i", bytes(4 * num_pages))
        self._transfers = array("i", bytes(4 * num_pages))
        self._worth = [Worth.ONLY_COPY] * num_pages
        self._num = Counter({PageState.FREE: num_pages})
        self._free = [*reversed(self.pages)]
        self._num_cached = Counter[Worth]()
        self._order = order(self.pages, self._key_to_page.get)

    @property
    def num_allocatable(self) -> int:
        """Pages that `allocate` can give out now: free ones, and cached ones that no transfer touches."""
        return len(self._free) + len(self._order)

    def allocate(self, num_pages: int) -> list[Page]:
        """Gives out pages with one reference each: free ones, then evicted ones. OutOfBlocks if there are fewer."""
        if num_pages > self.num_allocatable:
            raise OutOfBlocks(f"{num_pages} pages wanted, {self.num_allocatable} to be had")
        while len(self._free) < num_pages and (victim := self._next_victim()) is not None:
            self.withdraw(victim)
            self.num_evicted += 1
        pages = self._free[: -num_pages - 1 : -1]
        for page in pages:
            self._change(page, self._references, 1)
        return pages

    def acquire(self, page: Page) -> None:
        """Adds a reference to a page that is referenced or findable."""
        if self.state(page) in (PageState.FREE, PageState.DRAINING):
            raise ValueError(f"page {page} is {self.state(page).value}: nothing to share")
        self._change(page, self._references, 1)

    def free(self, page: Page) -> None:
        """Takes a reference away. The last one leaves a page cached, draining or free."""
        if not self._references[page]:
            raise ValueError(f"page {page} has no reference to give back")
        self._change(page, self._references, -1)

    def publish(
        self,
        page: Page,
        key: BlockKey,
        worth: Worth = Worth.ONLY_COPY,
        parent: bytes | None = None,
        owner: int = 0,
    ) -> bool:
        """Makes a page findable. False if another page is found under that key: this one then stays as it is.

        parent: the key of the block before it, which is evicted after it. owner: a number, 0 for none.
        """
        before = self.state(page)
        if before is PageState.FREE:
            raise ValueError(f"page {page} is free: nothing to publish")
        if key in self._key_to_page:
            return self._key_to_page[key] == page
        if self._keys[page] is not None:
            raise ValueError(f"page {page} is indexed already")
        above = None if parent is None else self._key_to_page.get(parent)
        self._key_to_page[key] = page
        self._keys[page] = key
        self._parents[page] = parent if above is None else self._keys[above]  # equal, and no second copy
        self._worth[page] = worth
        self._order.give(page, owner)
        self._num_owned[owner] += 1
        self._order.found(page, key)
        self._settle(page, before)
        return True

    def withdraw(self, page: Page) -> None:
        """Makes a page unfindable. Does nothing if it is."""
        key, before = self._keys[page], self.state(page)
        if key is not None:
            del self._key_to_page[key]
            self._num_owned[self._order.owner_of(page)] -= 1
            self._keys[page] = None
            self._settle(page, before)
            self._order.lost(page, key)
            self._parents[page] = None

    def find(self, key: BlockKey) -> Page | None:
        """Finds the page of a key, without a reference and without counting a use."""
        return self._key_to_page.get(key)

    def key_of(self, page: Page) -> BlockKey | None:
        return self._keys[page]

    def parent_of(self, page: Page) -> bytes | None:
        return self._parents[page]

    def worth_of(self, page: Page) -> Worth:
        return self._worth[page]

    def begin_transfer(self, page: Page) -> None:
        """Notes a copy to or from a page: even freed, the page is not given out before `end_transfer`."""
        if self.state(page) is PageState.FREE:
            raise ValueError(f"page {page} is free: nothing to transfer")
        self._change(page, self._transfers, 1)

    def end_transfer(self, page: Page) -> None:
        """Ends a transfer of a page."""
        if not self._transfers[page]:
            raise ValueError(f"page {page} has no transfer to end")
        self._change(page, self._transfers, -1)

    def touch(self, page: Page) -> None:
        """Counts a use of a page and, once it goes, of its parent."""
        self._order.touch(page)

    def revalue(self, page: Page, worth: Worth) -> None:
        """Changes the worth of a findable page."""
        if self._order.has(page, self._worth[page]):
            self._order.remove(page, self._worth[page], self._parents[page])
            self._order.add(page, worth, self._parents[page])
        if self.state(page) is PageState.CACHED:
            self._num_cached[self._worth[page]] -= 1
            self._num_cached[worth] += 1
        self._worth[page] = worth

    def give(self, page: Page, owner: int) -> None:
        """Gives a findable page to another owner."""
        is_idle = self._order.has(page, self._worth[page])
        if is_idle:
            self._order.remove(page, self._worth[page], self._parents[page])
        self._num_owned.update({self._order.owner_of(page): -1})
        self._num_owned[owner] += 1
        self._order.give(page, owner)
        if is_idle:
            self._order.add(page, self._worth[page], self._parents[page])

    def oldest(self, worth: Worth, num_pages: int) -> list[Page]:
        """Lists the up to `num_pages` pages of a worth that are to be evicted first."""
        pages: list[Page] = []
        while len(pages) < num_pages and (page := self._order.first(worth)) is not None:
            self._order.remove(page, worth, self._parents[page])  # its parent may be next
            pages.append(page)
        for page in pages:
            self._order.add(page, worth, self._parents[page])
        return pages

    def num_cached(self, worth: Worth) -> int:
        return self._num_cached[worth]

    def num_references(self, page: Page) -> int:
        return self._references[page]

    def num_transfers(self, page: Page) -> int:
        return self._transfers[page]

    def state(self, page: Page) -> PageState:
        """Derives a page's state from its counts."""
        findable = self._keys[page] is not None
        if self._references[page]:
            return PageState.PUBLISHED if findable else PageState.OWNED
        if findable:
            return PageState.CACHED
        return PageState.DRAINING if self._transfers[page] else PageState.FREE

    def counts(self) -> BlockCounts:
        return BlockCounts(**{state.value: self._num[state] for state in PageState}, total=self.num_pages)

    def check(self) -> list[str]:
        """Recounts the books page by page and lists their faults; an empty list is a clean bill."""
        pages = self.pages
        states = {page: self.state(page) for page in pages}
        found = {state: sorted(page for page in pages if states[page] is state) for state in PageState}
        idle = {page for page in found[PageState.CACHED] if not self._transfers[page]}
        rules = {
            "the counts of owners differ from the pages": +self._num_owned
            == Counter(self._order.owner_of(page) for page in pages if self._keys[page] is not None),
            "a count is negative": min([*self._references, *self._transfers], default=0) >= 0,
            "the states do not sum to the pool": self._num.total() == self.num_pages,
            "the counts differ from the pages": all(self._num[state] == len(found[state]) for state in PageState),
            "the counts of cached pages differ from the pages": +self._num_cached
            == Counter(self._worth[page] for page in found[PageState.CACHED]),
            "the free list differs from the free pages": sorted(self._free) == found[PageState.FREE],
            "the eviction order differs from the idle cached pages": len(self._order) == len(idle)
            and all(self._order.has(page, self._worth[page]) for page in idle),
        }
        problems = [problem for problem, holds in rules.items() if not holds]
        return problems + self._order.check(self._keys, self._parents)

    def _next_victim(self) -> Page | None:
        over = (owner for owner, most in self.max_owned.items() if self._num_owned[owner] > most)
        return self._order.cheapest(over)

    def _change(self, page: Page, count: "array[int]", by: int) -> None:
        before = self.state(page)
        count[page] += by
        self._settle(page, before)

    def _settle(self, page: Page, before: PageState) -> None:
        """Moves a page to where its state wants it."""
        after, worth = self.state(page), self._worth[page]
        if after is not before:
            self._leave(page, before)
            self._enter(page, after)
        is_idle = after is PageState.CACHED and not self._transfers[page]
        if is_idle and not self._order.has(page, worth):
            self._order.add(page, worth, self._parents[page])
        elif not is_idle and self._order.has(page, worth):
            self._order.remove(page, worth, self._parents[page])

    def _leave(self, page: Page, state: PageState) -> None:
        self._num[state] -= 1
        if state is PageState.CACHED:
            self._num_cached[self._worth[page]] -= 1
        elif state is PageState.FREE:
            self._free.pop()  # which is the page: free ones leave in the order of `allocate`

    def _enter(self, page: Page, state: PageState) -> None:
        self._num[state] += 1
        if state is PageState.CACHED:
            self._num_cached[self._worth[page]] += 1
            self._order.touch(page)
        elif state is PageState.FREE:
            self._free.append(page)
