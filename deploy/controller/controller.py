"""The controller: one detached actor that starts a cluster, keeps it whole, resizes it and ends it.

It is the only actor that Ray restarts. A new controller finds the other actors by their names and in its predecessor's
records, and goes on with them: no request notices.
"""

import asyncio
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from deploy.actors.ray_host import RayHost
from deploy.controller.event_log import EventLog
from deploy.controller.fleet import Fleet
from deploy.controller.gateways import Gateways
from deploy.controller.nodes import Nodes
from deploy.controller.pools import Pools
from deploy.controller.singleton import Singleton
from deploy.controller.tasks import Tasks, persist, repeat
from deploy.local import run_dir
from deploy.local.key_file import KeyFile, LastKeys
from deploy.plan.authority import Authority
from deploy.plan.cluster_plan import CONTROLLER, ClusterPlan
from deploy.plan.resources import RayNode
from deploy.processes.atomic_file import AtomicFile
from deploy.processes.logs import start_logging
from deploy.processes.process import record_own, recorded_names
from router.config import LOOPBACK
from wire.errors import BatonError, ConfigError
from wire.ids import WorkerId
from wire.settings import from_json, to_json
from wire.trust.key_ring import NO_CALLER, KeyList

ROUTER = "router.actor:RouterActor"
START_TIMEOUT_S = 1800.0
KEYS_TIMEOUT_S = 10.0
RENEW_EVERY_S = 3600.0
SCALE_TIMEOUT_S = 570.0
"""Less than the router waits for an answer."""


