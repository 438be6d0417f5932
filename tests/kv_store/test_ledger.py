from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_store.eviction.hit_density import HitDensity
from kv_store.eviction.order import Priority
from kv_store.eviction.policy import LeastRecentlyUsed
from kv_store.ledger import Ledger, OutOfBlocks, PageState
from wire.ids import BlockKey, PageId


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def cached(
    ledger: Ledger[PageId], number: int, priority: Priority = Priority.ONLY_COPY, parent: int | None = None
) -> PageId:
    """A page that is cached under a key, as the most recently used one."""
    [page] = ledger.allocate(1)
    assert ledger.index(page, key(number), priority, None if parent is None else key(parent))
    ledger.free(page)
    return page


def test_a_page_goes_through_its_states() -> None:
    ledger = Ledger[PageId](1)
    [page] = ledger.allocate(1)
    assert ledger.state(page) is PageState.OWNED
    ledger.index(page, key(1))
    assert ledger.state(page) is PageState.PUBLISHED
    ledger.begin_transfer(page)
    ledger.free(page)
    assert ledger.state(page) is PageState.CACHED
    ledger.unindex(page)
    assert ledger.state(page) is PageState.DRAINING
    ledger.end_transfer(page)
    assert ledger.state(page) is PageState.FREE
    assert ledger.check() == []


def test_too_much_is_refused_and_changes_nothing() -> None:
    ledger = Ledger[PageId](4)
    ledger.allocate(2)
    cached(ledger, 1)
    before = ledger.counts()
    with pytest.raises(OutOfBlocks):
        ledger.allocate(3)
    assert (ledger.counts(), ledger.find(key(1)) is not None, ledger.num_allocatable) == (before, True, 2)


def test_a_key_and_a_page_are_tied_once() -> None:
    ledger = Ledger[PageId](2)
    page, other = ledger.allocate(2)
    assert ledger.index(page, key(1))
    assert ledger.index(page, key(1))
    assert not ledger.index(other, key(1))
    with pytest.raises(ValueError, match="indexed already"):
        ledger.index(page, key(2))
    assert (ledger.find(key(1)), ledger.key_of(page), ledger.find(key(2)), ledger.key_of(other)) == (
        page,
        key(1),
        None,
        None,
    )
    ledger.unindex(page)
    ledger.unindex(page)
    assert (ledger.find(key(1)), ledger.key_of(page)) == (None, None)
    assert ledger.check() == []


def test_free_pages_go_before_cached_ones() -> None:
    ledger = Ledger[PageId](2)
    first = cached(ledger, 1)
    assert ledger.allocate(1) != [first]
    assert ledger.find(key(1)) == first
    assert ledger.allocate(1) == [first]
    assert ledger.find(key(1)) is None
    assert ledger.num_evicted == 1


def test_the_next_pages_to_evict_are_reclaimed() -> None:
    ledger = Ledger[PageId](4)
    pages = [cached(ledger, number) for number in range(3)]
    ledger.reclaim(2)
    assert ([ledger.find(key(number)) for number in range(3)], ledger.num_evicted) == ([None, *pages[1:]], 1)
    [held] = ledger.allocate(1)
    ledger.reclaim(4)
    assert (ledger.counts().free, ledger.num_evicted, ledger.num_references(held)) == (3, 3, 1)
    assert ledger.check() == []


def test_the_least_recently_used_goes_first_and_a_prefixs_end_before_its_start() -> None:
    ledger = Ledger[PageId](6)
    old, young = ledger.allocate(3), ledger.allocate(3)
    for number, page in enumerate((*old, *young)):
        ledger.index(page, key(number))
    for page in (*reversed(old), *reversed(young)):
        ledger.free(page)
    ledger.acquire(old[0])
    ledger.free(old[0])
    assert [ledger.allocate(1)[0] for _ in range(6)] == [old[2], old[1], *reversed(young), old[0]]


def test_what_costs_less_to_lose_goes_first() -> None:
    ledger = Ledger[PageId](5)
    only, copied, tail, later = (
        cached(ledger, number, priority)
        for number, priority in enumerate((Priority.ONLY_COPY, Priority.COPIED, Priority.LEAST, Priority.ONLY_COPY))
    )
    ledger.allocate(1)
    ledger.set_priority(later, Priority.COPIED)
    assert [ledger.num_cached(priority) for priority in Priority] == [1, 2, 1]
    assert ledger.order.oldest(Priority.COPIED, 9) == [copied, later]
    assert [ledger.allocate(1)[0] for _ in range(4)] == [tail, copied, later, only]


def test_a_use_without_a_reference_counts() -> None:
    ledger = Ledger[PageId](2)
    one, other = cached(ledger, 1), cached(ledger, 2)
    ledger.order.touch(one)
    assert [*ledger.allocate(1), *ledger.allocate(1)] == [other, one]


