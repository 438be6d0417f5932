"""The list of workers that the router works from."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Protocol

from deploy.event_log import EventLog
from deploy.pools import Pools, Stage
from deploy.worker_host import Place
from wire.errors import BatonError
from wire.ids import WorkerId
from wire.pools import ListedWorker

log = logging.getLogger(__name__)


class RouterPort(Protocol):
    """The router, as far as it wants to know of workers."""

    async def set_members(self, members: list[ListedWorker]) -> dict[WorkerId, str]:
        """These are the workers; those not taken in, with the reason. Raises BatonError if the router is away."""
        ...


class Roll:
    """Workers that serve, and whether the router knows."""

    def __init__(self, pools: Pools, router: RouterPort, events: EventLog) -> None:
        self._pools = pools
        self._router = router
        self._events = events
        self._places: dict[WorkerId, Place] = {}
        self._refused: dict[WorkerId, str] = {}
        self._announcing = asyncio.Lock()
        self.is_known = False

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(tuple(self._places))

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._places

    def enter(self, worker_id: WorkerId, place: Place) -> None:
        self._places[worker_id] = place
        self.is_known = False

    def strike(self, worker_id: WorkerId) -> None:
        self._places.pop(worker_id, None)
        self.is_known = False

    def forget(self) -> None:
        """The router has lost what it was told."""
        self.is_known = False

    async def announce(self) -> None:
        """Tells the router who serves and who drains. `is_known` stays False if it does not hear or take it."""
        async with self._announcing:
            self.is_known = True  # a change during the call makes it False again
            members = self._members()
            try:
                refused = await self._router.set_members(members)
            except BatonError as error:
                log.info("the router is not told of %d workers: %s", len(members), error.message)
                self.is_known = False
                return
            self.is_known = self.is_known and not refused
            for worker_id, reason in refused.items() - self._refused.items():
                self._events.note(f"the router does not take worker {worker_id}: {reason}")
            self._refused = refused

    def _members(self) -> list[ListedWorker]:
        return [
            ListedWorker(worker.worker_id, worker.role, place.address, worker.stage is Stage.DRAINING)
            for worker in self._pools
            if (place := self._places.get(worker.worker_id)) is not None
        ]
