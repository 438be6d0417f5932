import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kv_store.block_store import NOTHING, ReadResult
from kv_store.device_pool import Fence
from kv_store.node.messages import KeepHint
from kv_store.prefix.plan import FRONT, Needs, Read
from kv_store.transfers import (
    Done,
    Fetch,
    InlineTransfers,
    NoStore,
    Prefetch,
    Purge,
    ThreadTransfers,
    Transfers,
    WriteThrough,
)
from tests.kv_store.names import names_of
from tests.kv_store.pools import pages_from
from wire.block_names import BlockName
from wire.ids import AttemptId, PageId
from wire.tier import Tier

NAMES, PAGES = names_of(8), pages_from(0, 2)
REQUEST = AttemptId("request")
WAIT_S = 20.0
READING = ReadResult([Tier.HOST] * 2)
FETCH, WRITE, PURGE = Fetch(NAMES, PAGES), WriteThrough(NAMES, PAGES, REQUEST), Purge(NAMES)


class FakeStore:
    """Finds everything, publishes everything, and writes down what it was asked on which thread."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.fenced_by: list[threading.Thread] = []
        self.followed_by: list[threading.Thread] = []
        self.error: Exception | None = None
        self.num_there: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def fence(self) -> Fence:
        self.fenced_by.append(threading.current_thread())
        return None

    def follow(self, fence: Fence) -> None:
        self.followed_by.append(threading.current_thread())

    def fetch(
        self, names: Sequence[BlockName], pages: Sequence[PageId], peers: Sequence[str] = (), needs: Needs = FRONT
    ) -> ReadResult:
        self._work("fetch", names, pages)
        return ReadResult([Tier.HOST] * len(names))

    def read(self, step: Read, pages: Sequence[PageId]) -> ReadResult:
        return self.fetch(step.names, pages)

    def write_through(self, names: Sequence[BlockName], pages: Sequence[PageId], hold: AttemptId | None) -> int:
        self._work("write_through", names, pages, hold)
        return len(names) if self.num_there is None else self.num_there

    def purge(self, names: Sequence[BlockName], peers: Sequence[str] = ()) -> None:
        self._work("purge", names)

    def _work(self, *asked: object) -> None:
        assert self.gate.wait(WAIT_S)
        self.asked.append(asked)
        if self.error is not None:
            raise self.error

    def keep(self, names: Sequence[BlockName], hint: KeepHint) -> None:
        self._work("keep", names, hint)


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


def begin_all(transfers: Transfers) -> None:
    for transfer in (FETCH, WRITE, PURGE):
        transfers.begin(transfer)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def test_inline_is_done_when_started(store: FakeStore) -> None:
    transfers: Transfers = InlineTransfers(store)
    begin_all(transfers)
    assert store.asked == [("fetch", NAMES, PAGES), ("write_through", NAMES, PAGES, REQUEST), ("purge", NAMES)]
    assert (len(store.fenced_by), transfers.pending) == (3, 3)
    assert transfers.poll() == [Done(FETCH, READING), Done(WRITE, num_resident=2), Done(PURGE)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_without_a_store_nothing_is_found_or_published() -> None:
    transfers: Transfers = NoStore()
    begin_all(transfers)
    assert transfers.pending == 3
    assert transfers.poll() == [Done(FETCH), Done(WRITE), Done(PURGE)]
    assert (transfers.poll(), transfers.pending) == ([], 0)


def test_a_thread_does_it_in_order_and_wakes(store: FakeStore, waker: Waker, threaded: ThreadTransfers) -> None:
    begin_all(threaded)
    assert waker.poll(threaded, 3) == [Done(FETCH, READING), Done(WRITE, num_resident=2), Done(PURGE)]
    assert store.asked == [("fetch", NAMES, PAGES), ("write_through", NAMES, PAGES, REQUEST), ("purge", NAMES)]
    assert threaded.pending == 0


def test_the_engines_thread_fences_and_never_waits(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    threaded.begin(FETCH)
    assert (threaded.poll(), threaded.pending) == ([], 1)
    assert store.fenced_by == [threading.current_thread()]
    store.gate.set()
    waker.poll(threaded, 1)
    assert store.followed_by != store.fenced_by


def test_orders_pass_a_prefetch_and_it_passes_none(store: FakeStore) -> None:
    """Each prefetch has its turn once 16 orders have passed it."""
    transfers, reads = ThreadTransfers(store, lambda: None), [Prefetch(NAMES, PAGES) for _ in range(2)]
    later = [Purge(NAMES) for _ in range(20)]
    for one in (PURGE, *reads, *later):
        transfers.begin(one)
    for _ in range(23):
        transfers.run_one()
    ended = [done.transfer for done in transfers.poll()]
    assert ended == [PURGE, *later[:15], reads[0], later[15], reads[1], *later[16:]]


def test_a_prefetch_that_is_wanted_no_more_reads_nothing(store: FakeStore) -> None:
    orders = [Prefetch(NAMES, PAGES, is_wanted=lambda one: one is orders[0]) for _ in range(2)]
    transfers = InlineTransfers(store)
    for one in orders:
        transfers.begin(one)
    assert [done.reading for done in transfers.poll()] == [READING, NOTHING]
    assert len(store.asked) == 1


@pytest.mark.parametrize("num_there", [1, 2])
def test_a_write_tells_once_the_store_has_all_of_its_blocks(store: FakeStore, num_there: int) -> None:
    store.num_there = num_there
    told: list[str] = []
    InlineTransfers(store).begin(WriteThrough(NAMES, PAGES, told=[lambda: told.append("told")]))
    assert told == ["told"] * (num_there == len(NAMES))


def test_an_error_is_an_answer_and_not_the_end(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.error = RuntimeError("the device is lost")
    begin_all(threaded)
    for done, transfer in zip(waker.poll(threaded, 3), (FETCH, WRITE, PURGE), strict=True):
        assert done.error is not None
        assert "the device is lost" in done.error
        assert done == Done(transfer, error=done.error)
    store.error = None
    threaded.begin(FETCH)
    assert waker.poll(threaded, 1) == [Done(FETCH, READING)]


def test_too_many_are_refused_and_answered(store: FakeStore, threaded: ThreadTransfers, waker: Waker) -> None:
    store.gate.clear()
    taken = [Fetch(NAMES, PAGES) for _ in range(3)]
    for transfer in (*taken, FETCH, WRITE):
        threaded.begin(transfer)
    assert threaded.poll() == [Done(FETCH, error="too many transfers"), Done(WRITE, error="too many transfers")]
    assert threaded.pending == 3
    store.gate.set()
    assert [done.transfer for done in waker.poll(threaded, 3)] == taken


def test_closing_starts_nothing_more(store: FakeStore, waker: Waker) -> None:
    transfers = ThreadTransfers(store, waker.wake)
    transfers.start()
    store.gate.clear()
    for _ in range(20):
        transfers.begin(Fetch(NAMES, PAGES))
    closing = threading.Thread(target=transfers.close)
    closing.start()
    until(lambda: transfers.is_closing)
    store.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert len(store.asked) <= 1


def test_a_transfer_is_a_plain_call_of_any_thread(store: FakeStore, waker: Waker) -> None:
    transfers = ThreadTransfers(store, waker.wake)
    transfers.begin(FETCH)
    transfers.begin(PURGE)
    assert transfers.run_one()
    assert (transfers.poll(), transfers.pending) == ([Done(FETCH, READING)], 1)
    transfers.close()
    assert not transfers.run_one()
    assert (transfers.poll(), store.asked) == ([], [("fetch", NAMES, PAGES)])
