"""An actor of which there is one: the router, the service of each node. When it dies, another takes its place."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.actors.liveness import PROBE_EVERY_S, FailureDetector
from deploy.controller.event_log import EventLog
from deploy.controller.tasks import reason_of, repeat
from deploy.plan.resources import Resources
from deploy.processes.atomic_file import AtomicFile

START_TIMEOUT_S = 300.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0

log = logging.getLogger(__name__)


@dataclass
class Singleton:
    """An actor under a fixed name, on one node; takes over one that an earlier controller has left.

    target: MODULE:CLASS. config_json: what the next start is given. answer: that of the last start, even to an earlier
    controller; None before.
    """

    name: str
    target: str
    config_json: str
    node_id: str
    host: ActorHost
    run_dir: Path
    events: EventLog
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._record = AtomicFile(self.run_dir / f"{self.name}.json")
        self.answer = self._record.recall(_answer)
        self._detector = FailureDetector()
        if not self.host.adopt(self.name):
            self.host.launch(self.name, self.target, Resources(), self.node_id)

    async def start(self) -> str:
        """Returns the object's answer. Raises as `ActorHost.start` does."""
        self.host.launch(self.name, self.target, Resources(), self.node_id)
        self.answer = await self.host.start(self.name, self.config_json, START_TIMEOUT_S)
        self._record.try_write(self.answer.encode())
        self._detector = FailureDetector()
        return self.answer

    async def take_over(self) -> str:
        """Returns the answer of the actor that was left behind, or of another in its place if that does not start."""
        return await self._attempt() or await self._replace()

    async def watch(self, on_restart: Callable[[], None]) -> None:
        """Replaces the actor whenever it dies, until cancelled; calls `on_restart` when the service is there again."""
        await repeat(f"the care for the {self.name}", lambda: self._step(on_restart), self.events)

    async def _step(self, on_restart: Callable[[], None]) -> None:
        await asyncio.sleep(PROBE_EVERY_S)
        reason = self._detector.judge(await self.host.probe(self.name), self.clock())
        if reason is not None:
            self.events.note(f"the {self.name} {reason}")
            await self._replace()
            on_restart()

    async def _replace(self) -> str:
        """Tries until it succeeds, after longer and longer pauses; returns the object's answer."""
        await self.host.end(self.name)
        pause_s = FIRST_PAUSE_S
        while not (answer := await self._attempt()):
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        self.events.note(f"the {self.name} is back")
        return answer

    async def _attempt(self) -> str:
        """Returns the answer, or nothing after a failure, which it notes."""
        try:
            return await self.start()
        except Exception as error:
            log.info("the %s did not start again", self.name, exc_info=error)
            self.events.note(f"the {self.name} did not start again: {reason_of(error)}")
            await self.host.end(self.name)  # a process whose object did not start would answer a probe all the same
            return ""


def _answer(text: str) -> str:
    """Returns a recorded answer. Raises ValueError for a text that is no object of texts."""
    told = json.loads(text)
    if not (isinstance(told, dict) and all(isinstance(value, str) for value in told.values())):
        raise ValueError("no answer of an actor")
    return text
