"""A worker's control calls to its node's store, off the event loop and off the engine's thread."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import TypeVar

from kv_store.block_store import StoreControl, StoreStatus
from kv_store.node.directory_port import RecordsPort
from kv_store.node.event_log import EventCursor, EventPage
from kv_store.tiers.contents import ListableTier, Selection, clear, find
from wire.errors import StoreError
from wire.ids import AttemptId
from wire.pb import worker_pb2
from wire.tier import StoredBlock, Tier

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
EVENTS_WAIT_S = 1.0
PAGE_PAUSE_S = 0.004
"""Pause before a look for events, so that many come in one page."""
LOOK_PAUSE_S = 0.016
"""Pause before another look if the directory did not wait."""
T = TypeVar("T")


class Tally:
    """A selection's blocks, summed by tier and namespace; and problems of tiers."""

    def __init__(self, selection: Selection) -> None:
        self.holdings = worker_pb2.Holdings()
        self._place_of = {key: place for place, key in enumerate(selection.keys)}
        self._by_namespace: dict[tuple[Tier, bytes], worker_pb2.Holding] = {}

    def add(self, tier: Tier, blocks: Sequence[StoredBlock]) -> None:
        for one in blocks:
            of = tier, one.namespace
            if of not in self._by_namespace:
                self._by_namespace[of] = self.holdings.holdings.add(tier=tier, namespace=one.namespace, newest_s=inf)
            held = self._by_namespace[of]
            held.blocks += 1
            held.bytes += one.num_bytes
            held.newest_s = min(held.newest_s, one.idle_s)
            held.oldest_s = max(held.oldest_s, one.idle_s)
            held.places.extend(self._place_of[key] for key in [one.key] if key in self._place_of)


class AsyncStore:
    """A store behind a thread that makes one call after another. Raises StoreError for a failure or a timeout.

    records: the host tier's directory; a second thread waits there for events, for all callers at once.
    """

    def __init__(self, control: StoreControl, records: RecordsPort) -> None:
        self._control = control
        self._records = records
        self._executor = ThreadPoolExecutor(1, "store-control")
        self._event_executor = ThreadPoolExecutor(1, "store-events")
        self._wait: asyncio.Future[bool] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def status(self) -> StoreStatus:
        return await self._call(self._control.status)

    async def check(self) -> list[str]:
        """Lists violated invariants of the host tier."""
        return await self._call(self._control.check)

    async def events(self, after: EventCursor) -> EventPage:
        """Waits for events of the host tier's blocks after a place; lists none after EVENTS_WAIT_S."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + EVENTS_WAIT_S
        await asyncio.sleep(PAGE_PAUSE_S)
        page = await self._call(lambda: self._records.events(after))
        while page.cursor == after and (left_s := until_s - now_s()) > 0:
            if not await self._wait_for_events(after, left_s):
                await asyncio.sleep(min(LOOK_PAUSE_S, max(0.0, until_s - now_s())))
            page = await self._call(lambda: self._records.events(after))
        return page

    async def count(self, selection: Selection) -> worker_pb2.Holdings:
        """Counts the selected blocks of every tier below the workers' pages."""
        return await self._tally(selection, find)

    async def clear(self, selection: Selection) -> worker_pb2.Holdings:
        """Clears the selected blocks from these tiers, nearest first, and counts them."""
        return await self._tally(selection, clear)

    async def _tally(
        self, selection: Selection, step: Callable[[ListableTier, Selection], Iterator[Sequence[StoredBlock]]]
    ) -> worker_pb2.Holdings:
        tally = Tally(selection)
        for tier in self._control.listable_tiers:
            pages = step(tier, selection)
            try:
                while (blocks := await self._call(partial(next, pages, None))) is not None:
                    tally.add(tier.tier, blocks)
            except StoreError as error:
                tally.holdings.problems.append(f"{tier.tier}: {error.message}")
        return tally.holdings

    def renew_soon(self, names: Sequence[AttemptId], on_ended: Callable[[list[AttemptId]], None]) -> None:
        """Renews the holds of these attempts, in the background, and passes on the attempts without a hold.

        Logs a failure: a later renewal may succeed.
        """
        self._begin(lambda: self._control.renew(names), on_ended, "renewed")

    async def share_room(self, asked: worker_pb2.ShareRoom) -> worker_pb2.HoldRoom:
        """Tells the directory what a router's holds take; returns what other routers' take."""
        room = await self._call(lambda: self._control.share_room(asked.router, asked.blocks))
        return worker_pb2.HoldRoom(blocks_of_others=room.num_blocks_of_others, routers=room.num_routers)

    def release_soon(self, names: Sequence[AttemptId]) -> None:
        """Ends the holds of these attempts, in the background. Logs a failure: the holds then expire."""
        self._begin(lambda: self._control.release_holds(names), lambda _: None, "released")

    async def close(self) -> None:
        """Waits for calls under way, within the bound of each call."""
        await asyncio.gather(*self._tasks)
        for executor in (self._executor, self._event_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self, work: Callable[[], T], then: Callable[[T], None], what: str) -> None:
        task = asyncio.create_task(self._do_or_log(work, then, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do_or_log(self, work: Callable[[], T], then: Callable[[T], None], what: str) -> None:
        try:
            then(await self._call(work))
        except StoreError as error:
            log.warning("holds are not %s: %s", what, error)

    async def _wait_for_events(self, after: EventCursor, wait_s: float) -> bool:
        """Joins the running wait, or begins a wait, which ends at once for an older place. False without events."""
        if self._wait is None or self._wait.done():
            loop = asyncio.get_running_loop()
            self._wait = loop.run_in_executor(
                self._event_executor, lambda: self._records.wait_for_events(after, wait_s)
            )
            self._wait.add_done_callback(lambda wait: wait.cancelled() or wait.exception())
        wait = self._wait
        await asyncio.wait([wait], timeout=wait_s)
        return wait.done() and wait.result()

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):  # wait_for of Python 3.11 may swallow a cancellation
                return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError as error:
            raise StoreError("the node's store does not answer") from error
