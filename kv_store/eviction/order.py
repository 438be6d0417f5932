"""The order in which cached pages are evicted: children before parents, else by an `EvictionPolicy`.

An owner is a number, 0 for none; a page beyond its owner's bound is evicted before others. Owners share no chain. Among
pages of a priority, kept pages are evicted after all others, the longest kept first.

A parent counts its children as long as both may be evicted, so that no call follows a chain of parents: a page whose
last child is evicted takes that child's position, and is in the order from then on.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar, cast

from wire.ids import BlockKey

Page = TypeVar("Page", bound=int)
"""The id of a page: `PageId` on a device, `SlotId` in an arena."""


_MAX_KEPT = 1 << 44


class Priority(IntEnum):
    """The eviction priority of a cached page: the lowest is evicted first.

    LEAST: tails, and blocks that their session's latest request did not use.
    """

    LEAST = 0
    COPIED = 1
    ONLY_COPY = 2


_PRIORITIES = tuple(Priority)


class EvictionPolicy(Protocol):
    """The queues of a pool's pages, each page's position in its queue, and the choice between the queues' heads.

    queues, positions: by page; the lowest position of a queue is its head. Every call takes constant time, amortised.
    """

    name: str
    num_queues: int
    queues: "array[int]"
    positions: "array[int]"

    def index(self, page: int, key: BlockKey) -> None:
        """Notes that a page now has a block."""

    def unindex(self, page: int, key: BlockKey) -> None:
        """Notes that a page has lost its block, evicted or withdrawn."""

    def touch(self, page: int) -> None:
        """Counts a use of a page."""

    def inherit(self, parent: int, child: int) -> None:
        """Gives a parent at least the position of a child that it outlives."""

    def choose(self, heads: Sequence[int]) -> int:
        """Returns the page to evict, among the heads of the queues."""


class EvictionOrder(Generic[Page]):
    """Priority, parent and owner of each indexed page, and the eviction order of idle cached pages.

    Each call takes logarithmic time in the number of pages, amortised; `first` also looks at each queue of each owner.
    key_to_page, keys: the ledger's index, which the ledger changes. max_owned: for each owner with a bound, the indexed
    pages that it keeps; beyond it, its cached pages are evicted before others.
    """

    def __init__(
        self, key_to_page: Mapping[bytes, Page], keys: Sequence[BlockKey | None], policy: EvictionPolicy
    ) -> None:
        pages = cast(Sequence[Page], range(len(keys)))
        self.max_owned: Mapping[int, int] = {}
        self._key_to_page = key_to_page
        self._keys = keys
        self._policy = policy
        self._owners = array("I", bytes(4 * len(keys)))
        self._kept: dict[int, int] = {}
        self._num_owned = Counter[int]()
        self._parents: list[bytes | None] = [None] * len(keys)
        self._priorities = bytearray([Priority.ONLY_COPY]) * len(keys)
        self._ranks = [_Rank(pages, policy, self._owners, self._kept) for _ in Priority]

    def __len__(self) -> int:
        return sum([rank.num_pages for rank in self._ranks])

    def __contains__(self, page: Page) -> bool:
        return bool(self._ranks[self._priorities[page]].has[page])

    def priority_of(self, page: Page) -> Priority:
        return _PRIORITIES[self._priorities[page]]

    def parent_of(self, page: Page) -> bytes | None:
        return self._parents[page]

    def touch(self, page: Page) -> None:
        """Counts a use of a page, cached or not; its parent inherits it when the page is evicted."""
        before = self._policy.queues[page]
        self._policy.touch(page)
        if self._policy.queues[page] != before:
            self._ranks[self._priorities[page]].requeue(page)

    def index(self, page: Page, key: BlockKey, priority: Priority, parent: bytes | None, owner: int) -> None:
        """Notes a newly indexed page, also as the parent of pages that name its key."""
        above = None if parent is None else self._key_to_page.get(parent)
        self._parents[page] = parent if above is None else self._keys[above]  # equal, and no second copy
        self._priorities[page] = priority
        self._owners[page] = owner
        self._num_owned[owner] += 1
        self._policy.index(page, key)
        for rank in self._ranks:
            if rank.orphans:
                rank.num_children[page] = rank.orphans.pop(key, 0)

    def unindex(self, page: Page, key: BlockKey) -> None:
        """Notes that a page is no longer indexed; it must not be in the order."""
        self._num_owned[self._owners[page]] -= 1
        self._kept.pop(page, None)
        self._parents[page] = None
        self._policy.unindex(page, key)
        for rank in self._ranks:
            if rank.num_children[page]:
                rank.count_child(None, key, rank.num_children[page])
                rank.num_children[page] = 0

    def add(self, page: Page) -> None:
        """Adds a page that may now be evicted."""
        rank, parent = self._ranks[self._priorities[page]], self._evicted_after(page)
        if parent is not None:
            rank.count_child(self._with_position_of(page, parent), parent, 1)
        rank.add(page)

    def remove(self, page: Page) -> None:
        """Removes a page that may no longer be evicted."""
        rank, parent = self._ranks[self._priorities[page]], self._evicted_after(page)
        rank.remove(page)
        if parent is not None:
            rank.count_child(self._with_position_of(page, parent), parent, -1)

    def set_priority(self, page: Page, priority: Priority) -> None:
        with self._out_of_order(page):
            self._priorities[page] = priority

    def keep(self, page: Page, end_s: float) -> None:
        """Keeps an indexed page until `end_keep`: it is evicted after unkept pages of its priority.

        end_s: among kept pages, the latest end is evicted first.
        """
        self._kept[page] = _MAX_KEPT - min(int(end_s * 1000), _MAX_KEPT - 1)
        self._requeue(page)

    def end_keep(self, page: Page) -> None:
        if self._kept.pop(page, None):
            self._requeue(page)

    def _requeue(self, page: Page) -> None:
        for rank in self._ranks:
            rank.requeue(page)

    def is_kept(self, page: Page) -> bool:
        return page in self._kept

    def set_owner(self, page: Page, owner: int) -> None:
        """Gives an indexed page to another owner."""
        with self._out_of_order(page):
            self._num_owned[self._owners[page]] -= 1
            self._num_owned[owner] += 1
            self._owners[page] = owner

    @property
    def policy_name(self) -> str:
        return self._policy.name

    def is_beyond_share(self, page: Page) -> bool:
        """Returns whether the owner of an indexed page has more than its bound."""
        owner = self._owners[page]
        return self._num_owned[owner] > self.max_owned.get(owner, len(self._keys))

    def first(self) -> Page | None:
        """Returns the page to evict first, preferably of an owner beyond its bound."""
        for owner, most in self.max_owned.items():
            if self._num_owned[owner] > most:
                for rank in self._ranks:
                    if (page := rank.first_of(owner)) is not None:
                        return page
        for rank in self._ranks:
            if rank.num_pages:
                return rank.first()
        return None

    def oldest(self, priority: Priority, num_pages: int) -> list[Page]:
        """Lists the first `num_pages` pages of a priority to evict, or fewer."""
        pages: list[Page] = []
        while len(pages) < num_pages and (page := self._ranks[priority].first()) is not None:
            self.remove(page)  # its parent may be next
            pages.append(page)
        for page in pages:
            self.add(page)
        return pages

    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""
        parents = [self._evicted_after(page) for page in self._ranks[0].pages]
        owned = Counter(owner for owner, key in zip(self._owners, self._keys, strict=True) if key is not None)
        problems = [] if +self._num_owned == owned else ["the counts of owners differ from the pages"]
        return problems + [problem for rank in self._ranks for problem in rank.check(self._keys, parents)]

    @contextmanager
    def _out_of_order(self, page: Page) -> Iterator[None]:
        """Takes a page out of the order, if it is there, while its place changes."""
        is_idle = page in self
        if is_idle:
            self.remove(page)
        yield
        if is_idle:
            self.add(page)

    def _evicted_after(self, page: Page) -> bytes | None:
        """Returns the key of the block that may be evicted only after a page: its parent."""
        return self._parents[page]

    def _with_position_of(self, page: Page, parent: bytes) -> Page | None:
        """Gives a page's position to its parent; returns the parent, None if it is not indexed."""
        above = self._key_to_page.get(parent)
        if above is not None:
            self._policy.inherit(above, page)
        return above


