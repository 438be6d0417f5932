"""An actor that there is one of: the node's service, the router. When it dies, another takes its place."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from deploy.actors.liveness import LOOK_EVERY_S, Watch
from deploy.actors.ray_actor import RayActor, Resources
from deploy.controller.event_log import EventLog
from deploy.controller.supervision import repeat
from deploy.processes.record import Record
from wire.errors import BatonError

START_TIMEOUT_S = 300.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0

log = logging.getLogger(__name__)


class SoleActor:
    """`config_json` is what the next start is given. One that an earlier controller has left is taken over.

    answer: what the last object that started has answered, though it be to an earlier controller; None before.
    """

    def __init__(
        self,
        name: str,
        module: str,
        class_name: str,
        config_json: str,
        run_dir: Path,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config_json = config_json
        self._name = name
        self._class = (module, class_name)
        self._run_dir = run_dir
        self._record = Record(run_dir / f"{name}.json")
        self.answer = self._record.read()
        self._events = events
        self._clock = clock
        self._watch = Watch()
        self.actor = RayActor.find(name, run_dir) or self._make()

    async def start(self) -> str:
        """What the object answers. Raises as `RayActor.start` does."""
        self.answer = await self.actor.start(self.config_json, START_TIMEOUT_S)
        self._record.write(self.answer)
        self._watch = Watch()
        return self.answer

    async def take_over(self) -> str:
        """What the object of one that was left behind answers, or that of another in its place if it does not start."""
        return await self._attempt(self.start) or await self._replace()

    async def watch(self, on_restart: Callable[[], None]) -> None:
        """Until cancelled; `on_restart` is called when the service is there again."""
        await repeat(f"the care for the {self._name}", lambda: self._step(on_restart), self._events)

    async def _step(self, on_restart: Callable[[], None]) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        trouble = self._watch.judge(await self.actor.look(), self._clock())
        if trouble is not None:
            self._events.note(f"the {self._name} {trouble}")
            await self._replace()
            on_restart()

    async def _replace(self) -> str:
        """Tries until it succeeds, after longer and longer pauses: what the object answers."""
        await self.actor.end()
        pause_s = FIRST_PAUSE_S
        while not (answer := await self._attempt(self._start_another)):
            await self.actor.end()  # a process whose object did not start would answer a look all the same
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        self._events.note(f"the {self._name} is back")
        return answer

    async def _start_another(self) -> str:
        self.actor = self._make()
        return await self.start()

    async def _attempt(self, start: Callable[[], Awaitable[str]]) -> str:
        """What it answers; nothing if it fails."""
        try:
            return await start()
        except Exception as error:
            log.info("the %s did not start again", self._name, exc_info=error)
            reason = error.message if isinstance(error, BatonError) else repr(error)
            self._events.note(f"the {self._name} did not start again: {reason}")
            return ""

    def _make(self) -> RayActor:
        return RayActor.create(self._name, *self._class, Resources(), self._run_dir)
