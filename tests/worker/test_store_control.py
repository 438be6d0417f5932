import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kv_store.block_store import StoreStatus
from kv_store.node.directory import Directory
from kv_store.node.event_log import EventCursor, EventPage
from kv_store.node.messages import HoldRoom
from kv_store.node.records import Records
from kv_store.tiers.contents import ListableTier
from tests.harness.cluster import until
from wire.errors import StoreError
from wire.ids import AttemptId
from worker import store_control as store_module
from worker.store_control import AsyncStore

ID = AttemptId("r")


class SlowStore:
    """A StoreControl of nothing; it answers what the tests ask once it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.released: list[AttemptId] = []

    def renew(self, attempt_ids: Sequence[AttemptId]) -> list[AttemptId]:
        return []

    def release_holds(self, attempt_ids: Sequence[AttemptId]) -> None:
        assert self.may_answer.wait(20.0)
        self.released += attempt_ids

    def share_room(self, router: str, num_blocks: int) -> HoldRoom:
        return HoldRoom()

    @property
    def listable_tiers(self) -> Sequence[ListableTier]:
        return ()

    def status(self) -> StoreStatus:
        assert self.may_answer.wait(20.0)
        return StoreStatus(directory=None, cold=[], block_bytes=4096)

    def check(self) -> list[str]:
        return []


class SlowRecords(Records):
    """Records of an empty directory, whose events come when the tests say so."""

    def __init__(self) -> None:
        super().__init__(Directory(1).state)
        self.place: EventCursor | None = None
        self.is_away = False
        self.does_wait = True
        self.num_looks = self.num_waits = 0
        self.look_s = 0.0

    def events(self, after: EventCursor) -> EventPage:
        self.num_looks += 1
        time.sleep(self.look_s)
        if self.is_away:
            raise StoreError("the directory does not answer")
        return EventPage(after, self.place or after, [])

    def wait_for_events(self, after: EventCursor, wait_s: float) -> bool:
        """Waits for the signal alone."""
        self.num_waits += 1
        news = threading.Event()
        with self.signal.subscribed(news.set):
            return news.wait(wait_s) if self.does_wait else False

    def tell(self, place: EventCursor) -> None:
        self.place = place
        self.signal.notify()


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.may_answer.set()


async def test_a_store_that_does_not_answer_is_an_error_in_bounded_time(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TIMEOUT_S", 0.01)
    store = AsyncStore(slow, SlowRecords())
    with pytest.raises(StoreError):
        await store.status()
    store.release_soon([ID])
    await store.close()
    assert slow.released == []


async def test_closing_waits_for_releases_under_way(slow: SlowStore) -> None:
    store = AsyncStore(slow, SlowRecords())
    store.release_soon([ID])
    slow.may_answer.set()
    await store.close()
    assert slow.released == [ID]


async def test_a_cancellation_that_comes_with_the_answer_is_obeyed(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that goes on in spite of it would be waited for without end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[StoreStatus] = loop.create_future()
    monkeypatch.setattr(loop, "run_in_executor", lambda *_: answer)
    asking = asyncio.create_task(AsyncStore(slow, SlowRecords()).status())
    await asyncio.sleep(0)
    answer.set_result(StoreStatus(directory=None, cold=[], block_bytes=4096))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_events_come_when_they_are_there(slow: SlowStore) -> None:
    records, place = SlowRecords(), EventCursor("epoch", 3)
    store = AsyncStore(slow, records)
    waiting = asyncio.create_task(store.events(EventCursor("epoch", 2)))
    await until(lambda: records.num_waits == 1)
    assert not waiting.done()
    assert records.num_looks == 1
    records.tell(place)
    assert (await waiting).cursor == place
    assert (records.num_looks, records.num_waits) == (2, 1)
    await store.close()


async def test_many_readers_wait_once(slow: SlowStore) -> None:
    records, place = SlowRecords(), EventCursor("epoch", 3)
    store = AsyncStore(slow, records)
    waiting = [asyncio.create_task(store.events(EventCursor("epoch", 2))) for _ in range(8)]
    await until(lambda: records.num_looks == 8)
    await until(lambda: records.num_waits == 1)
    records.tell(place)
    assert [page.cursor for page in await asyncio.gather(*waiting)] == [place] * 8
    assert records.num_waits == 1
    await store.close()


async def test_a_wait_for_events_is_bounded(slow: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EVENTS_WAIT_S", 0.5)
    records, place = SlowRecords(), EventCursor("epoch", 2)
    store = AsyncStore(slow, records)
    assert await store.events(place) == EventPage(place, place, [])
    assert records.num_looks <= 3, "no look but after a wait"
    await store.close()


async def test_a_directory_that_does_not_wait_is_looked_at_seldom(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "EVENTS_WAIT_S", 0.5)
    records, place = SlowRecords(), EventCursor("epoch", 2)
    records.does_wait = False
    store = AsyncStore(slow, records)
    assert await store.events(place) == EventPage(place, place, [])
    assert 2 < records.num_looks < 60
    await store.close()


async def test_a_slow_directory_makes_a_wait_for_events_no_longer(
    slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "EVENTS_WAIT_S", 0.5)
    records, place = SlowRecords(), EventCursor("epoch", 2)
    records.look_s = 0.25
    store = AsyncStore(slow, records)
    assert await store.events(place) == EventPage(place, place, [])
    assert records.num_looks <= 2
    await store.close()


async def test_events_of_a_directory_that_is_away_are_an_error(slow: SlowStore) -> None:
    records = SlowRecords()
    records.is_away = True
    store = AsyncStore(slow, records)
    with pytest.raises(StoreError, match="does not answer"):
        await store.events(EventCursor())
    await store.close()
