"""The nodes that host workers: each has a service, from its first worker until Ray loses the node."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from deploy.controller.supervised import KeptActor, Supervision, Tasks, persist, repeat
from deploy.deadlines import KEYS_AT_DOOR_S
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.machine import RayNode
from deploy.processes.atomic_file import AtomicFile
from wire.errors import BatonError, Unavailable
from wire.pools import Shares
from wire.served_model import ServedModel
from wire.typed_reader import from_json, to_json

LOOK_EVERY_S = 3.0
SUFFIX = ".baseline"
TARGET = "deploy.actors.node:NodeActor"


class NodeService:
    """The service of one node, kept from `open` or `reopen` to `end`.

    plan: the plan for its next start. model: returns the model whose folder it wants then. opening: the task that
    opens it. baseline: None until the machine is known; its `block_address` is the address of the last start.
    """

    opening: "asyncio.Task[None]"

    def __init__(
        self,
        node: RayNode,
        plan: ClusterPlan,
        means: Supervision,
        model: Callable[[], ServedModel],
        baseline: NodeBaseline | None = None,
    ) -> None:
        self.node = node
        self._model = model
        self.plan = plan
        self.baseline = baseline
        self._means = means
        self._actor = KeptActor(node.service, TARGET, self._config_json, node.id, means)
        self._record = AtomicFile(means.run_dir / f"{node.service}{SUFFIX}")
        self._tasks = Tasks()

    @property
    def is_open(self) -> bool:
        return self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None

    async def open(self) -> None:
        """Starts the service. Raises ConfigError if nothing fits, and the errors of `KeptActor.serve`."""
        try:
            self._actor.prepare()
            machine = self.plan.machine or await self._means.host.inspect(self.node.service)
            self.baseline = NodeBaseline(self.node, machine)
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
        """Shares the arena among tenants by the plan. Raises the errors of `ActorHost.call`."""
        shares = to_json(Shares(self.plan.shares))
        await self._means.host.call(self.node.service, "set_shares", shares, timeout_s=KEYS_AT_DOOR_S)

    async def end(self) -> None:
        """Ends the service; no later controller reopens it."""
        self._tasks.cancel()
        self._record.path.unlink(missing_ok=True)
        await self._actor.end()

    def _keep(self) -> None:
        self._note_address()
        self._tasks.begin(self._actor.keep(on_restart=self._note_address))
        # The shares may have changed since the service got its settings.
        self._tasks.begin(persist(f"sharing {self.node.service}", self.share, self._means.events))

    def _note_address(self) -> None:
        """Notes the service's port for later workers; it may change with a restart."""
        if self.baseline is not None and self._actor.answer is not None:
            self.baseline = replace(self.baseline, block_address=self._actor.answer.public)
            self._record.try_write(to_json(self.baseline).encode())

    def _config_json(self) -> str:
        assert self.baseline is not None
        return to_json(replace(self.plan.node_config(self.baseline), model=self._model()))


class Nodes:
    """The services of nodes, by node id."""

    def __init__(
        self,
        plan: ClusterPlan,
        means: Supervision,
        model: Callable[[], ServedModel],
        on_leaving: Callable[[RayNode], Awaitable[None]] | None = None,
    ) -> None:
        """model: returns the model that workers are to have.

        on_leaving: drains a node with a service that Ray drains; called again while it raises BatonError.
        """
        self._plan = plan
        self._model = model
        self._means = means
        self._events = means.events
        self._on_leaving = on_leaving
        self._leaving: set[str] = set()
        self._tasks = Tasks()
        self._services: dict[str, NodeService] = {}

    async def join(self, node: RayNode) -> NodeBaseline:
        """Waits until a node's service serves, started if there is none; returns the node's baseline.

        Raises ConfigError, naming the node, if nothing fits; Unavailable if the service does not start.
        """
        if node.id not in self._services:
            service = NodeService(node, self._plan, self._means, self._model)
            self._begin(service, service.open)
        service = self._services[node.id]
        await asyncio.wait([service.opening])
        if service.opening.cancelled():
            raise Unavailable(f"node {node.name} was lost")
        service.opening.result()
        assert service.baseline is not None
        return service.baseline

    async def find(self, name: str) -> RayNode | None:
        """Finds a node with a service by its name, which has an `@`; waits for services that are starting."""
        if "@" not in name or not self._services:
            return None
        services = list(self._services.values())
        await asyncio.wait([one.opening for one in services])
        return next((one.node for one in services if one.is_open and one.node.name == name), None)

    async def close(self, node: RayNode) -> None:
        """Ends the service of a node without workers."""
        await self._forget(node.id)
        self._events.note(f"node {node.name} is drained: its Ray can be stopped")

    async def share(self, plan: ClusterPlan) -> None:
        """Shares the arenas among tenants by a new plan, also for later restarts.

        Raises Unavailable for a service that does not answer.
        """
        self._plan = plan
        for service in self._services.values():
            service.plan = plan
        await asyncio.gather(*(one.share() for one in self._services.values() if one.is_open))

    def take_over(self) -> None:
        """Takes over the services of an earlier controller."""
        for path in self._means.run_dir.glob(f"*{SUFFIX}"):
            known = AtomicFile(path).recall(lambda text: from_json(NodeBaseline, text, "baseline"))
            if known is not None:  # else the node's next worker makes another
                service = NodeService(known.node, self._plan, self._means, self._model, known)
                self._begin(service, service.reopen)

    async def watch(self) -> None:
        """Forgets nodes that Ray has lost, and drains nodes that Ray drains, until cancelled."""
        try:
            await repeat("the care for the nodes", self._look, self._events)
        finally:
            self._tasks.cancel()

    async def end(self) -> None:
        """Ends all services."""
        await asyncio.gather(*(service.end() for service in self._services.values()))

    def _begin(self, service: NodeService, opens: Callable[[], Awaitable[None]]) -> None:
        self._services[service.node.id] = service
        service.opening = asyncio.create_task(self._open(service, opens))

    async def _open(self, service: NodeService, opens: Callable[[], Awaitable[None]]) -> None:
        try:
            await opens()
        except BaseException:
            if self._services.get(service.node.id) is service:
                del self._services[service.node.id]
            raise

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            nodes = await self._means.host.nodes()
        except Unavailable:  # then nothing is known of any
            return
        for node_id in self._services.keys() - {node.id for node in nodes}:
            self._events.note(f"the node of {self._services[node_id].node.service} was lost")
            await self._forget(node_id)
        for node in nodes:
            if node.is_leaving and node.id in self._services and node.id not in self._leaving and self._on_leaving:
                self._leaving.add(node.id)
                self._tasks.begin(self._drain(node, self._on_leaving))

    async def _drain(self, node: RayNode, drain: Callable[[RayNode], Awaitable[None]]) -> None:
        """Drains a node; retries while its workers cannot be spared, and logs the first refusal as an event."""
        self._events.note(f"Ray drains node {node.name}")
        is_refused = False
        while node.id in self._services:
            try:
                await drain(node)
                return
            except BatonError as error:
                if not is_refused:
                    self._events.note(f"node {node.name} is not drained yet: {error.message}")
                is_refused = True
            await asyncio.sleep(LOOK_EVERY_S)

    async def _forget(self, node_id: str) -> None:
        service = self._services.pop(node_id, None)
        if service is not None:
            service.opening.cancel()
            await service.end()