def evicted(ledger: Ledger[PageId], num_pages: int) -> list[PageId]:
    return [ledger.allocate(1)[0] for _ in range(num_pages)]


def test_a_page_goes_after_its_children_and_counts_their_last_use_as_its_own() -> None:
    ledger = Ledger[PageId](6)
    chain = [cached(ledger, 1), *(cached(ledger, number, parent=number - 1) for number in (2, 3))]
    other = cached(ledger, 4)
    fork = cached(ledger, 5, parent=1)
    last = cached(ledger, 6)
    ledger.order.touch(chain[2])
    assert evicted(ledger, 6) == [other, fork, last, *reversed(chain)]


def test_a_page_that_is_in_use_lets_its_parent_go_and_counts_again_later() -> None:
    ledger = Ledger[PageId](3)
    parent, other = cached(ledger, 1), cached(ledger, 2)
    child = cached(ledger, 3, parent=1)
    ledger.begin_transfer(child)
    assert ledger.order.oldest(Priority.ONLY_COPY, 9) == [other, parent]
    ledger.end_transfer(child)
    assert ledger.order.oldest(Priority.ONLY_COPY, 9) == [other, child, parent]
    assert ledger.check() == []


def test_a_parent_that_comes_back_goes_after_the_children_that_stayed() -> None:
    ledger = Ledger[PageId](3)
    child, last = cached(ledger, 2, parent=1), cached(ledger, 3)
    parent = cached(ledger, 1)
    ledger.order.touch(child)
    assert ledger.order.oldest(Priority.ONLY_COPY, 9) == [last, child, parent]
    ledger.unindex(parent)
    assert cached(ledger, 1) == parent
    ledger.order.touch(child)
    assert evicted(ledger, 3) == [last, child, parent]


def test_a_page_with_a_copy_does_not_wait_for_a_child_without_one() -> None:
    ledger = Ledger[PageId](3)
    parent, child, other = cached(ledger, 1), cached(ledger, 2, parent=1), cached(ledger, 3)
    ledger.set_priority(parent, Priority.COPIED)
    assert ledger.order.oldest(Priority.ONLY_COPY, 9) == [child, other]
    assert ledger.allocate(1) == [parent]
    ledger.set_priority(other, Priority.COPIED)
    assert evicted(ledger, 2) == [other, child]


def test_pages_that_are_one_anothers_parents_can_be_had() -> None:
    ledger = Ledger[PageId](3)
    pages = {cached(ledger, number, parent=parent) for number, parent in ((1, 2), (2, 1), (3, 3))}
    assert set(evicted(ledger, 3)) == pages
    assert ledger.check() == []


def test_a_cached_page_with_a_transfer_is_not_given_out() -> None:
    ledger = Ledger[PageId](2)
    busy, idle = cached(ledger, 1), cached(ledger, 2)
    ledger.begin_transfer(busy)
    assert ledger.num_allocatable == 1
    assert ledger.order.oldest(Priority.ONLY_COPY, 9) == [idle]
    assert ledger.allocate(1) == [idle]
    with pytest.raises(OutOfBlocks):
        ledger.allocate(1)
    ledger.end_transfer(busy)
    assert ledger.allocate(1) == [busy]


def test_a_transfer_keeps_a_freed_page_draining() -> None:
    ledger = Ledger[PageId](1)
    [page] = ledger.allocate(1)
    ledger.begin_transfer(page)
    ledger.begin_transfer(page)
    ledger.free(page)
    ledger.end_transfer(page)
    assert (ledger.counts().draining, ledger.num_allocatable) == (1, 0)
    ledger.end_transfer(page)
    assert ledger.allocate(1) == [page]


def test_a_second_page_under_a_key_stays_out_of_the_index() -> None:
    ledger = Ledger[PageId](2)
    first, second = ledger.allocate(2)
    assert ledger.index(first, key(1))
    assert ledger.index(first, key(1))
    assert not ledger.index(second, key(1))
    assert ledger.find(key(1)) == first
    ledger.free(second)
    assert ledger.state(second) is PageState.FREE


def test_what_makes_no_sense_is_refused() -> None:
    ledger = Ledger[PageId](1)
    page = PageId(0)
    for wrong in (ledger.acquire, ledger.free, ledger.begin_transfer, ledger.end_transfer):
        with pytest.raises(ValueError, match="page 0"):
            wrong(page)
    with pytest.raises(ValueError, match="page 0 is free"):
        ledger.index(page, key(1))
    ledger.allocate(1)
    ledger.index(page, key(1))
    with pytest.raises(ValueError, match="indexed already"):
        ledger.index(page, key(2))
    assert ledger.check() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("_references", [1, 0]), ("_transfers", [0, -1]), ("_free", {}), ("_num_draining", 1), ("_num_cached", [1, 0, 0])],
)
def test_wrong_books_are_found(name: str, value: object) -> None:
    ledger = Ledger[PageId](2)
    cached(ledger, 1)
    assert ledger.check() == []
    setattr(ledger, name, value)
    assert ledger.check() != []


