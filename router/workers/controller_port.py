"""The router's port to the controller, which owns the pools. Twins: `RayController` (actor.py), `LocalController`."""

from dataclasses import dataclass
from typing import Protocol

from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes

ORDER_TIMEOUT_S, KEYS_TIMEOUT_S, REPORT_TIMEOUT_S = 590.0, 25.0, 5.0
"""Rungs of the ladders in deploy/deadlines.py: the controller waits for less, the command line for more."""


@dataclass(frozen=True)
class ControllerEvent:
    """An event of the cluster for its operator, `age_s` seconds old."""

    age_s: float
    text: str


@dataclass(frozen=True)
class ControllerReport:
    """The last events, newest last, and the problems that last."""

    events: tuple[ControllerEvent, ...] = ()
    problems: tuple[str, ...] = ()


class ControllerPort(Protocol):
    """Raises Unavailable where the controller does not answer in time, and BatonError as it says itself."""

    async def scale(self, prefill: int | None, decode: int | None) -> PoolSizes:
        """Gives each pool the size asked for; None leaves it as it is. Returns when these pools have it.

        Raises Overtaken once a later order sets another size of a pool, Unavailable for workers that do not start.
        """

    async def drain(self, worker_id: WorkerId) -> None:
        """Returns when the worker has finished its requests and is gone, without a replacement."""

    async def shutdown(self) -> None:
        """Starts to stop every actor of the cluster, the router's own among them; returns before that."""

    async def reload_keys(self) -> None:
        """Returns when every door goes by the keys that are in the cluster's file now."""

    async def report(self) -> ControllerReport: ...

    async def worker_lost(self, worker_id: WorkerId) -> None:
        """The router cannot reach a worker. The controller finds out why, and replaces it if it is dead."""


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
