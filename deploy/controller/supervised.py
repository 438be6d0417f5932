"""Supervision of one actor: the router, a gateway, the service of a node, a worker.

    launch -> start -> serving -> probe, judge -> lost -> end
                ^                                          |
                +--- back off, under the same name <-------+   KeptActor: router, gateways, services of nodes

A worker is never restarted: `Pools` backs off by the same rule, and names a new worker. A KeptActor's answer to its
start is recorded, so that a new controller knows its address. Tasks outlive the calls that began them; `repeat` and
`persist` retry a step, and note failures as events.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.actors.liveness import PROBE_EVERY_S, FailureDetector, backoff_s
from deploy.deadlines import SERVICE_START_S
from deploy.plan.machine import Resources
from deploy.processes.atomic_file import AtomicFile
from router.workers.controller_port import ControllerEvent
from wire.errors import BatonError
from wire.pools import Addresses
from wire.typed_reader import from_json, to_json

PAUSE_S = 1.0
MAX_EVENTS = 50

log = logging.getLogger(__name__)
NO_RESOURCES = Resources()


class EventLog:
    """The last 50 events. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)

    def note(self, text: str, error: Exception | None = None) -> None:
        """Notes an event. error: its traceback goes into the log."""
        log.info("%s", text, exc_info=error)
        self._events.append((self._clock(), text))

    def report(self) -> tuple[ControllerEvent, ...]:
        """Returns the events, newest last."""
        now = self._clock()
        return tuple(ControllerEvent(round(now - at, 3), text) for at, text in self._events)


class Tasks:
    """The running tasks that were begun here. A failure is logged, and `wait` does not raise it."""

    def __init__(self) -> None:
        self._unended: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._unended.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Cancels all tasks, without waiting for their end."""
        for task in self._unended:
            task.cancel()

    async def wait(self) -> None:
        """Waits until all tasks that run now have ended, in any way."""
        if self._unended:
            await asyncio.wait(self._unended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._unended.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())


async def repeat(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """Runs a step again and again, until cancelled; notes failures as `persist` does, and continues a second later."""
    while True:
        await persist(what, step, events)


async def persist(what: str, step: Callable[[], Awaitable[None]], events: EventLog) -> None:
    """Runs a step until it succeeds, with a second after each failure.

    Notes a failure as an event, unless it repeats the last reason.
    """
    noted = ""
    while True:
        try:
            return await step()
        except Exception as error:
            log.exception("%s failed", what)
            if (reason := reason_of(error)) != noted:
                events.note(f"{what} failed, and goes on: {reason}")
            noted = reason
            await asyncio.sleep(PAUSE_S)


def reason_of(error: Exception) -> str:
    """Returns the words of an error for an event."""
    return error.message if isinstance(error, BatonError) else repr(error)


@dataclass
class Supervision:
    """The means of supervision: the host of the actors, the folder of their records, the events, a monotonic clock."""

    host: ActorHost
    run_dir: Path
    events: EventLog
    clock: Callable[[], float] = time.monotonic


class SupervisedActor:
    """An actor under a name, on one node. `target` is MODULE:CLASS."""

    def __init__(self, name: str, target: str, means: Supervision, node_id: str = "") -> None:
        """node_id: the actor's node; "" lets Ray choose."""
        self.name = name
        self._target = target
        self._means = means
        self._host = means.host
        self._node_id = node_id
        self._detector = FailureDetector()

    def launch(self, resources: Resources = NO_RESOURCES, not_on: Sequence[str] = ()) -> None:
        """Begins the actor's process if there is none."""
        self._host.launch(self.name, self._target, resources, self._node_id or None, not_on)

    async def node_id(self, timeout_s: float) -> str:
        """Returns the id of the actor's node, once its process runs. Raises the errors of `ActorHost.where`."""
        self._node_id = self._node_id or await self._host.where(self.name, timeout_s)
        return self._node_id

    async def start(self, config_json: str, timeout_s: float) -> Addresses:
        """Starts the actor. Raises the errors of `ActorHost.start`."""
        self._detector = FailureDetector()
        return from_json(Addresses, await self._host.start(self.name, config_json, timeout_s), self.name)

    async def judge(self) -> str | None:
        """Probes the actor; returns the reason to give it up, or None."""
        return self._detector.judge(await self._host.probe(self.name), self._means.clock())

    async def end(self) -> None:
        """Ends the actor; returns once the process is gone."""
        await self._host.end(self.name)


class KeptActor(SupervisedActor):
    """An actor that is restarted under the same name when it is lost, after longer and longer pauses.

    config: makes the settings of each start. answer: the answer to the last start, also under an earlier controller;
    else None.
    """

    def __init__(
        self,
        name: str,
        target: str,
        config: Callable[[], str],
        node_id: str,
        means: Supervision,
    ) -> None:
        super().__init__(name, target, means, node_id)
        self._config = config
        self._record = AtomicFile(means.run_dir / f"{name}.json")
        self.answer = self._record.recall(lambda text: from_json(Addresses, text, name))

    def prepare(self) -> None:
        """Adopts the actor of an earlier controller; launches it if there is none."""
        if not self._host.adopt(self.name):
            self.launch()

    async def serve(self) -> None:
        """Starts the actor, and records its answer. Raises the errors of `ActorHost.start`."""
        self.launch()
        self.answer = await self.start(self._config(), SERVICE_START_S)
        self._record.try_write(to_json(self.answer).encode())

    async def take_over(self) -> None:
        """Takes over a running actor; returns once it serves, or its replacement does."""
        if failure := await self._attempt():
            await self._replace(failure)

    async def keep(self, on_restart: Callable[[], None]) -> None:
        """Restarts the actor whenever it is lost, until cancelled; calls `on_restart` when it serves again."""
        await repeat(f"the care for the {self.name}", lambda: self._step(on_restart), self._means.events)

    async def _step(self, on_restart: Callable[[], None]) -> None:
        await asyncio.sleep(PROBE_EVERY_S)
        if (reason := await self.judge()) is not None:
            self._means.events.note(f"the {self.name} {reason}")
            await self._replace()
            on_restart()

    async def _replace(self, failure: str = "") -> None:
        """Ends the actor, and starts it until it serves. failure: reason that is an event already."""
        await self.end()
        num_failures = 0
        while failure := await self._attempt(failure):
            num_failures += 1
            await asyncio.sleep(backoff_s(num_failures))
        self._means.events.note(f"the {self.name} is back")

    async def _attempt(self, noted: str = "") -> str:
        """Returns "" if the actor serves, else the reason, which is an event unless `noted` is the same.

        After a failure it ends the process, which may still answer probes.
        """
        try:
            await self.serve()
        except Exception as error:
            failure = f"the {self.name} did not start again: {reason_of(error)}"
            if failure != noted:
                self._means.events.note(failure, error)
            await self.end()
            return failure
        return ""
