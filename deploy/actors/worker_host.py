"""The seam between the fleet and the processes of workers, and its in-memory twin. `RayWorkerHost` is the real one."""

import asyncio
from typing import Protocol

from deploy.actors.liveness import Liveness
from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import Worker


class WorkerHost(Protocol):
    """The processes of the workers. Every call is bounded in time."""

    async def start(self, worker: Worker) -> str:
        """Returns the worker's address when it serves there.

        Raises BatonError if it comes to nothing, and leaves what there is of it to `end`.
        """
        ...

    async def adopt(self, worker_id: WorkerId) -> bool:
        """Takes over a worker that an earlier host has left; returns whether it is there. `start` tells its address."""
        ...

    async def probe(self, worker_id: WorkerId) -> Liveness: ...

    async def drain(self, worker_id: WorkerId, grace_s: int) -> int:
        """Waits until a worker has nothing left to do; returns the number of requests it gave up. Unavailable."""
        ...

    async def end(self, worker_id: WorkerId) -> None:
        """Stops a worker, by force if need be; returns when its process is gone. Does nothing if there is none."""
        ...


class LocalWorkerHost:
    """Workers that are entries in a table. The next starts raise `failures`; busy workers drain on `finish`."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Liveness] = {}
        self.failures: list[Exception] = []
        self.drained: list[WorkerId] = []
        self._busy: dict[WorkerId, asyncio.Event] = {}

    def keep_busy(self, worker_id: WorkerId) -> None:
        self._busy[worker_id] = asyncio.Event()

    def finish(self, worker_id: WorkerId) -> None:
        self._busy[worker_id].set()

    async def start(self, worker: Worker) -> str:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.workers[worker.id] = Liveness.ANSWERING
        return f"local:{worker.id}"

    async def adopt(self, worker_id: WorkerId) -> bool:
        return worker_id in self.workers

    async def probe(self, worker_id: WorkerId) -> Liveness:
        return self.workers.get(worker_id, Liveness.DEAD)

    async def drain(self, worker_id: WorkerId, grace_s: int) -> int:
        if worker_id in self._busy:
            await self._busy[worker_id].wait()
        if self.workers.get(worker_id) is not Liveness.ANSWERING:
            raise Unavailable("the worker died", worker_id=worker_id)
        self.drained.append(worker_id)
        return 0

    async def end(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
