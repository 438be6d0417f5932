"""The list of workers that the router works from."""

import asyncio
import logging
from typing import Protocol

from deploy.event_log import EventLog
from deploy.pools import Pools
from wire.errors import BatonError
from wire.ids import WorkerId
from wire.pools import Worker, WorkerState

log = logging.getLogger(__name__)


class RouterPort(Protocol):
    """The router, as far as it wants to know of workers."""

    async def set_members(self, members: list[Worker]) -> dict[WorkerId, str]:
        """These are the workers; those not taken in, with the reason. Raises BatonError if the router is away."""
        ...


class Roll:
    """Tells the router who serves. Whoever changes the pools says so by `has_changed`."""

    def __init__(self, pools: Pools, router: RouterPort, events: EventLog) -> None:
        self._pools = pools
        self._router = router
        self._events = events
        self._refused: dict[WorkerId, str] = {}
        self._announcing = asyncio.Lock()
        self.is_announced = False

    def has_changed(self) -> None:
        """What the router was told is no longer so, or no longer known to it."""
        self.is_announced = False

    async def announce(self) -> None:
        """Tells the router who serves and who drains. `is_announced` stays False if it does not hear or take it."""
        async with self._announcing:
            self.is_announced = True  # a change during the call makes it False again
            members = self._members()
            try:
                refused = await self._router.set_members(members)
            except BatonError as error:
                log.info("the router is not told of %d workers: %s", len(members), error.message)
                self.is_announced = False
                return
            self.is_announced = self.is_announced and not refused
            for worker_id, reason in refused.items() - self._refused.items():
                self._events.note(f"the router does not take worker {worker_id}: {reason}")
            self._refused = refused

    def _members(self) -> list[Worker]:
        return [
            Worker(worker.worker_id, worker.role, worker.address, WorkerState(worker.stage.value))
            for worker in self._pools
            if worker.address is not None
        ]
