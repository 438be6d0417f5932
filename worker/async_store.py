"""A worker's control calls to its node's store, off the event loop and off the engine's thread."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kv_store.block_store import BlockStore, StoreStatus
from wire.errors import StoreError
from wire.ids import RequestId

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
T = TypeVar("T")


class AsyncStore:
    """One call after another, on a thread of its own. Each raises StoreError if it fails or takes too long."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, "store-control")
        self._releases: set[asyncio.Task[None]] = set()

    async def renew(self, request_ids: Sequence[RequestId]) -> None:
        """Holds of these requests live on."""
        await self._call(lambda: self._store.renew(request_ids))

    async def release(self, request_ids: Sequence[RequestId]) -> None:
        """Holds of these requests end."""
        await self._call(lambda: self._store.release_holds(request_ids))

    async def status(self) -> StoreStatus:
        return await self._call(self._store.status)

    async def check(self) -> list[str]:
        """What is wrong with the books of the host tier."""
        return await self._call(self._store.check)

    def release_soon(self, request_ids: Sequence[RequestId]) -> None:
        """Ends the holds of requests; a failure is logged, and the holds then end when nobody renews them."""
        task = asyncio.create_task(self._release_or_log(request_ids))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Waits for what is under way, within the bound of each call."""
        await asyncio.gather(*self._releases)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _release_or_log(self, request_ids: Sequence[RequestId]) -> None:
        try:
            await self.release(request_ids)
        except StoreError as error:
            log.warning("the holds of %d requests stay until they run out: %s", len(request_ids), error)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):  # wait_for of Python 3.11 may swallow a cancellation
                return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError as error:
            raise StoreError("the node's store does not answer") from error
