"""An actor that there is one of: the node's service, the router. When it dies, another takes its place."""

import asyncio
import logging
import time
from collections.abc import Callable

from deploy.event_log import EventLog
from deploy.ray_actor import RayActor, Resources
from deploy.silence import Silence
from deploy.supervision import repeat
from deploy.worker_host import Life
from wire.errors import BatonError

START_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0
MAX_SILENCE_S = 30.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0

log = logging.getLogger(__name__)


class Service:
    """`config_json` is what the next start is given. One that an earlier controller has left is taken over."""

    def __init__(
        self,
        name: str,
        module: str,
        class_name: str,
        config_json: str,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config_json = config_json
        self._name = name
        self._class = (module, class_name)
        self._events = events
        self._clock = clock
        self._silence = Silence()
        self.actor = RayActor.find(name) or self._make()

    async def start(self) -> str:
        """What the object answers. Raises as `RayActor.start` does."""
        answer = await self.actor.start(self.config_json, START_TIMEOUT_S)
        self._silence = Silence()
        return answer

    async def resume(self) -> str:
        """As `start`, for one that may have died or have failed to start: then another takes its place."""
        while True:
            try:
                return await self.start()
            except Exception as error:
                self._note_failure(error)
            await self.actor.end()
            await asyncio.sleep(FIRST_PAUSE_S)
            self.actor = self._make()

    async def watch(self, on_restart: Callable[[], None]) -> None:
        """Until cancelled; `on_restart` is called when the service is there again."""
        await repeat(f"the care for the {self._name}", lambda: self._step(on_restart), self._events)

    async def _step(self, on_restart: Callable[[], None]) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        trouble = await self._look()
        if trouble is not None:
            self._events.note(f"the {self._name} {trouble}")
            await self._replace(on_restart)

    async def _look(self) -> str | None:
        """What is wrong with it."""
        life = await self.actor.look()
        if life is Life.DEAD:
            return "was lost"
        if life is Life.ANSWERING:
            self._silence = Silence()
            return None
        silent_s = self._silence.goes_on(self._clock())
        return f"was silent for {silent_s:.0f} s, and is ended" if silent_s > MAX_SILENCE_S else None

    async def _replace(self, on_restart: Callable[[], None]) -> None:
        """Tries until it succeeds, after longer and longer pauses."""
        await self.actor.end()
        pause_s = FIRST_PAUSE_S
        while not await self._restart():
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        self._events.note(f"the {self._name} is back")
        on_restart()

    async def _restart(self) -> bool:
        """A process whose object did not start would answer a look all the same: it ends."""
        try:
            self.actor = self._make()
            await self.start()
        except Exception as error:
            self._note_failure(error)
            await self.actor.end()
            return False
        return True

    def _note_failure(self, error: Exception) -> None:
        log.info("the %s did not start again", self._name, exc_info=error)
        reason = error.message if isinstance(error, BatonError) else repr(error)
        self._events.note(f"the {self._name} did not start again: {reason}")

    def _make(self) -> RayActor:
        return RayActor.create(self._name, *self._class, Resources())
