"""The seam between the controller and the processes of actors; `RayHost` is behind it."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from deploy.actors.liveness import Liveness
from deploy.plan.machine import Machine
from deploy.plan.resources import RayNode, Resources
from wire.typed_reader import from_json

Result = TypeVar("Result")


class ActorHost(Protocol):
    """The actors of a cluster, by name, and the nodes that they run on. Every call is bounded in time."""

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


async def ask(
    host: ActorHost, name: str, method: str, *arguments: str | int, answers: type[Result], timeout_s: float
) -> Result:
    """Calls a method of an actor, and reads its answer. Raises as `ActorHost.start` does."""
    return from_json(answers, await host.call(name, method, *arguments, timeout_s=timeout_s), f"{name} {method}")
