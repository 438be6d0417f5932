"""The seam between the controller and the processes of actors, and its in-memory twin. `RayHost` is the real one."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from deploy.actors.liveness import Liveness
from deploy.plan.machine import Machine, RayNode, Resources
from wire.errors import Unavailable
from wire.pools import Addresses, Drained
from wire.typed_reader import from_json, to_json

Result = TypeVar("Result")


class ActorHost(Protocol):
    """The actors of a cluster, by name, and the nodes that they run on. Every call is bounded in time."""

    @property
    def own_node(self) -> str:
        """The id of the head, which the controller runs on."""

    async def nodes(self) -> list[RayNode]:
        """Returns the nodes that are alive. Raises Unavailable."""

    def names(self) -> list[str]:
        """Returns the names of the cluster's actors, the controller's among them. Blocks."""

    def adopt(self, name: str) -> bool:
        """Takes over an actor that an earlier controller has left, started or not; returns whether it is there."""

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        """Begins an actor's process, unless there is one; `start` makes it work. `target` is MODULE:CLASS.

        node_id: the only node for it; None lets Ray choose one that has the resources, but none of `not_on`.
        """

    async def where(self, name: str, timeout_s: float) -> str:
        """Returns the id of the node of an actor, once its process is there. Raises as `start` does."""

    async def inspect(self, name: str) -> Machine:
        """Returns the memory, cores and GPUs of the machine of an actor. Raises as `start` does."""

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        """Returns the answer of the actor's object, started now or earlier.

        Raises what the object raises if that is ours, ConfigError for another failure, Unavailable for no answer.
        """

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        """Raises as `start` does."""

    async def probe(self, name: str) -> Liveness: ...

    def memory_bytes(self, name: str) -> int:
        """Returns the memory of an actor's process that it shares with no other; 0 without a process."""

    async def end(self, name: str) -> None:
        """Lets the object stop, then ends the process, by force if need be; returns when it is gone, or never was."""

    def leave(self) -> None:
        """Ends this process, the controller's; no other takes its place."""


async def ask(
    host: ActorHost, name: str, method: str, *arguments: str | int, answers: type[Result], timeout_s: float
) -> Result:
    """Calls a method of an actor, and reads its answer. Raises as `ActorHost.start` does."""
    return from_json(answers, await host.call(name, method, *arguments, timeout_s=timeout_s), f"{name} {method}")


class LocalHost:
    """Actors that are entries in a table. The next starts raise `failures`; busy actors drain on `finish`.

    All nodes are like `machine`.
    """

    own_node = "head"

    def __init__(self) -> None:
        self.actors: dict[str, Liveness] = {}
        self.launched: list[str] = []
        self.failures: list[Exception] = []
        self.drained: list[str] = []
        self.memory: dict[str, int] = {}
        self.ray_nodes = [RayNode(self.own_node, "127.0.0.1", is_head=True)]
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

    def leave(self) -> None:
        self.actors.clear()
