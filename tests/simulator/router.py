"""A router of the simulated cluster: the real one, in a process of its own that may die."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from router.config import RouterConfig
from router.ports.inference import InferenceApi
from router.ports.interceptors import CALLER
from router.router import Router
from router.workers.controller_port import LocalController
from tests.harness.fragments import FragmentTokenizer
from tests.simulator.network import Connection
from tests.simulator.virtual_time import Process
from wire.errors import Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Worker
from wire.trust.key_ring import ANYONE, Key


class SimController(LocalController):
    """The way to the controller, which does not answer while none lives."""

    def __init__(self, is_there: Callable[[], bool]) -> None:
        super().__init__(PoolSizes(0, 0))
        self._is_there = is_there

    async def worker_lost(self, worker_id: WorkerId) -> None:
        if not self._is_there():
            raise Unavailable("the controller does not answer")
        await super().worker_lost(worker_id)


class SimRouter:
    """A process with a router. connect: opens a connection to a worker. has_controller: whether one lives."""

    def __init__(
        self,
        name: str,
        config: RouterConfig,
        connect: Callable[[str], Connection],
        has_controller: Callable[[], bool] = lambda: True,
    ) -> None:
        self.process = Process(name)
        self.connections: list[Connection] = []
        self._connect = connect
        self._controller = SimController(has_controller)
        self.parts: Router = self.process.run(self._assemble, config)
        self.api = InferenceApi(self.parts.dispatcher, config.settings)

    def start(self) -> None:
        self.process.run(self.parts.start)

    async def enlist(self, listed: Sequence[Worker]) -> bool:
        """Tells it which workers there are; whether it takes them all, if it lives."""
        return not await self.process.finish(self.parts.membership.set(listed))

    async def stop(self) -> None:
        await self.process.finish(self.parts.stop())

    def begin(self, call: Coroutine[Any, Any, Any], caller: Key = ANYONE) -> asyncio.Task[Any]:
        """Begins a call to its servicer."""
        CALLER.set(caller)
        return self.process.spawn(call)

    async def finish(self, call: asyncio.Task[Any]) -> None:
        """Returns when a call is over. Raises Unavailable if the router dies before."""
        await asyncio.wait([call, self.process.death], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise Unavailable("the connection is broken")

    def _assemble(self, config: RouterConfig) -> Router:
        return Router(config, FragmentTokenizer(), self._open, self._controller)

    def _open(self, address: str) -> Connection:
        self.connections.append(self._connect(address))
        return self.connections[-1]
