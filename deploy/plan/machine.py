"""Machines, for sizing: memory, cores and GPUs of this machine, Ray's nodes, and the resources that actors request."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.plan.byte_size import format_bytes
from wire.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
RAYS_SHARE = 20
"""Ray ends workers when less than 1/20 of the memory is free."""
QUERY_TIMEOUT_S = 20.0


LIMITS = {
    resource.RLIMIT_NOFILE: ("open files", "-n", 1024, 1),
    resource.RLIMIT_NPROC: ("processes and threads", "-u", 1024, 1),
    resource.RLIMIT_FSIZE: ("bytes of a file", "-f", 1 << 30, 1 << 10),
}
"""Limits of a process: name, `ulimit` flag and unit, and the least value with which a cluster starts."""
SERVICE_PREFIX = "node-"
MEMORY = "memory"
RESERVED = ("CPU", "GPU", MEMORY)
"""Ray's own resource names; these have separate settings."""


@dataclass(frozen=True)
class Machine:
    """Available memory, free shared memory (part of it), cores of this process, and free bytes of each GPU."""

    memory_bytes: int
    shared_bytes: int
    num_cores: int
    gpus: tuple[int, ...] = ()


def inspect_machine() -> Machine:
    """Inspects the machine; blocks for a second if it has a GPU. Raises ConfigError if a GPU does not answer."""
    shared = os.statvfs(SHARED_MEMORY)
    return Machine(
        memory_bytes=_free_memory(),
        shared_bytes=shared.f_bavail * shared.f_frsize,
        num_cores=len(os.sched_getaffinity(0)),
        gpus=_free_on_gpus(),
    )


def require_limits() -> None:
    """Raises ConfigError if a limit of this process, which its children inherit, is too low for a cluster."""
    for limit, (name, flag, least, unit) in LIMITS.items():
        soft, hard = resource.getrlimit(limit)
        most = hard if limit == resource.RLIMIT_NOFILE else soft  # Ray raises that of files itself
        if most != resource.RLIM_INFINITY and most < least:
            raise ConfigError(
                f"only {most} {name} are allowed here: allow more, as with `ulimit {flag} {least // unit}`"
            )


def _free_memory() -> int:
    """Returns the memory available on the machine and in its container; cached files count as available."""
    system = psutil.virtual_memory()
    free = [system.available - system.total // RAYS_SHARE]
    with suppress(OSError, ValueError):  # no container, or `max`
        limit, current = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free.append(limit - limit // RAYS_SHARE - current + int(counts.get("inactive_file", 0)))
    return max(0, min(free))


def _free_on_gpus() -> tuple[int, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        silence = f"nvidia-smi did not answer within {QUERY_TIMEOUT_S:.0f} s"
        raise ConfigError(f"{silence}: is the GPU's driver well?") from error
    return tuple(int(line) << 20 for line in answer.stdout.split() if line.isdigit())


@dataclass(frozen=True)
class Resources:
    """The resources that an actor requests from Ray."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, float]:
        """All resources by Ray's names, without zeros."""
        own = zip(RESERVED, (self.num_cpus, self.num_gpus, self.memory_bytes), strict=True)
        return {name: amount for name, amount in (*own, *self.custom.items()) if amount}


@dataclass(frozen=True)
class RayNode:
    """A living node of the Ray cluster: its id, its address, all its resources. The head runs controller and router.

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
        """The node's name for people, distinct for nodes on one machine, too."""
        return f"{self.label}@{self.host}"

    def has(self, resources: Resources) -> bool:
        """Whether the node could give these resources if nothing else ran on it."""
        return all(self.resources.get(name, 0) >= amount for name, amount in resources.asked.items())


def service_of(node_id: str, layout_tag: str = "") -> str:
    """Returns the name of the actor that is a node's service for a KV layout."""
    return SERVICE_PREFIX + "-".join(filter(None, (node_id[:8], layout_tag)))


def require_node(resources: Resources, nodes: Sequence[RayNode]) -> None:
    """Raises ConfigError, naming the resources, if no node has them: Ray would wait for ever."""
    if not any(node.has(resources) for node in nodes):
        asked = ", ".join(_amount(*one) for one in resources.asked.items())
        problem = f"none of the {len(nodes)} Ray nodes has {asked}, which a worker asks for"
        raise ConfigError(f"{problem}: add a node, or change [worker]")


def num_fitting(node: RayNode, workers: Iterable[Resources]) -> int:
    """Counts the workers, at least one, that a node's resources allow, tried in order."""
    left, count = dict(node.resources), 0
    for worker in workers:
        if RayNode(node.id, node.host, left).has(worker):
            left |= {name: left[name] - amount for name, amount in worker.asked.items()}
            count += 1
    return max(1, count)


def _amount(name: str, amount: float) -> str:
    return f"{name}: {format_bytes(int(amount)) if name == MEMORY else f'{amount:g}'}"