class LedgerMachine(RuleBasedStateMachine):
    """Against a model that keeps, for each page, what was done to it and not undone."""

    policy: type[LeastRecentlyUsed] = LeastRecentlyUsed

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger[PageId](6, policy=self.policy)
        self.references = Counter[PageId]()
        self.transfers = Counter[PageId]()

    def pages(self, *states: PageState) -> list[PageId]:
        return [PageId(page) for page in range(6) if self.ledger.state(PageId(page)) in states]

    @rule(num_pages=st.integers(0, 7))
    def allocate(self, num_pages: int) -> None:
        allocatable = self.ledger.num_allocatable
        try:
            pages = self.ledger.allocate(num_pages)
        except OutOfBlocks:
            assert num_pages > allocatable
            return
        assert len(set(pages)) == num_pages <= allocatable
        assert all(self.references[page] == 0 and self.transfers[page] == 0 for page in pages)
        self.references.update(pages)

    @rule(data=st.data(), number=st.integers(0, 5), priority=st.sampled_from(Priority), parent=st.integers(0, 6))
    def index(self, data: st.DataObject, number: int, priority: Priority, parent: int) -> None:
        """A parent of any number: chains, forks, circles, parents that come late or never."""
        page = self.choose(data, PageState.OWNED, PageState.DRAINING)
        if page is not None:
            known = self.ledger.find(key(number))
            assert self.ledger.index(page, key(number), priority, key(parent)) == (known is None)
            assert self.ledger.find(key(number)) == (page if known is None else known)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        page = self.choose(data, PageState.OWNED, PageState.PUBLISHED)
        if page is not None:
            self.ledger.free(page)
            self.references[page] -= 1

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        page = self.choose(data, PageState.OWNED, PageState.PUBLISHED, PageState.CACHED)
        if page is not None:
            self.ledger.acquire(page)
            self.references[page] += 1

    @rule(data=st.data())
    def begin_transfer(self, data: st.DataObject) -> None:
        page = self.choose(data, PageState.OWNED, PageState.PUBLISHED, PageState.CACHED, PageState.DRAINING)
        if page is not None:
            self.ledger.begin_transfer(page)
            self.transfers[page] += 1

    @precondition(lambda self: self.transfers.total())
    @rule(data=st.data())
    def end_transfer(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.transfers.elements())))
        self.ledger.end_transfer(page)
        self.transfers[page] -= 1

    @rule(page=st.integers(0, 5), priority=st.sampled_from(Priority))
    def touch_and_set_priority(self, page: int, priority: Priority) -> None:
        self.ledger.order.touch(PageId(page))
        self.ledger.set_priority(PageId(page), priority)

    @rule(priority=st.sampled_from(Priority), num_pages=st.integers(1, 6))
    def list_oldest(self, priority: Priority, num_pages: int) -> None:
        pages = self.ledger.order.oldest(priority, num_pages)
        assert len(set(pages)) == len(pages) <= num_pages
        assert self.ledger.order.oldest(priority, num_pages) == pages, "a list of them changes nothing"

    @rule(num_free=st.integers(0, 7))
    def reclaim(self, num_free: int) -> None:
        num_allocatable, num_free_before = self.ledger.num_allocatable, self.ledger.counts().free
        self.ledger.reclaim(num_free)
        assert self.ledger.num_allocatable == num_allocatable
        assert self.ledger.counts().free == max(num_free_before, min(num_free, num_allocatable))

    @rule(page=st.integers(0, 5))
    def unindex(self, page: int) -> None:
        self.ledger.unindex(PageId(page))
        assert self.ledger.key_of(PageId(page)) is None

    def choose(self, data: st.DataObject, *states: PageState) -> PageId | None:
        pages = self.pages(*states)
        return data.draw(st.sampled_from(pages)) if pages else None

    @invariant()
    def books_are_right(self) -> None:
        assert self.ledger.check() == []
        counts = self.ledger.counts()
        assert counts.free + counts.owned + counts.published + counts.cached + counts.draining == counts.total == 6
        for page in self.pages(*PageState):
            assert self.ledger.num_references(page) == self.references[page]
            assert self.ledger.num_transfers(page) == self.transfers[page]


class HitDensityMachine(LedgerMachine):
    policy = HitDensity


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHitDensityMachine = HitDensityMachine.TestCase
TestHitDensityMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
