"""Carries out what `HoldBudget` decides: lets prefills start in turn, renews holds, releases them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from router.workers.hold_budget import HoldBudget
from router.workers.members import Members
from router.workers.worker_client import WorkerClient
from wire.errors import BatonError
from wire.ids import BlockKey, RequestId
from wire.pools import WorkerState

log = logging.getLogger(__name__)

RENEW_EVERY_S = 3.0
CALL_TIMEOUT_S = 2.0


class HoldKeeper:
    """Between `start` and `stop`, speaks to any one worker: the workers of a node share its arena and their holds."""

    def __init__(self, members: Members, renew_every_s: float = RENEW_EVERY_S) -> None:
        self._members = members
        self._renew_every_s = renew_every_s
        self._budget = HoldBudget()
        self._turns: dict[RequestId, asyncio.Future[None]] = {}
        self._released: asyncio.Queue[RequestId] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena that are spoken for; 0 at rest."""
        return self._budget.num_blocks

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._renew_for_ever()), asyncio.create_task(self._release_for_ever())]

    async def stop(self) -> None:
        """What is not released yet runs out by itself on the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def enter(self, request_id: RequestId, keys: Sequence[BlockKey]) -> None:
        """Returns when a prefill that will hold the blocks `keys` may start; its caller bounds the wait."""
        if self._budget.ask(request_id, keys):
            return
        self._turns[request_id] = asyncio.get_running_loop().create_future()
        await self._turns[request_id]

    def keep(self, request_id: RequestId) -> None:
        """Prefill has answered: its hold is to be renewed from now on."""
        self._budget.keep(request_id)

    def release(self, request_id: RequestId) -> None:
        """Ends hold and waiting. May be called for any request, any number of times."""
        self._turns.pop(request_id, None)
        if self._budget.is_granted(request_id):
            self._released.put_nowait(request_id)
        self._grant(self._budget.release(request_id))

    def resize(self) -> None:
        """The members have changed, and with them maybe what is known of the arena."""
        self._grant(self._budget.resize(self._members.num_arena_blocks))

    def _grant(self, granted: Sequence[RequestId]) -> None:
        for request_id in granted:
            turn = self._turns.pop(request_id)
            if not turn.done():
                turn.set_result(None)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            await self._renew(self._budget.kept)

    async def _release_for_ever(self) -> None:
        while True:
            released = [await self._released.get()]
            while not self._released.empty():
                released.append(self._released.get_nowait())
            await self._release(released)

    async def _renew(self, request_ids: Sequence[RequestId]) -> None:
        if request_ids:
            await self._tell_one(lambda client: client.renew(request_ids, CALL_TIMEOUT_S))

    async def _release(self, request_ids: Sequence[RequestId]) -> None:
        await self._tell_one(lambda client: client.release(request_ids, CALL_TIMEOUT_S))

    async def _tell_one(self, call: Callable[[WorkerClient], Awaitable[None]]) -> None:
        """Calls workers one after another until one has answered."""
        for member in self._members:
            if member.state is WorkerState.LOST:
                continue
            try:
                await call(member.client)
                return
            except BatonError as error:
                log.warning("worker %s did not take word of holds: %s", member.worker_id, error.message)
        log.warning("no worker took word of holds; they will run out")
