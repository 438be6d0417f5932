"""The nodes that host workers: each has a service, which comes with its first worker and is forgotten with the node."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.controller.event_log import EventLog
from deploy.controller.singleton import Singleton
from deploy.controller.tasks import Tasks, persist, repeat
from deploy.plan.cluster_plan import ClusterPlan, Home
from deploy.plan.resources import RayNode, service_of
from deploy.processes.atomic_file import AtomicFile
from wire.errors import BatonError, Unavailable
from wire.settings import from_json, to_json

LOOK_EVERY_S = 3.0
SHARE_TIMEOUT_S = 10.0
SUFFIX = ".home"
TARGET = "deploy.actors.node:NodeActor"


class Nodes:
    """The services of nodes. A task for each makes another in its place when it dies."""

    def __init__(
        self,
        plan: ClusterPlan,
        host: ActorHost,
        events: EventLog,
        on_leaving: Callable[[RayNode], Awaitable[None]] | None = None,
    ) -> None:
        """on_leaving: drains a node with a service, as Ray was told to; called again while it raises BatonError."""
        self._on_leaving = on_leaving
        self._leaving: set[str] = set()
        self._tasks = Tasks()
        self._plan = plan
        self._host = host
        self._events = events
        self._run_dir = Path(plan.run_dir)
        self._homes: dict[str, asyncio.Future[Home]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._services: dict[str, tuple[Home, Singleton]] = {}

    async def join(self, node: RayNode) -> Home:
        """Returns a node's home once its service serves; makes the service if there is none.

        Raises ConfigError, naming the node, where nothing fits; Unavailable if the service does not start.
        """
        if node.id not in self._homes:
            self._homes[node.id] = asyncio.create_task(self._open(node))
        opening = self._homes[node.id]
        await asyncio.wait([opening])
        if opening.cancelled():
            raise Unavailable(f"node {node.name} was lost")
        return opening.result()

    async def find(self, name: str) -> RayNode | None:
        """Finds a node that has a service by its name, which has an `@`; waits for services that are about to start."""
        if "@" not in name or not self._homes:
            return None
        done, _ = await asyncio.wait(self._homes.values())
        nodes = (one.result().node for one in done if not (one.cancelled() or one.exception()))
        return next((node for node in nodes if node.name == name), None)

    async def close(self, node: RayNode) -> None:
        """Ends the service of a node that hosts no worker any more."""
        await self._forget(node.id)
        self._events.note(f"node {node.name} is drained: its Ray can be stopped")

    async def share(self, plan: ClusterPlan) -> None:
        """Shares the arenas among tenants as a new plan says; a service that starts again does, too.

        Raises Unavailable for a service that does not answer.
        """
        self._plan = plan
        for home, service in self._services.values():
            service.config_json = to_json(plan.node_config(home))
        names, told = [service.name for _, service in self._services.values()], json.dumps(plan.shares)
        await asyncio.gather(*(self._host.call(name, "set_shares", told, timeout_s=SHARE_TIMEOUT_S) for name in names))

    def take_over(self) -> None:
        """Goes on with the services that an earlier controller has left."""
        for path in self._run_dir.glob(f"*{SUFFIX}"):
            home = AtomicFile(path).recall(lambda text: from_json(Home, text, "home"))
            if home is not None:  # else the node's next worker makes another
                self._homes[home.node.id] = asyncio.create_task(self._reopen(home))

    async def watch(self) -> None:
        """Forgets nodes that Ray has lost, and drains nodes that Ray drains, until cancelled."""
        try:
            await repeat("the care for the nodes", self._look, self._events)
        finally:
            self._tasks.cancel()

    async def end(self) -> None:
        """Ends all services."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*(self._host.end(service_of(node_id)) for node_id in self._homes))

    async def _open(self, node: RayNode) -> Home:
        try:
            service = self._service(node)
            home = Home(node, self._plan.machine or await self._host.inspect(service.name))
            service.config_json = to_json(self._plan.node_config(home))
            home = replace(home, block_address=json.loads(await service.start())["block_address"])
        except BaseException:
            self._homes.pop(node.id, None)
            await self._host.end(node.service)
            raise
        self._record(node.id).try_write(to_json(home).encode())
        self._begin_watch(home, service)
        self._begin_sharing(service)
        return home

    async def _reopen(self, home: Home) -> Home:
        service = self._service(home.node)
        service.config_json = to_json(self._plan.node_config(home))
        await service.take_over()
        self._begin_watch(home, service)
        self._begin_sharing(service)
        return home

    def _begin_sharing(self, service: Singleton) -> None:
        """Tells a service the shares, which may have changed since it was given its settings; not once it is gone."""

        async def tell() -> None:
            if any(known is service for _, known in self._services.values()):
                shares = json.dumps(self._plan.shares)
                await self._host.call(service.name, "set_shares", shares, timeout_s=SHARE_TIMEOUT_S)

        self._tasks.begin(persist(f"sharing {service.name}", tell, self._events))

    def _service(self, node: RayNode) -> Singleton:
        return Singleton(node.service, TARGET, "", node.id, self._host, self._run_dir, self._events)

    def _begin_watch(self, home: Home, service: Singleton) -> None:
        def is_back() -> None:
            """Lets workers to come know the port of the service, which may be another one."""
            answer = json.loads(service.answer or "{}")
            self._homes[home.node.id] = opened = asyncio.get_running_loop().create_future()
            opened.set_result(replace(home, block_address=answer.get("block_address", home.block_address)))
            self._record(home.node.id).try_write(to_json(opened.result()).encode())

        service.config_json = to_json(self._plan.node_config(home))  # with the address that workers know
        self._services[home.node.id] = home, service
        self._watches[home.node.id] = asyncio.create_task(service.watch(on_restart=is_back))

    def _record(self, node_id: str) -> AtomicFile:
        return AtomicFile(self._run_dir / f"{service_of(node_id)}{SUFFIX}")

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            nodes = await self._host.nodes()
        except Unavailable:  # then nothing is known of any
            return
        for node_id in self._homes.keys() - {node.id for node in nodes}:
            self._events.note(f"the node of {service_of(node_id)} was lost")
            await self._forget(node_id)
        for node in nodes:
            if node.is_leaving and node.id in self._homes and node.id not in self._leaving and self._on_leaving:
                self._leaving.add(node.id)
                self._tasks.begin(self._drain(node, self._on_leaving))

    async def _drain(self, node: RayNode, drain: Callable[[RayNode], Awaitable[None]]) -> None:
        """Drains a node; tries again while its workers cannot be spared, and notes the first refusal."""
        self._events.note(f"Ray drains node {node.name}")
        is_refused = False
        while node.id in self._homes:
            try:
                await drain(node)
                return
            except BatonError as error:
                if not is_refused:
                    self._events.note(f"node {node.name} is not drained yet: {error.message}")
                is_refused = True
            await asyncio.sleep(LOOK_EVERY_S)

    async def _forget(self, node_id: str) -> None:
        if node_id not in self._homes:
            return
        self._homes.pop(node_id).cancel()
        self._services.pop(node_id, None)
        if node_id in self._watches:
            self._watches.pop(node_id).cancel()
        self._record(node_id).path.unlink(missing_ok=True)
        await self._host.end(service_of(node_id))
