import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kv_store.block_store import StoreStatus
from kv_store.transfers import (
    Done,
    Fetch,
    InlineTransfers,
    NoStore,
    Publish,
    ThreadTransfers,
    Transfers,
    Withdraw,
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

    def fetch(self, names: Sequence[BlockName], pages: Sequence[PageId]) -> list[Tier]:
        self._work("fetch", names, pages)
        return [Tier.HOST] * len(names)

    def publish(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: RequestId | None) -> int:
        self._work("publish", names, pages, hold)
        return len(names)

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
    transfers.start()
    yield transfers
    store.gate.set()
    transfers.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def test_inline_is_done_when_started(store: FakeStore) -> None:
    transfers: Transfers = InlineTransfers(store)
    transfers.begin(Fetch(1, NAMES, PAGES))
    transfers.begin(Publish(2, NAMES, PAGES, REQUEST))
    transfers.begin(Withdraw(3, NAMES))
    assert store.asked == [("fetch", NAMES, PAGES), ("publish", NAMES, PAGES, REQUEST), ("withdraw", NAMES)]
    assert (len(store.fenced_by), transfers.pending) == (3, 3)
    assert transfers.poll() == [Done(1, [Tier.HOST] * 2), Done(2, num_resident=2), Done(3)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_without_a_store_nothing_is_found_or_published() -> None:
    transfers: Transfers = NoStore()
    transfers.begin(Fetch(1, NAMES, PAGES))
    transfers.begin(Publish(2, NAMES, PAGES, None))
    transfers.begin(Withdraw(3, NAMES))
    assert transfers.pending == 3
    assert transfers.poll() == [Done(1), Done(2), Done(3)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_a_thread_does_it_in_order_and_wakes(store: FakeStore, waker: Waker, threaded: ThreadTransfers) -> None:
    threaded.begin(Fetch(1, NAMES, PAGES))
    threaded.begin(Publish(2, NAMES, PAGES, REQUEST))
    threaded.begin(Withdraw(3, NAMES))
    assert waker.poll(threaded, 3) == [Done(1, [Tier.HOST] * 2), Done(2, num_resident=2), Done(3)]
    assert store.asked == [("fetch", NAMES, PAGES), ("publish", NAMES, PAGES, REQUEST), ("withdraw", NAMES)]
    assert threaded.pending == 0


def test_the_engines_thread_fences_and_never_waits(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    threaded.begin(Fetch(1, NAMES, PAGES))
    assert (threaded.poll(), threaded.pending) == ([], 1)
    assert store.fenced_by == [threading.current_thread()]
    store.gate.set()
    waker.poll(threaded, 1)


def test_an_error_is_an_answer_and_not_the_end(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.error = RuntimeError("the device is lost")
    threaded.begin(Fetch(1, NAMES, PAGES))
    threaded.begin(Publish(2, NAMES, PAGES, None))
    threaded.begin(Withdraw(3, NAMES))
    for done in waker.poll(threaded, 3):
        assert done.error is not None
        assert "the device is lost" in done.error
        assert done == Done(done.ticket, error=done.error)
    store.error = None
    threaded.begin(Fetch(3, NAMES, PAGES))
    assert waker.poll(threaded, 1) == [Done(3, [Tier.HOST] * 2)]


def test_too_many_are_refused_and_answered(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    for ticket in range(3):
        threaded.begin(Fetch(ticket, NAMES, PAGES))
    threaded.begin(Fetch(3, NAMES, PAGES))
    threaded.begin(Publish(4, NAMES, PAGES, None))
    assert threaded.poll() == [Done(3, error="too many transfers"), Done(4, error="too many transfers")]
    assert threaded.pending == 3
    store.gate.set()
    assert [done.ticket for done in waker.poll(threaded, 3)] == [0, 1, 2]


def test_closing_starts_nothing_more(store: FakeStore, waker: Waker) -> None:
    transfers = ThreadTransfers(store, waker.wake)
    transfers.start()
    store.gate.clear()
    for ticket in range(20):
        transfers.begin(Fetch(ticket, NAMES, PAGES))
    closing = threading.Thread(target=transfers.close)
    closing.start()
    until(lambda: transfers.is_closing)
    store.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert len(store.asked) <= 1


def test_a_transfer_is_a_plain_call_of_any_thread(store: FakeStore, waker: Waker) -> None:
    transfers = ThreadTransfers(store, waker.wake)
    transfers.begin(Fetch(1, NAMES, PAGES))
    transfers.begin(Withdraw(2, NAMES))
    assert transfers.run_one()
    assert (transfers.poll(), transfers.pending) == ([Done(1, [Tier.HOST] * 2)], 1)
    transfers.close()
    assert not transfers.run_one()
    assert (transfers.poll(), store.asked) == ([], [("fetch", NAMES, PAGES)])
