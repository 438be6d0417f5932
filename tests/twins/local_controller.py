"""The controller's twin: orders that can be read."""

from router.workers.controller_port import ControllerEvent, ControllerReport
from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes


class LocalController:
    """A controller whose workers are numbers: its orders can be read from it."""

    def __init__(self, pools: PoolSizes) -> None:
        self.pools = pools
        self.drained: list[WorkerId] = []
        self.lost: list[WorkerId] = []
        self.is_shut_down = False
        self.num_reloads = 0
        self.problems: tuple[str, ...] = ()
        self._events: list[ControllerEvent] = []

    async def scale(self, prefill: int | None, decode: int | None) -> PoolSizes:
        self._require_running()
        self.pools = PoolSizes(
            self.pools.prefill if prefill is None else prefill, self.pools.decode if decode is None else decode
        )
        self._events.append(ControllerEvent(0.0, f"scaled to {self.pools.prefill} prefill, {self.pools.decode} decode"))
        return self.pools

    async def drain(self, worker_id: WorkerId) -> None:
        self._require_running()
        self.drained.append(worker_id)

    async def shutdown(self) -> None:
        self.is_shut_down = True

    async def reload_keys(self) -> None:
        self._require_running()
        self.num_reloads += 1

    async def report(self) -> ControllerReport:
        self._require_running()
        return ControllerReport(tuple(self._events), self.problems)

    async def worker_lost(self, worker_id: WorkerId) -> None:
        self._require_running()
        self.lost.append(worker_id)
        self._events.append(ControllerEvent(0.0, f"worker {worker_id} lost"))

    def _require_running(self) -> None:
        if self.is_shut_down:
            raise Unavailable("the controller is shut down")
