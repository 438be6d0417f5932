"""How the router reaches the controller, which owns the pools. `RayController` (actor.py) is behind it."""

from dataclasses import dataclass
from typing import Protocol

from wire.ids import WorkerId
from wire.pools import PoolSizes

ORDER_TIMEOUT_S, KEYS_TIMEOUT_S, REPORT_TIMEOUT_S = 590.0, 25.0, 5.0
"""Rungs of the ladders in deploy/deadlines.py: the controller waits for less, the command line for more."""


@dataclass(frozen=True)
class ControllerEvent:
    """Something an operator wants to know of, `age_s` seconds ago."""

    age_s: float
    text: str


@dataclass(frozen=True)
class ControllerReport:
    """The last events, newest last, and what is wrong now."""

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
