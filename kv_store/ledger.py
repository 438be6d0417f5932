"""The books of a pool's pages: counts of references and of transfers, and the states that follow from them.

                      findable by key    not findable
references            PUBLISHED          OWNED
none, but transfers   CACHED             DRAINING
none                  CACHED             FREE

A page is given out only from FREE, or from CACHED while no transfer touches it. Serves a worker's device pages and an
arena's slots alike.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum, IntEnum
from itertools import islice, takewhile

from wire.errors import StoreError
from wire.ids import BlockKey, PageId
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


class Worth(IntEnum):
    """The cost of losing a cached page. The cheapest are evicted first, within a worth the least recently used."""

    TAIL = 0
    COPIED = 1
    ONLY_COPY = 2


class Ledger:
    """The books of `num_pages` pages. Not thread-safe.

    A page joins the least-recently-used order when its last reference goes, so callers free the last page of a sequence
    first: a prefix's end is then evicted before its start.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self._key_to_page: dict[BlockKey, PageId] = {}
        self._keys: list[BlockKey | None] = [None] * num_pages
        self._references = [0] * num_pages
        self._transfers = [0] * num_pages
        self._worth = [Worth.ONLY_COPY] * num_pages
        self._num = Counter({PageState.FREE: num_pages})
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._cached: dict[Worth, OrderedDict[PageId, None]] = {worth: OrderedDict() for worth in Worth}
        self._busy: set[PageId] = set()

    @property
    def num_allocatable(self) -> int:
        """Pages that `allocate` can give out now: free ones, and cached ones that no transfer touches."""
        return self._num[PageState.FREE] + self._num[PageState.CACHED] - len(self._busy)

    def allocate(self, num_pages: int) -> list[PageId]:
        """Gives out pages with one reference each: free ones, then evicted ones. OutOfBlocks if there are fewer."""
        if num_pages > self.num_allocatable:
            raise OutOfBlocks(f"{num_pages} pages wanted, {self.num_allocatable} to be had")
        for page in self._victims(num_pages - len(self._free)):
            self.withdraw(page)
            self.num_evicted += 1
        pages = self._free[: -num_pages - 1 : -1]
        for page in pages:
            self._change(page, self._references, 1)
        return pages

    def acquire(self, page: PageId) -> None:
        """Adds a reference to a page that is referenced or findable."""
        if self.state(page) in (PageState.FREE, PageState.DRAINING):
            raise ValueError(f"page {page} is {self.state(page).value}: nothing to share")
        self._change(page, self._references, 1)

    def free(self, page: PageId) -> None:
        """Takes a reference away. The last one leaves a page cached, draining or free."""
        if not self._references[page]:
            raise ValueError(f"page {page} has no reference to give back")
        self._change(page, self._references, -1)

    def publish(self, page: PageId, key: BlockKey, worth: Worth = Worth.ONLY_COPY) -> bool:
        """Makes a page findable. False if another page is found under that key: this one then stays as it is."""
        before = self.state(page)
        if before is PageState.FREE:
            raise ValueError(f"page {page} is free: nothing to publish")
        if key in self._key_to_page:
            return self._key_to_page[key] == page
        if self._keys[page] is not None:
            raise ValueError(f"page {page} is indexed already")
        self._key_to_page[key] = page
        self._keys[page] = key
        self._worth[page] = worth
        self._settle(page, before)
        return True

    def withdraw(self, page: PageId) -> None:
        """Makes a page unfindable. Does nothing if it is."""
        key, before = self._keys[page], self.state(page)
        if key is not None:
            del self._key_to_page[key]
            self._keys[page] = None
            self._settle(page, before)

    def find(self, key: BlockKey) -> PageId | None:
        """Finds the page of a key, without a reference and without counting a use."""
        return self._key_to_page.get(key)

    def find_longest(self, keys: Iterable[BlockKey]) -> list[PageId]:
        """Finds the pages of the longest prefix of `keys` without a hole."""
        return [self._key_to_page[key] for key in takewhile(self._key_to_page.__contains__, keys)]

    def key_of(self, page: PageId) -> BlockKey | None:
        return self._keys[page]

    def begin_transfer(self, page: PageId) -> None:
        """Notes a copy to or from a page: even freed, the page is not given out before `end_transfer`."""
        if self.state(page) is PageState.FREE:
            raise ValueError(f"page {page} is free: nothing to transfer")
        self._change(page, self._transfers, 1)

    def end_transfer(self, page: PageId) -> None:
        """Ends a transfer of a page."""
        if not self._transfers[page]:
            raise ValueError(f"page {page} has no transfer to end")
        self._change(page, self._transfers, -1)

    def touch(self, page: PageId) -> None:
        """Counts a use: a cached page becomes the last of its worth to be evicted."""
        if self.state(page) is PageState.CACHED:
            self._cached[self._worth[page]].move_to_end(page)

    def revalue(self, page: PageId, worth: Worth) -> None:
        """Changes the worth of a findable page."""
        if self.state(page) is PageState.CACHED:
            del self._cached[self._worth[page]][page]
            self._cached[worth][page] = None
        self._worth[page] = worth

    def oldest(self, worth: Worth, num_pages: int) -> list[PageId]:
        """Lists up to `num_pages` cached pages of a worth that no transfer touches, least recently used first."""
        return list(islice((page for page in self._cached[worth] if page not in self._busy), num_pages))

    def num_cached(self, worth: Worth) -> int:
        return len(self._cached[worth])

    def num_references(self, page: PageId) -> int:
        return self._references[page]

    def num_transfers(self, page: PageId) -> int:
        return self._transfers[page]

    def state(self, page: PageId) -> PageState:
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
        pages = [PageId(page) for page in range(self.num_pages)]
        states = {page: self.state(page) for page in pages}
        cached = [page for order in self._cached.values() for page in order]
        found = {state: sorted(page for page in pages if states[page] is state) for state in PageState}
        rules = {
            "a count is negative": min(self._references + self._transfers, default=0) >= 0,
            "the states do not sum to the pool": self._num.total() == self.num_pages,
            "the counts differ from the pages": all(self._num[state] == len(found[state]) for state in PageState),
            "the free list differs from the free pages": sorted(self._free) == found[PageState.FREE],
            "the eviction order differs from the cached pages": sorted(cached) == found[PageState.CACHED],
            "a page stands under a worth that is not its own": all(
                self._worth[page] is worth for worth, order in self._cached.items() for page in order
            ),
            "a busy page is missing": self._busy == {page for page in cached if self._transfers[page]},
        }
        return [problem for problem, holds in rules.items() if not holds]

    def _victims(self, num_pages: int) -> list[PageId]:
        in_order = (page for worth in Worth for page in self._cached[worth] if page not in self._busy)
        return list(islice(in_order, max(0, num_pages)))

    def _change(self, page: PageId, count: list[int], by: int) -> None:
        before = self.state(page)
        count[page] += by
        self._settle(page, before)

    def _settle(self, page: PageId, before: PageState) -> None:
        """Moves a page to where its state wants it."""
        after = self.state(page)
        if after is not before:
            self._leave(page, before)
            self._enter(page, after)
        if after is PageState.CACHED and self._transfers[page]:
            self._busy.add(page)
        else:
            self._busy.discard(page)

    def _leave(self, page: PageId, state: PageState) -> None:
        self._num[state] -= 1
        if state is PageState.CACHED:
            del self._cached[self._worth[page]][page]
        elif state is PageState.FREE:
            self._free.pop()  # which is the page: free ones leave in the order of `allocate`

    def _enter(self, page: PageId, state: PageState) -> None:
        self._num[state] += 1
        if state is PageState.CACHED:
            self._cached[self._worth[page]][page] = None
        elif state is PageState.FREE:
            self._free.append(page)