class Controller:
    """The actor's object. Its calls carry text only: JSON, or the id of a worker."""

    def __init__(self, plan_json: str) -> None:
        """Raises ConfigError."""
        start_logging(CONTROLLER)
        plan = from_json(ClusterPlan, plan_json, "plan")
        self._run_dir = folder = Path(plan.run_dir)
        self._events = EventLog(time.monotonic)
        plan = plan.under(authority_of(folder, self._events)) if plan.wants_tls else plan
        self._keys = LastKeys(KeyFile(Path(plan.key_file)), AtomicFile(folder / "keys.json"))
        self._keys_problem = ""
        self._tasks = Tasks()
        self._plan = plan = plan.with_keys(self._first_keys())
        self._host = RayHost(folder)
        left = [name for name in self._host.names() if name != CONTROLLER]
        known = recorded_names(folder)
        record_own(folder, CONTROLLER)
        self._nodes = Nodes(plan, self._host, self._events, self._ray_drains)
        here = ray.get_runtime_context().get_node_id()
        self._router = Singleton("router", ROUTER, to_json(plan.router), here, self._host, folder, self._events)
        self._gateways = Gateways(plan.num_gateways, here, self._host, folder, self._events)
        self._keep_ports()
        record = AtomicFile(folder / "pools.json")
        has_predecessor = bool(left) or os.path.lexists(record.path)
        pools = record.recall(Pools.from_json)
        if pools is None:
            pools = Pools.recovered(plan.config.pools, left, known)
            if has_predecessor:
                sizes = f"{pools.sizes.prefill} prefill and {pools.sizes.decode} decode workers"
                self._events.note(f"pools.json is damaged or lost: the pools have {sizes} now, by the workers found")
        self._fleet = Fleet(pools, self._host, plan, self._nodes.join, self._events, record)
        if has_predecessor:
            self._tasks.begin(self._take_over())

    async def start(self) -> str:
        """Returns the addresses of router and gateways, `{"address", ..., "http_address"}`, when the cluster serves.

        Raises BatonError, with the reason, if any part does not start; `shutdown` ends the parts that did.
        """
        self._tasks.begin(self._fleet.run())
        addresses, *_ = await asyncio.gather(self._router.start(), self._open_only_node())
        self._keep_ports()
        http, _ = await asyncio.gather(self._gateways.start(), self._fleet.settle(START_TIMEOUT_S))
        self._keep_ports()
        self._watch()
        self._events.note("the cluster serves")
        return json.dumps(json.loads(addresses) | json.loads(http))

    async def scale(self, sizes_json: str) -> str:
        """Takes an order, `{"prefill", "decode"}`, null leaving a pool as it is; returns its numbers, for `scaled`."""
        return json.dumps(await self._fleet.resize(**json.loads(sizes_json)))

    async def scaled(self, order_json: str) -> str:
        """Returns `{"prefill", "decode"}`, the workers there are, when the order is carried out."""
        return json.dumps(asdict(await self._fleet.scaled(json.loads(order_json), SCALE_TIMEOUT_S)))

    async def drain(self, name: str) -> str:
        """Begins to take out a worker, by its id, or all of a node, by its name; no others take their place.

        Returns `{}`.
        """
        node = await self._nodes.find(name)
        await (self._fleet.drain(WorkerId(name)) if node is None else self._fleet.drain_node(node))
        return "{}"

    async def drained(self, name: str) -> str:
        """Returns `{}` when the worker, or every worker of the node, has finished its requests and is gone.

        A node's service goes last.
        """
        node = await self._nodes.find(name)
        if node is None:
            await self._fleet.drained(WorkerId(name), SCALE_TIMEOUT_S)
        else:
            await self._fleet.drained_node(node, SCALE_TIMEOUT_S)
            await self._nodes.close(node)
        return "{}"

    async def worker_lost(self, worker_id: str) -> str:
        """Probes a worker that the router cannot reach, and replaces it if it is dead. Returns `{}`."""
        await self._fleet.suspect(WorkerId(worker_id))
        return "{}"

    async def report(self) -> str:
        """Returns `{"events": [{"age_s", "text"}], "problems": [text]}`, the newest event last."""
        problems = [self._keys_problem] if self._keys_problem else []
        return json.dumps({"events": json.loads(self._events.encode()), "problems": problems})

    async def reload_keys(self) -> str:
        """Returns `{}` when router, gateways, nodes go by the keys in the file.

        Raises ConfigError or Unavailable, and tries again until they do.
        """
        try:
            await self._reload_keys()
        except BatonError as error:
            self._begin_reloading(f"{error.message}: not every part goes by the keys in the file")
            raise
        return "{}"

    async def shutdown(self) -> str:
        """Returns `{}`, then ends every actor of the cluster, this one last."""
        self._tasks.cancel()
        self._tasks.begin(self._end())
        return "{}"

    async def _take_over(self) -> None:
        self._events.note("the controller was lost, and is back")
        self._nodes.take_over()
        await persist("the care for the workers", self._fleet.take_over, self._events)
        self._tasks.begin(self._fleet.run())
        await self._router.take_over()
        self._keep_ports()
        self._begin_telling_keys("router")
        await self._gateways.take_over()
        self._keep_ports()
        for name in self._gateways.names:
            self._begin_telling_keys(name)
        self._watch()

    async def _open_only_node(self) -> None:
        """Starts a node's service beside its workers, where there is no choice of nodes."""
        if self._plan.is_alone:
            await asyncio.gather(*(self._nodes.join(node) for node in await self._host.nodes()))

    async def _renew_folder(self) -> None:
        await asyncio.to_thread(run_dir.renew, self._run_dir)
        await asyncio.sleep(RENEW_EVERY_S)

    def _watch(self) -> None:
        self._tasks.begin(repeat("the care for the run folder", self._renew_folder, self._events))
        self._tasks.begin(self._router.watch(on_restart=self._introduce))
        self._gateways.watch(self._tasks, on_restart=self._begin_telling_keys)
        if not self._plan.is_alone:
            self._tasks.begin(self._nodes.watch())

    def _introduce(self) -> None:
        """Tells a new router its workers, and the keys that may have changed while it started."""
        self._fleet.introduce()
        self._begin_telling_keys("router")

    def _begin_telling_keys(self, name: str) -> None:
        self._tasks.begin(persist(f"telling the {name} the keys", lambda: self._tell_keys(name), self._events))

    def _first_keys(self) -> KeyList:
        """Returns the keys of the file; the ones that a predecessor read last, if the file cannot be used."""
        try:
            return self._keys.read()
        except ConfigError as error:
            recalled = self._keys.recall()
            what = "no caller comes in" if recalled == NO_CALLER else "the keys read last stay in force"
            self._begin_reloading(f"{error.message}: {what}")
            return recalled

    def _begin_reloading(self, problem: str) -> None:
        is_begun, self._keys_problem = bool(self._keys_problem), problem
        if not is_begun:
            self._tasks.begin(persist("going by the file of keys", self._reload_keys, self._events))

    async def _reload_keys(self) -> None:
        self._plan = self._plan.with_keys(self._keys.read())
        self._keep_ports()
        doors = ("router", *self._gateways.names)
        await asyncio.gather(*map(self._tell_keys, doors), self._nodes.share(self._plan))
        self._keys_problem = ""

    async def _tell_keys(self, name: str) -> None:
        await self._host.call(name, "set_keys", to_json(self._plan.router.keys), timeout_s=KEYS_TIMEOUT_S)

    async def _ray_drains(self, node: RayNode) -> None:
        await self.drain(node.name)
        await self.drained(node.name)

    def _keep_ports(self) -> None:
        """Gives the next router, and the next gateways, the ports of the ones before; gateways the router's too."""
        if self._router.answer is None:
            return
        addresses = json.loads(self._router.answer)
        own = ("operator", "metrics", "local")
        names = {"grpc_port": "address"} | {f"{name}_port": f"{name}_address" for name in own}
        ports: dict[str, Any] = {port: _port(addresses[name]) for port, name in names.items() if addresses[name]}
        listeners = replace(self._plan.router.listeners, **ports)
        self._router.config_json = to_json(replace(self._plan.router, listeners=listeners))
        if self._plan.gateway is not None:
            given = {"address": addresses["local_address"], "metrics_address": addresses["metrics_address"]}
            self._gateways.configure(replace(self._plan.gateway, **given))

    async def _end(self) -> None:
        await self._fleet.end()
        await asyncio.gather(self._nodes.end(), *map(self._host.end, ("router", *self._gateways.names)))
        ray.kill(ray.get_runtime_context().current_actor)


def authority_of(folder: Path, events: EventLog) -> Authority:
    """Returns the authority of a cluster; its first controller makes it, in a file that its user alone can read.

    Makes another where the file is damaged, which processes of before do not trust.
    """
    record = AtomicFile(folder / "authority.json")
    record.create(to_json(Authority.make()).encode())
    if (known := record.recall(_usable_authority)) is not None:
        return known
    events.note("authority.json is damaged: processes that start from now on are strangers to those that run")
    made = Authority.make()
    record.try_write(to_json(made).encode())
    return made


def _usable_authority(text: str) -> Authority:
    """Reads an authority that can certify. Raises ConfigError or ValueError for any other."""
    authority = from_json(Authority, text, "authority")
    authority.issue(CONTROLLER, LOOPBACK)
    return authority


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
