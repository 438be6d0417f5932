"""The cluster's status as it was a moment ago, for whoever must not wait for workers; and what has changed in it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from router.observe.cluster_status import StatusReader
from router.workers.controller_port import ClusterEvent
from wire.convert import status_of
from wire.pb import cluster_pb2
from wire.tier import Tier

READ_EVERY_S = 2.0
MAX_EVENTS = 20
LONG_SILENCE_S = 10.0
"""From here on, that a worker's engine has not finished a step is worth an event."""


class StatusWatch:
    """Reads the status every few seconds between `start` and `stop`. `clock` is monotonic, in seconds."""

    def __init__(self, statuses: StatusReader, clock: Callable[[], float], read_every_s: float = READ_EVERY_S) -> None:
        self.last = cluster_pb2.ClusterStatus()
        self._statuses = statuses
        self._clock = clock
        self._read_every_s = read_every_s
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def events(self) -> list[ClusterEvent]:
        """The last changes, newest last."""
        now_s = self._clock()
        return [ClusterEvent(now_s - at_s, text) for at_s, text in self._events]

    async def _run(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._read_every_s)

    async def read(self) -> None:
        """Reads it now."""
        status = await self._statuses.read(cluster_pb2.GetStatusRequest())
        self._events.extend((self._clock(), text) for text in changes(self.last, status))
        self.last = status


def changes(before: cluster_pb2.ClusterStatus, after: cluster_pb2.ClusterStatus) -> Iterator[str]:
    """What an operator wants to know of two statuses that follow one another."""
    for old, new in ((status_of(tier, before.tiers), status_of(tier, after.tiers)) for tier in Tier):
        if (old.state, new.state) == ("up", "broken"):
            yield f"tier {old.tier} does not answer: workers go on without it"
        if (old.state, new.state) == ("broken", "up"):
            yield f"tier {old.tier} answers again"
        if old.epoch and new.epoch and old.epoch != new.epoch:
            yield f"the directory of tier {old.tier} is a new one: every block in it is a miss"
    yield from _changes_of_silence(_silences(before), _silences(after))


def _changes_of_silence(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    for worker_id, silent_s in after.items():
        was_long = before.get(worker_id, 0.0) >= LONG_SILENCE_S
        if silent_s >= LONG_SILENCE_S and not was_long:
            yield f"{worker_id} is silent for {silent_s:.0f} s: its engine is in a long step, or hangs"
        if was_long and silent_s < LONG_SILENCE_S:
            yield f"{worker_id} is not silent any more: its engine has finished a step"


def _silences(status: cluster_pb2.ClusterStatus) -> dict[str, float]:
    """Of the workers that answered."""
    return {worker.worker_id: worker.engine_silent_s for worker in status.workers if worker.HasField("blocks")}
