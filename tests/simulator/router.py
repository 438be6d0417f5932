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
from wire.pools import PoolSizes, Worker
from wire.trust.key_ring import ANYONE


class SimRouter:
    """A process with a router. connect: opens a connection to a worker."""

    def __init__(self, name: str, config: RouterConfig, connect: Callable[[str], Connection]) -> None:
        self.process = Process(name)
        self.connections: list[Connection] = []
        self._connect = connect
        self.parts: Router = self.process.run(self._assemble, config)
        self.api = InferenceApi(config.model, self.parts.dispatcher, config.settings)

    def start(self) -> None:
        self.process.run(self.parts.start)

    async def enlist(self, listed: Sequence[Worker]) -> bool:
        """Tells it which workers there are; whether it takes them all, if it lives."""
        return not await self.process.finish(self.parts.membership.set(listed))

    async def stop(self) -> None:
        await self.process.finish(self.parts.stop())

    def begin(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begins a call of any caller to its servicer."""
        CALLER.set(ANYONE)
        return self.process.spawn(call)

    async def finish(self, call: asyncio.Task[Any]) -> None:
        """Returns when a call is over. Raises Unavailable if the router dies before."""
        await asyncio.wait([call, self.process.death], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise Unavailable("the connection is broken")

    def _assemble(self, config: RouterConfig) -> Router:
        return Router(config, FragmentTokenizer(), self._open, LocalController(PoolSizes(0, 0)))

    def _open(self, address: str) -> Connection:
        self.connections.append(self._connect(address))
        return self.connections[-1]
