"""The router's port to the controller, which owns the pools. Twins: `RayController` (actor.py), `LocalController`."""

from dataclasses import dataclass
from typing import Protocol

from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role

ORDER_TIMEOUT_S, KEYS_TIMEOUT_S, REPORT_TIMEOUT_S = 590.0, 25.0, 5.0
"""Deadlines of the ladders in deploy/deadlines.py: the controller waits less, the command line more."""


@dataclass(frozen=True)
class ControllerEvent:
    """An event of the cluster for its operator, `age_s` seconds old."""

    age_s: float
    text: str


@dataclass(frozen=True)
class SizedPool:
    """A pool whose size follows a limit, in words. last_order: with its reason, `age_s` seconds old; "" before one."""

    role: Role
    limit: str
    last_order: str = ""
    age_s: float = 0.0


@dataclass(frozen=True)
class ControllerReport:
    """The last events, newest last, present problems, and the pools whose sizes follow limits."""

    events: tuple[ControllerEvent, ...] = ()
    problems: tuple[str, ...] = ()
    pools: tuple[SizedPool, ...] = ()


class ControllerPort(Protocol):
    """The router's port to the controller. Calls raise Unavailable without an answer, else the controller's errors."""

    async def scale(self, prefill: int | None, decode: int | None) -> PoolSizes:
        """Resizes the pools; None leaves a pool as it is. Returns once the pools have their sizes.

        Raises Overtaken if a later order sets another size, Unavailable if workers do not start.
        """

    async def drain(self, worker_id: WorkerId) -> None:
        """Waits until the worker has finished its requests and ended, without a replacement."""

    async def roll(self, revision: str) -> int:
        """Replaces all workers, one by one, by workers of a revision, which the controller reads; returns its number.

        Raises InvalidRequest while another roll is under way, Unavailable if the roll was taken back.
        """

    async def shutdown(self) -> None:
        """Begins to stop every actor of the cluster, the router included; does not wait."""

    async def reload_keys(self) -> None:
        """Waits until router, gateways and nodes use the keys that are now in the cluster's file."""

    async def report(self) -> ControllerReport: ...

    async def worker_lost(self, worker_id: WorkerId) -> None:
        """Reports an unreachable worker; the controller probes it, and replaces it if it is dead."""


class LocalController:
    """The in-memory twin: workers are numbers, and tests read its orders."""

    def __init__(self, pools: PoolSizes) -> None:
        self.pools = pools
        self.drained: list[WorkerId] = []
        self.lost: list[WorkerId] = []
        self.rolled: list[str] = []
        self.is_shut_down = False
        self.num_reloads = 0
        self.problems: tuple[str, ...] = ()
        self.sized: tuple[SizedPool, ...] = ()
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

    async def roll(self, revision: str) -> int:
        self._require_running()
        self.rolled.append(revision)
        return len(self.rolled)

    async def shutdown(self) -> None:
        self.is_shut_down = True

    async def reload_keys(self) -> None:
        self._require_running()
        self.num_reloads += 1

    async def report(self) -> ControllerReport:
        self._require_running()
        return ControllerReport(tuple(self._events), self.problems, self.sized)

    async def worker_lost(self, worker_id: WorkerId) -> None:
        self._require_running()
        self.lost.append(worker_id)
        self._events.append(ControllerEvent(0.0, f"worker {worker_id} lost"))

    def _require_running(self) -> None:
        if self.is_shut_down:
            raise Unavailable("the controller is shut down")
