"""Does to a service what a plan says."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.baton_service import BatonService
from benchmarks.fault_plan import Fault, FaultKind


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
