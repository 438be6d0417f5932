"""The frontends of a cluster: the routers, each with ports of its own, and equal gateways behind one HTTP port.

With `ray.standby_frontends` all but the first of each are standbys: they share a node beside the head, and outlive it.
A gateway asks the routers of its own node alone, by their ports for this machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from deploy.actors.actor_host import ActorHost
from deploy.controller.supervised import KeptActor, Supervision, Tasks
from deploy.deadlines import KEYS_AT_DOOR_S, PROBE_S
from deploy.plan.cluster_plan import ClusterPlan
from deploy.processes.process import GATEWAY
from wire.errors import BatonError, Unavailable
from wire.pools import Addresses
from wire.served_model import ServedModel
from wire.typed_reader import to_json

ROUTER_TARGET = "router.actor:RouterActor"
GATEWAY_TARGET = "gateway.actor:GatewayActor"


class Standby(KeptActor):
    """A frontend beside the head. `choose` tells the node of each start, and raises Unavailable if there is none."""

    def __init__(
        self,
        name: str,
        target: str,
        config: Callable[[], str],
        choose: Callable[[], Awaitable[str]],
        means: Supervision,
    ) -> None:
        super().__init__(name, target, config, "", means)
        self._choose = choose

    def prepare(self) -> None:
        """Adopts the actor of an earlier controller; `serve` launches one elsewise."""
        self._host.adopt(self.name)

    async def serve(self) -> None:
        self._node_id = await self._choose()
        await super().serve()


class Frontends:
    """The routers and the gateways, restarted when lost. A restart takes the earlier port; gateways share a port."""

    def __init__(self, plan: ClusterPlan, node_id: str, means: Supervision, model: Callable[[], ServedModel]) -> None:
        """model: returns the model with which a router starts, which decode workers have."""
        self.plan = plan
        self._model = model
        self._host: ActorHost = means.host
        self._standby_node = ""

        def make(index: int, name: str, target: str, config: Callable[[], str]) -> KeptActor:
            if index and plan.config.ray.standby_frontends:
                return Standby(name, target, config, self._choose_node, means)
            return KeptActor(name, target, config, node_id, means)

        self._routers = [
            make(index, name, ROUTER_TARGET, partial(self._router_json, index))
            for index, name in enumerate(plan.routers)
        ]
        names = [f"{GATEWAY}-{index}" for index in range(plan.num_gateways)]
        self._gateways = [
            make(index, name, GATEWAY_TARGET, partial(self._gateway_json, index)) for index, name in enumerate(names)
        ]
        for door in self._doors:
            door.prepare()

    @property
    def addresses(self) -> Addresses:
        """The addresses of routers and gateways, present or last; the operator's are the head's alone."""
        here = _joined(self._beside(self._routers[0]))
        return replace(_joined(self._routers), operator=here.operator, local=here.local, http=self._http_address)

    async def start_routers(self) -> None:
        """Starts the routers. Raises the errors of `KeptActor.serve`."""
        await asyncio.gather(*(router.serve() for router in self._routers))

    async def start_gateways(self) -> None:
        """Starts the first gateway, which takes the port, then the others. Raises the errors of `KeptActor.serve`."""
        for gateway in self._gateways[:1]:
            await gateway.serve()
        await asyncio.gather(*(gateway.serve() for gateway in self._gateways[1:]))

    async def take_over(self, on_found: Callable[[str], None]) -> None:
        """Takes over the running frontends, the routers first; calls `on_found` with the name of each."""
        for door in self._doors:
            if isinstance(door, Standby) and not self._standby_node:
                with suppress(BatonError):  # it did not outlive the earlier controller
                    self._standby_node = await door.node_id(PROBE_S)
        for doors in (self._routers, self._gateways):
            await asyncio.gather(*(door.take_over() for door in doors))
            for door in doors:
                on_found(door.name)

    def keep(self, tasks: Tasks, on_restart: Callable[[str], None]) -> None:
        """Begins to restart lost frontends; calls `on_restart` with the name of each that serves again."""
        for door in self._doors:
            tasks.begin(door.keep(partial(on_restart, door.name)))

    async def tell_keys(self) -> None:
        """Gives the plan's keys to routers and gateways. Raises the errors of `ActorHost.call`."""
        await asyncio.gather(*(self.tell_keys_to(door.name) for door in self._doors))

    async def tell_keys_to(self, name: str) -> None:
        """Gives the plan's keys to one frontend. Raises the errors of `ActorHost.call`."""
        await self._host.call(name, "set_keys", to_json(self.plan.router.keys), timeout_s=KEYS_AT_DOOR_S)

    async def end(self) -> None:
        await asyncio.gather(*(door.end() for door in self._doors))

    @property
    def _doors(self) -> list[KeptActor]:
        return [*self._routers, *self._gateways]

    @property
    def _http_address(self) -> str:
        return next((one.answer.http for one in self._gateways if one.answer is not None), "")

    def _router_json(self, index: int) -> str:
        known = self._routers[index].answer or Addresses()
        settings = replace(self.plan.router.settings.at(index), **_ports(grpc=known.public, metrics=known.metrics))
        kept = _ports(local=known.local, operator=known.operator)
        return to_json(replace(self.plan.router, model=self._model(), settings=settings, **kept))

    def _beside(self, door: KeptActor) -> list[KeptActor]:
        """Lists the routers on the node of a frontend."""
        return [router for router in self._routers if isinstance(router, Standby) is isinstance(door, Standby)]

    async def _choose_node(self) -> str:
        """Chooses a node beside the head, the same for all standbys, which keep it. Raises Unavailable."""
        others = [node for node in await self._host.nodes() if not node.is_head]
        staying = sorted(node.id for node in others if not node.is_leaving)
        if self._standby_node not in {node.id for node in others}:
            if not staying:
                raise Unavailable("ray.standby_frontends wants a node beside the head, and none is there")
            self._standby_node = staying[0]
        return self._standby_node

    def _gateway_json(self, index: int) -> str:
        known, http = _joined(self._beside(self._gateways[index])), self._http_address
        assert self.plan.gateway is not None
        config = replace(
            self.plan.gateway,
            address=known.local,
            metrics_address=known.metrics,
            operator_address=known.operator,
            name=self._gateways[index].name,
            joined_port=_port(http) if http else None,
            metrics_folder=self.plan.run_dir,
        )
        return to_json(config)


def _joined(routers: Sequence[KeptActor]) -> Addresses:
    """Joins the addresses of routers, present or last, by commas."""
    known = [astuple(router.answer or Addresses()) for router in routers]
    return Addresses(*(",".join(filter(None, of_each)) for of_each in zip(*known, strict=True)))


def _ports(**addresses: str) -> dict[str, Any]:
    """Returns the ports of known addresses, to be taken again."""
    return {f"{name}_port": _port(address) for name, address in addresses.items() if address}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
