"""Faults of a service: planned by a seed before the first one happens, which is pure, then carried out."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from benchmarks.baton_service import BatonService


class FaultKind(Enum):
    """KILL: SIGKILL to a worker. PAUSE: a worker stopped and continued. The others hit what they name.

    The router is not among them: a client that loses the router gets UNAVAILABLE and asks again.
    """

    KILL = "kill"
    PAUSE = "pause"
    REDIS_KILL = "redis-kill"
    REDIS_PAUSE = "redis-pause"
    NODE_KILL = "node-kill"
    CONTROLLER_KILL = "controller-kill"


@dataclass(frozen=True)
class Fault:
    """`draw`, from 0 to 1, chooses among the workers that there are then. `pause_s`: until what stopped goes on."""

    at_s: float
    kind: FaultKind
    draw: float
    pause_s: float

    def choose(self, workers: Sequence[str]) -> str:
        """Chooses the worker that is hit."""
        return workers[int(self.draw * len(workers))]


def plan(seed: int, duration_s: float, every_s: float, kinds: Sequence[FaultKind], max_pause_s: float) -> list[Fault]:
    """Plans a fault every `every_s` seconds, the first after as long, none in the last `every_s`. Kinds come in turns.

    In turns, so that also a short run meets every kind; the seed decides which worker is hit and for how long.
    """
    draw = random.Random(seed)
    num_faults = max(0, round(duration_s / every_s) - 1)
    return [
        Fault((number + 1) * every_s, kinds[number % len(kinds)], draw.random(), draw.uniform(0.5, 1.0) * max_pause_s)
        for number in range(num_faults)
    ]


class FaultInjector:
    """`done` tells what happened, and when, in seconds since `run` began."""

    def __init__(self, service: BatonService) -> None:
        self.done: list[tuple[float, str]] = []
        self._service = service

    async def run(self, faults: Sequence[Fault]) -> None:
        start = time.perf_counter()
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - (time.perf_counter() - start)))
            what = await self._inflict(fault)
            self.done.append((round(time.perf_counter() - start, 2), what))

    async def _inflict(self, fault: Fault) -> str:
        match fault.kind:
            case FaultKind.KILL:
                name, pid = await self._choose_worker(fault)
                os.kill(pid, signal.SIGKILL)
                return f"killed {name}"
            case FaultKind.PAUSE:
                name, pid = await self._choose_worker(fault)
                await _pause(pid, fault.pause_s)
                return f"stopped {name} for {fault.pause_s:.1f} s"
            case FaultKind.REDIS_KILL:
                await asyncio.to_thread(self._service.kill_redis)
                await asyncio.sleep(fault.pause_s)
                await asyncio.to_thread(self._service.start_redis)
                return f"killed Redis, started again after {fault.pause_s:.1f} s"
            case FaultKind.REDIS_PAUSE:
                await _pause(self._service.redis_pid, fault.pause_s)
                return f"stopped Redis for {fault.pause_s:.1f} s"
            case FaultKind.NODE_KILL:
                os.kill(self._service.actor_pid("node"), signal.SIGKILL)
                return "killed the node's service"
            case FaultKind.CONTROLLER_KILL:
                os.kill(self._service.actor_pid("controller"), signal.SIGKILL)
                return "killed the controller"

    async def _choose_worker(self, fault: Fault) -> tuple[str, int]:
        status = await asyncio.to_thread(self._service.status)
        ready = {
            worker["id"]: worker["pid"]
            for pool in status["pools"].values()
            for worker in pool
            if worker["state"] == "ready"
        }
        name = fault.choose(sorted(ready))
        return name, ready[name]


async def _pause(pid: int, pause_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(pause_s)
    finally:
        with suppress(ProcessLookupError):  # it may have been ended while it stood still
            os.kill(pid, signal.SIGCONT)