class StartFirst(EvictionOrder[Page]):
    """An EvictionOrder without parents, for layers with windows: evicts a prefix's start first."""

    def _evicted_after(self, page: Page) -> bytes | None:
        return None


class _Rank(Generic[Page]):
    """The pages of one priority.

    num_children: each page's number of children in this rank. orphans: the same by key, for parents that are not
    indexed. Each owner has the policy's queues, and a queue of kept pages; a queue's number is the owner's number times
    the number of these, plus its own. kept: the position of each kept page in its queue. A queue has every page without
    children, and may have others; an entry is a position times the number of all pages, plus the page. A stale entry is
    corrected when it comes first. queued_in: for each page, 1 + the queue with its entry; 0 without an entry.
    """

    def __init__(
        self, pages: Sequence[Page], policy: EvictionPolicy, owners: "array[int]", kept: Mapping[int, int]
    ) -> None:
        self.pages = pages
        self.num_pages = 0
        self.has = bytearray(len(pages))
        self.num_children = array("I", bytes(4 * len(pages)))
        self.orphans = Counter[bytes]()
        self._policy = policy
        self._owners = owners
        self._kept = kept
        self._num_queues = policy.num_queues + 1
        self._queues: dict[int, list[int]] = {}
        self._queued_in = array("I", bytes(4 * len(pages)))

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

    def requeue(self, page: Page) -> None:
        """Puts a moved page into its queue, at its place."""
        self._queued_in[page] = 0
        if self.has[page] and not self.num_children[page]:
            self._enqueue(page)

    def first_of(self, owner: int) -> Page | None:
        return self._first(range(owner * self._num_queues, (owner + 1) * self._num_queues))

    def first(self) -> Page | None:
        if (page := self._first(self._queues)) is not None:
            return page
        return self.pages[self.has.find(1)] if self.num_pages else None  # keys in a circle: all have children

    def _first(self, queues: Collection[int]) -> Page | None:
        heads = [page for queue in queues if (page := self._head(queue)) is not None]
        if len(heads) == 1:
            return heads[0]
        if others := [page for page in heads if page not in self._kept]:
            return self.pages[self._policy.choose(others)]
        return min(heads, key=self._kept.__getitem__, default=None)

    def _head(self, number: int) -> Page | None:
        queue = self._queues.get(number, [])
        while queue:
            position, index = divmod(queue[0], len(self.has))
            page = self.pages[index]
            if self._queued_in[page] != number + 1:
                heappop(queue)
            elif not self.has[page] or self.num_children[page]:
                self._queued_in[page] = 0
                heappop(queue)
            elif self._queue_of(page) != number:
                heappop(queue)
                self._enqueue(page)
            elif position != self._position_of(page):
                heapreplace(queue, self._entry(page))
            else:
                return page
        return None

    def check(self, keys: Sequence[BlockKey | None], parents: Sequence[bytes | None]) -> Iterable[str]:
        pages = [page for page in self.pages if self.has[page]]
        children = Counter(parent for page in pages if (parent := parents[page]) is not None)
        known = {key: num for key, num in zip(keys, self.num_children, strict=True) if num and key is not None}
        if children != self.orphans + Counter(known) or sum(self.num_children) != sum(known.values()):
            yield "pages have other children than are counted"
        if not all(self.num_children[page] or self._queued_in[page] for page in pages):
            yield "a page that may be evicted is in no queue"
        if any(len(queue) > 2 * len(self.has) for queue in self._queues.values()):
            yield "a queue has more than two entries a page"
        queued = [(entry % len(self.has), number + 1) for number, queue in self._queues.items() for entry in queue]
        noted = [(page, queued_in) for page, queued_in in enumerate(self._queued_in) if queued_in]
        if sorted({one for one in queued if self._queued_in[one[0]] == one[1]}) != noted:
            yield "the queues differ from what is noted of them"

    def _enqueue(self, page: Page) -> None:
        number = self._queue_of(page)
        if self._queued_in[page] != number + 1:
            self._queued_in[page] = number + 1
            queue = self._queues.setdefault(number, [])
            heappush(queue, self._entry(page))
            if len(queue) > 2 * len(self.has):  # of pages that came back before their old entries were first
                queue[:] = {self._entry(one) for one in self.pages if self._queued_in[one] == number + 1}
                heapify(queue)

    def _queue_of(self, page: Page) -> int:
        own = self._policy.num_queues if page in self._kept else self._policy.queues[page]
        return self._owners[page] * self._num_queues + own

    def _position_of(self, page: Page) -> int:
        return self._kept.get(page, self._policy.positions[page])

    def _entry(self, page: Page) -> int:
        return self._position_of(page) * len(self.has) + page
