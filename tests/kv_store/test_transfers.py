import threading
from collections.abc import Iterator, Sequence

import pytest

from kv_store.block_store import FetchedBlocks, PublishedBlocks, StoreStatus
from kv_store.transfers import (
    Done,
    FetchDone,
    InlineTransfers,
    NoStore,
    PublishDone,
    ThreadTransfers,
    Transfers,
    WithdrawDone,
)
from tests.kv_store.names import names_of
from tests.kv_store.pools import pages_from
from wire.ids import PageId, RequestId
from wire.keys import BlockName
from wire.tier import Tier

NAMES, PAGES = names_of(8), pages_from(0, 2)
REQUEST = RequestId("request")
WAIT_S = 20.0


class FakeStore:
    """Finds everything, publishes everything, and writes down what it was asked on which thread."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.fenced_by: list[threading.Thread] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def fence(self) -> None:
        self.fenced_by.append(threading.current_thread())

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId]) -> FetchedBlocks:
        self._work("fetch", names, pages)
        return FetchedBlocks([Tier.HOST] * len(names))

    def publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None) -> PublishedBlocks:
        self._work("publish", names, pages, hold)
        return PublishedBlocks(len(names))

    def withdraw(self, names: Sequence[BlockName]) -> None:
        self._work("withdraw", names)

    def _work(self, *asked: object) -> None:
        assert self.gate.wait(WAIT_S)
        self.asked.append(asked)
        if self.error is not None:
            raise self.error

    def renew(self, request_ids: Sequence[RequestId]) -> None: ...

    def release_holds(self, request_ids: Sequence[RequestId]) -> None: ...

    def status(self) -> StoreStatus:
        return StoreStatus(None, None, 0)

    def check(self) -> list[str]:
        return []


class Waker:
    """Counts wakes; `poll` waits for as many as there are transfers."""

    def __init__(self) -> None:
        self._wakes = threading.Semaphore(0)

    def wake(self) -> None:
        self._wakes.release()

    def poll(self, transfers: Transfers, num_transfers: int) -> list[Done]:
        done: list[Done] = []
        while len(done) < num_transfers:
            assert self._wakes.acquire(timeout=WAIT_S)
            done += transfers.poll()
        return done


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def waker() -> Waker:
    return Waker()


@pytest.fixture
def threaded(store: FakeStore, waker: Waker) -> Iterator[ThreadTransfers]:
    transfers = ThreadTransfers(store, waker.wake, max_pending=3)
    yield transfers
    store.gate.set()
    transfers.close()


def test_inline_is_done_when_started(store: FakeStore) -> None:
    transfers: Transfers = InlineTransfers(store)
    transfers.start_fetch(1, NAMES, PAGES)
    transfers.start_publish(2, NAMES, PAGES, REQUEST)
    transfers.start_withdraw(3, NAMES)
    assert store.asked == [("fetch", NAMES, PAGES), ("publish", NAMES, PAGES, REQUEST), ("withdraw", NAMES)]
    assert (len(store.fenced_by), transfers.pending) == (2, 3)
    assert transfers.poll() == [FetchDone(1, [Tier.HOST] * 2), PublishDone(2, 2), WithdrawDone(3)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_without_a_store_nothing_is_found_or_published() -> None:
    transfers: Transfers = NoStore()
    transfers.start_fetch(1, NAMES, PAGES)
    transfers.start_publish(2, NAMES, PAGES, None)
    transfers.start_withdraw(3, NAMES)
    assert transfers.pending == 3
    assert transfers.poll() == [FetchDone(1), PublishDone(2), WithdrawDone(3)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_a_thread_does_it_in_order_and_wakes(store: FakeStore, waker: Waker, threaded: ThreadTransfers) -> None:
    threaded.start_fetch(1, NAMES, PAGES)
    threaded.start_publish(2, NAMES, PAGES, REQUEST)
    threaded.start_withdraw(3, NAMES)
    assert waker.poll(threaded, 3) == [FetchDone(1, [Tier.HOST] * 2), PublishDone(2, 2), WithdrawDone(3)]
    assert store.asked == [("fetch", NAMES, PAGES), ("publish", NAMES, PAGES, REQUEST), ("withdraw", NAMES)]
    assert threaded.pending == 0


def test_the_engines_thread_fences_and_never_waits(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    threaded.start_fetch(1, NAMES, PAGES)
    assert (threaded.poll(), threaded.pending) == ([], 1)
    assert store.fenced_by == [threading.current_thread()]
    store.gate.set()
    waker.poll(threaded, 1)


def test_an_error_is_an_answer_and_not_the_end(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.error = RuntimeError("the device is lost")
    threaded.start_fetch(1, NAMES, PAGES)
    threaded.start_publish(2, NAMES, PAGES, None)
    threaded.start_withdraw(3, NAMES)
    for done in waker.poll(threaded, 3):
        assert done.error is not None
        assert "the device is lost" in done.error
        assert done in [kind(done.ticket, error=done.error) for kind in (FetchDone, PublishDone, WithdrawDone)]
    store.error = None
    threaded.start_fetch(3, NAMES, PAGES)
    assert waker.poll(threaded, 1) == [FetchDone(3, [Tier.HOST] * 2)]


def test_too_many_are_refused_and_answered(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    for ticket in range(3):
        threaded.start_fetch(ticket, NAMES, PAGES)
    threaded.start_fetch(3, NAMES, PAGES)
    threaded.start_publish(4, NAMES, PAGES, None)
    assert threaded.poll() == [FetchDone(3, error="too many transfers"), PublishDone(4, error="too many transfers")]
    assert threaded.pending == 3
    store.gate.set()
    assert [done.ticket for done in waker.poll(threaded, 3)] == [0, 1, 2]


def test_closing_starts_nothing_more(store: FakeStore, waker: Waker) -> None:
    transfers = ThreadTransfers(store, waker.wake)
    store.gate.clear()
    for ticket in range(20):
        transfers.start_fetch(ticket, NAMES, PAGES)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    assert transfers._is_closing.wait(WAIT_S)
    store.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert len(store.asked) <= 1
