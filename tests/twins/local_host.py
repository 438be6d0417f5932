"""The actor host's twin: actors that are entries in a table."""

import asyncio
from collections.abc import Sequence

from deploy.actors.liveness import Liveness
from deploy.plan.machine import Machine
from deploy.plan.resources import RayNode, Resources
from wire.errors import Unavailable
from wire.pools import Addresses, Drained
from wire.typed_reader import to_json


class LocalHost:
    """Actors that are entries in a table. The next starts raise `failures`; busy actors drain on `finish`.

    All nodes are like `machine`.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Liveness] = {}
        self.launched: list[str] = []
        self.failures: list[Exception] = []
        self.drained: list[str] = []
        self.memory: dict[str, int] = {}
        self.ray_nodes = [RayNode("head", "127.0.0.1", is_head=True)]
        self.machine = Machine(memory_bytes=8 << 30, shared_bytes=4 << 30, num_cores=2)
        self.places: dict[str, str] = {}
        self._busy: dict[str, asyncio.Event] = {}

    def keep_busy(self, name: str) -> None:
        self._busy[name] = asyncio.Event()

    def finish(self, name: str) -> None:
        self._busy[name].set()

    def names(self) -> list[str]:
        return list(self.actors)

    def adopt(self, name: str) -> bool:
        return name in self.actors

    async def nodes(self) -> list[RayNode]:
        await asyncio.sleep(0)
        return list(self.ray_nodes)

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        """Places an actor on the first node that has the resources."""
        if name not in self.actors:
            self.actors[name] = Liveness.ANSWERING
            self.launched.append(name)
            self.places[name] = node_id or next(
                node.id for node in self.ray_nodes if node.has(resources) and node.id not in not_on
            )

    async def where(self, name: str, timeout_s: float) -> str:
        return self.places[name]

    async def inspect(self, name: str) -> Machine:
        if name not in self.actors:
            raise Unavailable(f"{name} is not there")
        return self.machine

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return to_json(Addresses(f"local:{name}"))

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        """Knows `drain` only."""
        if name in self._busy:
            await self._busy[name].wait()
        if self.actors.get(name) is not Liveness.ANSWERING:
            raise Unavailable(f"{name} died")
        self.drained.append(name)
        return to_json(Drained())

    async def probe(self, name: str) -> Liveness:
        return self.actors.get(name, Liveness.DEAD)

    def memory_bytes(self, name: str) -> int:
        return self.memory.get(name, 0)

    async def end(self, name: str) -> None:
        self.actors.pop(name, None)
