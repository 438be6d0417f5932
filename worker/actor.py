"""A worker as a Ray actor: a plain class, which `deploy` makes an actor. Calls carry text and numbers only."""

import asyncio
import gc
import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

from wire.errors import Unavailable
from wire.pools import Addresses, Drained, Role
from wire.typed_reader import from_json, to_json
from worker.assembly import Assembly, assemble
from worker.config import WorkerConfig
from worker.job import Behaviour
from worker.server import WorkerServer
from worker.termination import leave_sigterm_to_the_main_thread, on_sigterm

log = logging.getLogger(__name__)

TERMINATION_GRACE_S = 30
BROKEN_EXIT_DELAY_S = 1.0
"""Time for the last updates to reach routers."""


@dataclass(frozen=True)
class _Started:
    assembly: Assembly
    server: WorkerServer


class WorkerActor(ABC):
    """The actor of a worker. `start` comes first; `stop` last, and then the end of the process."""

    def __init__(self, config_json: str) -> None:
        """Reads the configuration. Raises ConfigError."""
        self._config = from_json(WorkerConfig, config_json, "worker")
        self._started: _Started | None = None
        self._leaving: asyncio.Task[None] | None = None

    @abstractmethod
    def make_behaviour(self, config: WorkerConfig, role: Role) -> Behaviour:
        """Makes a role's batcher and jobs."""

    async def start(self) -> str:
        """Loads the model and begins to serve; returns the worker's Addresses.

        Raises ModelError or ConfigError if the model cannot be served, StoreError without the node's directory.
        """
        leave_sigterm_to_the_main_thread()
        loop = asyncio.get_running_loop()

        def on_broken() -> None:
            loop.call_soon_threadsafe(self._give_up)

        behaviour = self.make_behaviour(self._config, self._config.role)
        assembly = await asyncio.to_thread(assemble, self._config, behaviour, on_broken)
        server = WorkerServer(assembly.service, self._config.server)
        self._started = _Started(assembly, server)
        await assembly.service.start()
        address = await server.start()
        on_sigterm(self._terminate)
        # What there is now stays: to look through it again and again would stop the worker for 0.2 s each time.
        gc.collect()
        gc.freeze()
        return to_json(Addresses(address))

    async def drain(self, grace_s: int) -> str:
        """Takes no new attempts, and waits until the running attempts have ended or the grace is over.

        Returns Drained.
        """
        started = self._require_started()
        await started.server.refuse_new_work()
        return to_json(Drained(await started.assembly.service.drain(grace_s)))

    async def serve_as(self, role: str, grace_s: int) -> str:
        """Serves this role from now on, after a drain of the attempts; returns Drained.

        The process, its model, its warm kernels and its pages stay. Raises Unavailable if it cannot.
        """
        behaviour = self.make_behaviour(self._config, Role(role))
        return to_json(Drained(await self._require_started().assembly.service.serve_as(behaviour, grace_s)))

    async def stop(self) -> None:
        """Ends all attempts and closes the port."""
        started = self._require_started()
        await started.assembly.service.close()
        await started.server.stop()
        await asyncio.to_thread(started.assembly.close)

    def _require_started(self) -> _Started:
        if self._started is None:
            raise Unavailable("the worker has not started")
        return self._started

    def _terminate(self) -> None:
        log.warning("SIGTERM: draining for at most %s s", TERMINATION_GRACE_S)
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        try:
            await self.drain(TERMINATION_GRACE_S)
            await self.stop()
        finally:
            os._exit(0)

    def _give_up(self) -> None:
        log.critical("the worker is broken and ends itself")
        asyncio.get_running_loop().call_later(BROKEN_EXIT_DELAY_S, os._exit, 1)
