"""The nodes that host workers: each has a service for each KV layout of its workers, amid some rolls two.

its first worker of a layout joins ──▶ open ──▶ kept ──▶ no worker has the layout, or the node is drained or lost: end
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from deploy.controller.supervised import KeptActor, Supervision, Tasks, persist, repeat
from deploy.deadlines import KEYS_AT_DOOR_S, PLACE_S, SERVICE_START_S
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.machine import Machine, RayNode, service_of
from deploy.processes.atomic_file import AtomicFile
from wire.errors import BatonError, Unavailable
from wire.pools import Shares, node_name
from wire.typed_reader import from_json, to_json

LOOK_EVERY_S = 3.0
SUFFIX = ".baseline"
TARGET = "deploy.actors.node:NodeActor"


class NodeService:
    """The service of one node for one KV layout, kept from `open` or `reopen` to `end`.

    layout_tag: the tag of the KV layout (ClusterPlan.layout_tag). shares: returns the tenants' shares of the arena.
    plan_with: returns the plan for the next start; None leaves the plan of the last one. opening: the task that opens
    it. baseline: None until the machine is known; its `block_address` is the address of the last start.
    """

    opening: "asyncio.Task[None]"

    def __init__(
        self,
        node: RayNode,
        plan: ClusterPlan,
        means: Supervision,
        plan_with: Callable[[str], ClusterPlan | None],
        shares: Callable[[], dict[str, float]],
        baseline: NodeBaseline | None = None,
    ) -> None:
        """plan: the plan of the first start. baseline: the record of an earlier controller, with the layout's tag."""
        self.node = node
        self.layout_tag = plan.layout_tag if baseline is None else baseline.layout_tag
        self.name = service_of(node.id, self.layout_tag)
        self._shares = shares
        self._plan = plan
        self._plan_with = plan_with
        self.baseline = baseline
        self._means = means
        self._actor = KeptActor(self.name, TARGET, self._config_json, node.id, means)
        self._record = AtomicFile(means.run_dir / f"{self.name}{SUFFIX}")
        self._tasks = Tasks()

    @property
    def is_open(self) -> bool:
        return self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None

    async def open(self, before: Machine | None) -> None:
        """Starts the service. Raises ConfigError if nothing fits, and the errors of `KeptActor.serve`.

        before: the machine before its first worker, if the node has another arena; the new arena is sized by
        the shared memory that is free now.
        """
        try:
            self._actor.prepare()
            machine = (None if before else self._plan.machine) or await self._means.host.inspect(self.name)
            if before is not None:
                machine = replace(before, shared_bytes=min(machine.shared_bytes, machine.memory_bytes))
            self.baseline = NodeBaseline(self.node, machine, layout_tag=self.layout_tag)
            await self._actor.serve()
        except BaseException:
            await self.end()
            raise
        self._keep()

    async def reopen(self) -> None:
        """Takes over the service of an earlier controller, or starts a new service in its place.

        If it fails, the arena stays, for workers may use it.
        """
        self._actor.prepare()
        await self._actor.take_over()
        self._keep()

    async def share(self) -> None:
        """Shares the arena among tenants. Raises the errors of `ActorHost.call`."""
        await self._means.host.call(self.name, "set_shares", to_json(Shares(self._shares())), timeout_s=KEYS_AT_DOOR_S)

    async def end(self) -> None:
        """Ends the service; no later controller reopens it."""
        self._tasks.cancel()
        self._record.path.unlink(missing_ok=True)
        await self._actor.end()

    def _keep(self) -> None:
        self._note_address()
        self._tasks.begin(self._actor.keep(on_restart=self._note_address))
        # The shares may have changed since the service got its settings.
        self._tasks.begin(persist(f"sharing {self.name}", self.share, self._means.events))

    def _note_address(self) -> None:
        """Notes the service's port for later workers; it may change with a restart."""
        if self.baseline is not None and self._actor.answer is not None:
            self.baseline = replace(self.baseline, block_address=self._actor.answer.public)
            self._record.try_write(to_json(self.baseline).encode())

    def _config_json(self) -> str:
        assert self.baseline is not None
        self._plan = self._plan_with(self.layout_tag) or self._plan
        return to_json(replace(self._plan.node_config(self.baseline), shares=self._shares()))


