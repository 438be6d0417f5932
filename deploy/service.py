"""An actor that there is one of: the node's service, the router. When it dies, another takes its place."""

import asyncio
import logging
from collections.abc import Callable

from deploy.event_log import EventLog
from deploy.ray_actor import RayActor, Resources
from deploy.worker_host import Life
from wire.errors import BatonError

START_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Service:
    """`config_json` is what the next start is given."""

    def __init__(self, name: str, module: str, class_name: str, config_json: str, events: EventLog) -> None:
        self.config_json = config_json
        self._name = name
        self._class = (module, class_name)
        self._events = events
        self.actor = self._make()

    async def start(self) -> str:
        """What the object answers. Raises as `RayActor.start` does."""
        return await self.actor.start(self.config_json, START_TIMEOUT_S)

    async def watch(self, on_restart: Callable[[], None]) -> None:
        """Until cancelled; `on_restart` is called when the service is there again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if await self.actor.look() is Life.DEAD:
                self._events.note(f"the {self._name} was lost")
                await self._restart(on_restart)

    async def _restart(self, on_restart: Callable[[], None]) -> None:
        await self.actor.end()
        self.actor = self._make()
        try:
            await self.start()
        except BatonError as error:
            self._events.note(f"the {self._name} did not start again: {error.message}")
            return
        self._events.note(f"the {self._name} is back")
        on_restart()

    def _make(self) -> RayActor:
        return RayActor(self._name, *self._class, Resources())
