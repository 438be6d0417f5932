"""Where workers run. Twins: `RayWorkerHost` and `LocalWorkerHost`."""

import asyncio
from enum import Enum
from typing import Protocol

from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import Role


class Life(Enum):
    """What can be known of a process from outside."""

    ANSWERING = "answering"
    SILENT = "silent"
    DEAD = "dead"


class WorkerHost(Protocol):
    """Every call is bounded in time."""

    async def start(self, worker_id: WorkerId, role: Role) -> str:
        """The address where the worker serves, when it does.

        Raises BatonError if it comes to nothing, and leaves what there is of it to `end`.
        """
        ...

    async def adopt(self, worker_id: WorkerId) -> bool:
        """Whether an earlier host has left this worker; it is this one's now. `start` tells where it serves."""
        ...

    async def look(self, worker_id: WorkerId) -> Life: ...

    async def drain(self, worker_id: WorkerId, grace_s: int) -> int:
        """Returns when the worker has nothing left to do: how many requests it gave up. Unavailable if it died."""
        ...

    async def end(self, worker_id: WorkerId) -> None:
        """Stops a worker, by force if need be; returns when its process is gone. Does nothing if there is none."""
        ...


class LocalWorkerHost:
    """Workers that are entries in a table. `failures` are raised by the next starts; busy ones drain on `finish`."""

    def __init__(self, lives: dict[WorkerId, Life] | None = None) -> None:
        self.lives = lives or {}
        self.failures: list[Exception] = []
        self.drained: list[WorkerId] = []
        self._busy: dict[WorkerId, asyncio.Event] = {}

    def keep_busy(self, worker_id: WorkerId) -> None:
        self._busy[worker_id] = asyncio.Event()

    def finish(self, worker_id: WorkerId) -> None:
        self._busy[worker_id].set()

    async def start(self, worker_id: WorkerId, role: Role) -> str:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.lives[worker_id] = Life.ANSWERING
        return f"local:{worker_id}"

    async def adopt(self, worker_id: WorkerId) -> bool:
        return worker_id in self.lives

    async def look(self, worker_id: WorkerId) -> Life:
        return self.lives.get(worker_id, Life.DEAD)

    async def drain(self, worker_id: WorkerId, grace_s: int) -> int:
        if worker_id in self._busy:
            await self._busy[worker_id].wait()
        if self.lives.get(worker_id) is not Life.ANSWERING:
            raise Unavailable("the worker died", worker_id=worker_id)
        self.drained.append(worker_id)
        return 0

    async def end(self, worker_id: WorkerId) -> None:
        self.lives.pop(worker_id, None)
