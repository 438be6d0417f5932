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
        """Takes over an actor of an earlier controller, started or not; returns whether it is there."""

    def launch(
        self, name: str, target: str, resources: Resources, node_id: str | None = None, not_on: Sequence[str] = ()
    ) -> None:
        """Begins an actor's process, unless there is one; `start` makes it work. `target` is MODULE:CLASS.

        node_id: the actor's node; None lets Ray choose a node that has the resources and is not in `not_on`.
        """

    async def where(self, name: str, timeout_s: float) -> str:
        """Returns the id of an actor's node, once its process runs. Raises the errors of `start`."""

    async def inspect(self, name: str) -> Machine:
        """Returns the memory, cores and GPUs of an actor's machine. Raises the errors of `start`."""

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        """Starts the actor's object unless it has started; returns its answer.

        Raises the object's BatonError, ConfigError for another exception, Unavailable without an answer.
        """

    async def call(self, name: str, method: str, *arguments: str | int, timeout_s: float) -> str:
        """Calls a method of the actor's object. Raises the errors of `start`."""

    async def probe(self, name: str) -> Liveness: ...

    def memory_bytes(self, name: str) -> int:
        """Returns the memory of an actor's process that it shares with no other; 0 without a process."""

    async def end(self, name: str) -> None:
        """Stops the object, then ends the process, by force if need be. Returns once there is no process."""

    def leave(self) -> None:
        """Ends this process, the controller's; no other takes its place."""


async def ask(
    host: ActorHost, name: str, method: str, *arguments: str | int, answers: type[Result], timeout_s: float
) -> Result:
    """Calls a method of an actor, and parses its answer. Raises the errors of `ActorHost.start`."""
    return from_json(answers, await host.call(name, method, *arguments, timeout_s=timeout_s), f"{name} {method}")


class LocalHost:
    """The in-memory twin: a table of actors. The next starts raise `failures`; busy actors drain, or
    change their roles, on `finish`.

    All nodes have the size of `machine`.
    """

    own_node = "head"

    def __init__(self) -> None:
        self.actors: dict[str, Liveness] = {}
        self.launched: list[str] = []
        self.failures: list[Exception] = []
        self.drained: list[str] = []
        self.served_as: list[tuple[str, str]] = []
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
        """Knows `drain` and `serve_as` only."""
        if name in self._busy:
            await self._busy[name].wait()
        if self.actors.get(name) is not Liveness.ANSWERING:
            raise Unavailable(f"{name} died")
        if method == "drain":
            self.drained.append(name)
        else:
            self.served_as.append((name, str(arguments[0])))
        return to_json(Drained())

    async def probe(self, name: str) -> Liveness:
        return self.actors.get(name, Liveness.DEAD)

    def memory_bytes(self, name: str) -> int:
        return self.memory.get(name, 0)

    async def end(self, name: str) -> None:
        self.actors.pop(name, None)

    def leave(self) -> None:
        self.actors.clear()
