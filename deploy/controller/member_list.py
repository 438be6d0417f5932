"""The list of workers that the router works from."""

import asyncio
import json
import logging
from dataclasses import asdict
from operator import attrgetter

from deploy.actors.actor_host import ActorHost
from deploy.controller.event_log import EventLog
from deploy.controller.pools import Pools
from wire.errors import BatonError
from wire.ids import WorkerId
from wire.pools import Worker

TELL_TIMEOUT_S = 20.0

log = logging.getLogger(__name__)


class MemberList:
    """The workers that serve, as the router is to know them. `has_changed` follows every change of the pools."""

    def __init__(self, pools: Pools, host: ActorHost, events: EventLog) -> None:
        self._pools = pools
        self._host = host
        self._events = events
        self._refused: dict[WorkerId, str] = {}
        self._announcing = asyncio.Lock()
        self.is_announced = False

    def has_changed(self) -> None:
        """Notes that the router does not know the list yet, or no longer."""
        self.is_announced = False

    async def announce(self) -> None:
        """Tells the router which workers serve and drain. `is_announced` stays False if it does not hear or take it."""
        async with self._announcing:
            self.is_announced = True  # a change during the call makes it False again
            members = [worker for worker in self._pools if worker.address]
            try:
                refused = await self._tell(members)
            except BatonError as error:
                log.info("the router is not told of %d workers: %s", len(members), error.message)
                self.is_announced = False
                return
            self.is_announced = self.is_announced and not refused
            for worker_id, reason in refused.items() - self._refused.items():
                self._events.note(f"the router does not take worker {worker_id}: {reason}")
            self._refused = refused

    async def _tell(self, members: list[Worker]) -> dict[WorkerId, str]:
        """Replaces the router's list; returns the workers that it refuses, with the reason. Raises BatonError."""
        listed = json.dumps([asdict(worker) for worker in members], default=attrgetter("value"))
        refused: dict[WorkerId, str] = json.loads(
            await self._host.call("router", "set_members", listed, timeout_s=TELL_TIMEOUT_S)
        )
        return refused