class Nodes:
    """The services of nodes, by their names."""

    def __init__(
        self,
        plan: ClusterPlan,
        means: Supervision,
        plan_with: Callable[[str], ClusterPlan | None],
        on_leaving: Callable[[RayNode], Awaitable[None]] | None = None,
    ) -> None:
        """plan_with: returns the plan of workers with a layout's tag, the newest; None if no worker has that layout.

        on_leaving: drains a node with a service that Ray drains; called again while it raises BatonError.
        """
        self._plan = plan
        self._plan_with = plan_with
        self._means = means
        self._events = means.events
        self._on_leaving = on_leaving
        self._leaving: set[str] = set()
        self._tasks = Tasks()
        self._services: dict[str, NodeService] = {}
        self._endings: defaultdict[str, Tasks] = defaultdict(Tasks)

    async def join(self, node: RayNode, plan: ClusterPlan) -> NodeBaseline:
        """Waits until a node's service for the layout of a plan serves, started if there is none; returns its baseline.

        Raises ConfigError, naming the node, if nothing fits; Unavailable if the service does not start.
        """
        name = service_of(node.id, plan.layout_tag)
        await self._endings[name].wait()
        if name not in self._services:
            machines = [one.baseline.machine for one in self._on(node.id) if one.baseline is not None]
            service = NodeService(node, plan, self._means, self._plan_with, lambda: self._plan.shares)
            self._begin(service, partial(service.open, next(iter(machines), None)))
        service = self._services[name]
        done, _ = await asyncio.wait([service.opening], timeout=PLACE_S + SERVICE_START_S)
        if not done:
            raise Unavailable(f"{name} has not started in time: `baton logs` tells why")
        if service.opening.cancelled():
            raise Unavailable(f"node {node.name} was lost")
        service.opening.result()
        assert service.baseline is not None
        return service.baseline

    async def find(self, name: str) -> RayNode | None:
        """Finds a node with a service by its name, which has an `@`; waits for services that are starting.

        Takes the id of one of the node's arenas, too, which is in events and metrics.
        """
        if "@" not in name or not self._services:
            return None
        services = list(self._services.values())
        await asyncio.wait([one.opening for one in services])
        return next((one.node for one in services if one.is_open and one.node.name == node_name(name)), None)

    async def close(self, node: RayNode) -> None:
        """Ends the services of a node without workers."""
        await self._forget(self._on(node.id))
        self._events.note(f"node {node.name} is drained: its Ray can be stopped")

    async def share(self, plan: ClusterPlan) -> None:
        """Shares the arenas among tenants by a new plan, also for later restarts.

        Raises Unavailable for a service that does not answer.
        """
        self._plan = plan
        await asyncio.gather(*(one.share() for one in self._services.values() if one.is_open))

    def take_over(self) -> None:
        """Takes over the services of an earlier controller."""
        for path in self._means.run_dir.glob(f"*{SUFFIX}"):
            known = AtomicFile(path).recall(lambda text: from_json(NodeBaseline, text, "baseline"))
            if known is not None:  # else the node's next worker makes another
                plan = self._plan_with(known.layout_tag) or self._plan
                service = NodeService(known.node, plan, self._means, self._plan_with, lambda: self._plan.shares, known)
                self._begin(service, service.reopen)

    async def watch(self) -> None:
        """Ends services whose layout no worker has; forgets nodes that Ray has lost, and drains nodes that Ray drains.

        Runs until cancelled. The only node is neither lost nor drained.
        """
        try:
            await repeat("the care for the nodes", self._look, self._events)
        finally:
            self._tasks.cancel()

    async def end(self) -> None:
        """Ends all services."""
        await asyncio.gather(*(service.end() for service in self._services.values()))

    def _on(self, node_id: str) -> list[NodeService]:
        return [one for one in self._services.values() if one.node.id == node_id]

    def _begin(self, service: NodeService, opens: Callable[[], Awaitable[None]]) -> None:
        self._services[service.name] = service
        service.opening = asyncio.create_task(self._open(service, opens))

    async def _open(self, service: NodeService, opens: Callable[[], Awaitable[None]]) -> None:
        try:
            await opens()
        except BaseException:
            if self._services.get(service.name) is service:
                del self._services[service.name]
            raise

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        if unused := [one for one in self._services.values() if self._plan_with(one.layout_tag) is None]:
            self._events.note(
                f"no worker has the KV layout of {', '.join(one.name for one in unused)} any more: it ends"
            )
            await self._forget(unused)
        if self._plan.is_alone:
            return
        try:
            nodes = await self._means.host.nodes()
        except Unavailable:  # then nothing is known of any
            return
        for node_id in {one.node.id for one in self._services.values()} - {node.id for node in nodes}:
            lost = self._on(node_id)
            self._events.note(f"the node of {', '.join(one.name for one in lost)} was lost")
            await self._forget(lost)
        for node in nodes:
            if node.is_leaving and self._on(node.id) and node.id not in self._leaving and self._on_leaving:
                self._leaving.add(node.id)
                self._tasks.begin(self._drain(node, self._on_leaving))

    async def _drain(self, node: RayNode, drain: Callable[[RayNode], Awaitable[None]]) -> None:
        """Drains a node; retries while its workers cannot be spared, and logs the first refusal as an event."""
        self._events.note(f"Ray drains node {node.name}")
        is_refused = False
        while self._on(node.id):
            try:
                await drain(node)
                return
            except BatonError as error:
                if not is_refused:
                    self._events.note(f"node {node.name} is not drained yet: {error.message}")
                is_refused = True
            await asyncio.sleep(LOOK_EVERY_S)

    async def _forget(self, services: Sequence[NodeService]) -> None:
        """Ends services side by side; a worker that joins one of them meanwhile waits for its end."""
        for one in services:
            del self._services[one.name]
            one.opening.cancel()
            self._endings[one.name].begin(one.end())
        await asyncio.gather(*(self._endings[one.name].wait() for one in services))
