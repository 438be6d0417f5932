"""The resources that actors ask Ray for, and the nodes that have them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.plan.byte_size import format_bytes
from wire.errors import ConfigError

SERVICE_PREFIX = "node-"
MEMORY = "memory"
RESERVED = ("CPU", "GPU", MEMORY)
"""Ray's own names, which have settings of their own."""


@dataclass(frozen=True)
class Resources:
    """The resources that an actor asks Ray for."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, float]:
        """All of them under Ray's names; none that is zero."""
        own = zip(RESERVED, (self.num_cpus, self.num_gpus, self.memory_bytes), strict=True)
        return {name: amount for name, amount in (*own, *self.custom.items()) if amount}


@dataclass(frozen=True)
class RayNode:
    """A living node of the Ray cluster: its id, its address, all its resources. The head has controller and router.

    is_leaving: Ray drains it, after `ray drain-node` or by an autoscaler.
    """

    id: str
    host: str
    resources: dict[str, float] = field(default_factory=dict)
    is_head: bool = False
    is_leaving: bool = False

    @property
    def label(self) -> str:
        """The first digits of its id, which name it in paths."""
        return self.id[:8]

    @property
    def name(self) -> str:
        """Its name to people, of several on one machine too."""
        return f"{self.label}@{self.host}"

    @property
    def service(self) -> str:
        return service_of(self.id)

    def has(self, resources: Resources) -> bool:
        """True where the node could give these resources if nothing else ran on it."""
        return all(self.resources.get(name, 0) >= amount for name, amount in resources.asked.items())


def service_of(node_id: str) -> str:
    """Returns the name of the actor that is a node's service."""
    return f"{SERVICE_PREFIX}{node_id[:8]}"


def require_node(resources: Resources, nodes: Sequence[RayNode]) -> None:
    """Raises ConfigError, naming the resources, where no node has them: Ray would wait for ever for one."""
    if not any(node.has(resources) for node in nodes):
        asked = ", ".join(_amount(*one) for one in resources.asked.items())
        problem = f"none of the {len(nodes)} Ray nodes has {asked}, which a worker asks for"
        raise ConfigError(f"{problem}: add a node, or change [worker]")


def num_fitting(node: RayNode, workers: Iterable[Resources]) -> int:
    """Counts the workers, at least one, that the resources of a node allow, taking each that fits in turn."""
    left, count = dict(node.resources), 0
    for worker in workers:
        if RayNode(node.id, node.host, left).has(worker):
            left |= {name: left[name] - amount for name, amount in worker.asked.items()}
            count += 1
    return max(1, count)


def _amount(name: str, amount: float) -> str:
    return f"{name}: {format_bytes(int(amount)) if name == MEMORY else f'{amount:g}'}"
