"""The controller: one detached actor that starts a cluster, keeps it whole, resizes it and ends it.

It is the only actor that Ray restarts. A new controller finds the other actors by name and in its predecessor's
records, and takes them over: no request notices.
"""

import asyncio
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.controller.fleet import Fleet
from deploy.controller.frontends import Frontends
from deploy.controller.key_distribution import KeyDistribution
from deploy.controller.nodes import Nodes
from deploy.controller.pools import Pools
from deploy.controller.supervised import EventLog, Supervision, Tasks, persist, repeat
from deploy.deadlines import CLUSTER_START_S, ORDER_IN_CONTROLLER_S
from deploy.local import run_dir
from deploy.local.key_file import KeyFile, LastKeys
from deploy.plan.authority import Authority
from deploy.plan.cluster_plan import CONTROLLER, ClusterPlan
from deploy.plan.machine import RayNode
from deploy.processes.atomic_file import AtomicFile
from deploy.processes.logs import start_logging
from deploy.processes.process import record_own, recorded_names
from deploy.roll.revisions import FILE, Revision, Revisions, read_revisions
from deploy.roll.roll import Roll
from deploy.scaling.scaler import Scaler
from router.config import LOOPBACK
from router.workers.controller_port import ControllerReport
from wire.ids import WorkerId
from wire.pools import OrderNumbers, PoolSizes, SizesAsked
from wire.trust.key_ring import KeyList
from wire.typed_reader import from_json, to_json, to_message

RENEW_EVERY_S = 3600.0


class Predecessor:
    """The actors and records in a run folder. Made before the new controller writes its own record there."""

    def __init__(self, run_dir: Path, host: ActorHost, events: EventLog) -> None:
        self.pools_record = AtomicFile(run_dir / "pools.json")
        self._authority_record = AtomicFile(run_dir / "authority.json")
        self._events = events
        self._left = [name for name in host.names() if name != CONTROLLER]
        self._known = recorded_names(run_dir)
        self.was_there = bool(self._left) or os.path.lexists(self.pools_record.path)
        self.problem = ""

    def pools(self, planned: PoolSizes, roll: Roll) -> Pools:
        """Returns the recorded pools; rebuilt from the workers found if the record is damaged or lost.

        roll: the revision of rebuilt pools.
        """
        if (recorded := self.pools_record.recall(Pools.from_json)) is not None:
            return recorded
        pools = Pools.recovered(planned, self._left, self._known, roll)
        if self.was_there:
            sizes = f"{pools.sizes.prefill} prefill and {pools.sizes.decode} decode workers"
            self._events.note(f"pools.json is damaged or lost: the pools have {sizes} now, by the workers found")
        return pools

    def authority(self) -> Authority:
        """Returns the cluster's authority; the first controller makes it, in a file private to its user.

        If that file is damaged or lost, makes a new authority, which earlier processes do not trust: an event, and the
        `problem` from then on. Raises OSError if the first authority cannot be written.
        """
        if (known := self._authority_record.recall(_usable_authority)) is not None:
            return known
        made = Authority.make()
        if not self.was_there:
            self._authority_record.write(to_json(made).encode())
        else:
            self._authority_record.try_write(to_json(made).encode())
            lost = "authority.json is damaged or lost: processes that start from now on are strangers to those that run"
            self._events.note(lost)
            self.problem = f"{lost}: `baton down` and `baton up` mend it"
        return made


def _usable_authority(text: str) -> Authority:
    """Reads an authority. Raises ConfigError or ValueError if it cannot certify."""
    authority = from_json(Authority, text, "authority")
    authority.issue(CONTROLLER, LOOPBACK)
    return authority


class Controller:
    """The controller's object in its actor. Calls carry text only: JSON of `wire.pools`, or the id of a worker."""

    def __init__(self, plan_json: str, host: ActorHost) -> None:
        """Raises ConfigError. host: as it was when the cluster started, for each controller of the cluster."""
        start_logging(CONTROLLER)
        plan = from_json(ClusterPlan, plan_json, "plan")
        self._run_dir = folder = Path(plan.run_dir)
        self._events = EventLog(time.monotonic)
        self._tasks = Tasks()
        self._predecessor = Predecessor(folder, host, self._events)
        if self._predecessor.was_there and not (folder.exists() or os.path.lexists(plan.state_file)):
            self._tasks.begin(self._end_remains(host))
            return
        record_own(folder, CONTROLLER)
        plan = plan.under(self._predecessor.authority()) if plan.wants_tls else plan
        self._keys = KeyDistribution(
            LastKeys(KeyFile(Path(plan.key_file)), AtomicFile(folder / "keys.json")),
            self._go_by,
            self._tasks,
            self._events,
        )
        file = AtomicFile(folder / FILE)
        is_known, self._revisions = bool(read_revisions(file)), Revisions(plan, file)
        self._plan = plan = replace(plan.with_keys(self._keys.first()), versions=self._revisions.models)
        self._means = means = Supervision(host, folder, self._events)
        self._nodes = Nodes(plan, means, lambda tag: self._fleet.plan_with(tag), self._ray_drains)
        self._frontends = Frontends(plan, host.own_node, means, lambda: self._fleet.served)
        record, revisions = self._predecessor.pools_record, self._revisions
        pools = self._predecessor.pools(plan.config.pools, revisions.recovered)
        if pools.roll.last and not is_known:
            self._events.note(f"{FILE} is damaged or lost: new workers have the settings of `baton up`")
        self._fleet = Fleet(
            pools=pools, plan=plan, join=self._nodes.join, means=means, record=record, revisions=revisions
        )
        slo, fleet = plan.config.slo, self._fleet
        self._scaler = (
            Scaler(slo, plan.routers, means, lambda: pools.sizes, fleet.resize, fleet.workers.start_duration)
            if slo.roles
            else None
        )
        if self._predecessor.was_there:
            self._tasks.begin(self._take_over())

    async def start(self) -> str:
        """Returns the Addresses when the cluster serves.

        Raises BatonError, with the reason, if any part does not start; `shutdown` ends the parts that did.
        """
        self._tasks.begin(self._fleet.run())
        await asyncio.gather(self._frontends.start_routers(), self._open_only_node())
        await asyncio.gather(self._frontends.start_gateways(), self._fleet.settle(CLUSTER_START_S))
        self._watch()
        self._events.note("the cluster serves")
        return to_json(self._frontends.addresses)

    async def scale(self, sizes_json: str) -> str:
        """Takes an order, SizesAsked; returns the OrderNumbers to pass to `scaled`."""
        asked = from_json(SizesAsked, sizes_json, "sizes")
        return to_message(OrderNumbers(await self._fleet.resize(asked.prefill, asked.decode)))

    async def scaled(self, order_json: str) -> str:
        """Waits until the order, OrderNumbers, is carried out; returns the present PoolSizes."""
        order = from_json(OrderNumbers, order_json, "order")
        return to_message(await self._fleet.scaled(order.numbers, ORDER_IN_CONTROLLER_S))

    async def roll(self, revision_json: str) -> str:
        """Begins to roll the workers to a Revision; returns its number, to pass to `rolled`."""
        asked = from_json(Revision, revision_json, "revision")
        number = await self._fleet.roll(asked.config, asked.model)
        self._plan = replace(self._plan, versions=self._revisions.models)
        self._tasks.begin(persist("sharing the arenas", lambda: self._nodes.share(self._plan), self._events))
        return str(number)

    async def rolled(self, number: str) -> str:
        """Waits until all workers have the revision of a number, and returns it."""
        await self._fleet.rolled(int(number), ORDER_IN_CONTROLLER_S)
        return number

    async def drain(self, name: str) -> None:
        """Begins to drain a worker, by id, or all workers of a node, by name, which others replace elsewhere."""
        node = await self._nodes.find(name)
        if node is None:
            self._fleet.drain(WorkerId(name))
        else:
            await self._fleet.drain_node(node)
        self._events.note(f"{name} drains")

    async def drained(self, name: str) -> None:
        """Waits until the worker, or every worker of the node, has finished its requests and ended.

        A node's service goes last.
        """
        node = await self._nodes.find(name)
        if node is None:
            await self._fleet.drained(WorkerId(name), ORDER_IN_CONTROLLER_S)
        else:
            await self._fleet.drained_node(node, ORDER_IN_CONTROLLER_S)
            await self._nodes.close(node)

    async def worker_lost(self, worker_id: str) -> None:
        """Probes a worker that the router cannot reach, and replaces it if it is dead."""
        await self._fleet.workers.probe(WorkerId(worker_id))

    async def report(self) -> str:
        """Returns a ControllerReport."""
        limits, pools = (self._scaler.problems, self._scaler.pools) if self._scaler is not None else ((), ())
        problems = (self._keys.problem, self._predecessor.problem, *limits)
        return to_message(ControllerReport(self._events.report(), tuple(filter(None, problems)), pools))

    async def reload_keys(self) -> None:
        """Waits until router, gateways and nodes use the keys in the file.

        Raises ConfigError or Unavailable, and tries again in the background until they do.
        """
        await self._keys.reload()

    async def shutdown(self) -> None:
        """Begins to end every actor of the cluster, the controller last; does not wait."""
        self._tasks.cancel()
        self._tasks.begin(self._end())

    async def _take_over(self) -> None:
        self._events.note("the controller was lost, and is back")
        self._nodes.take_over()
        await persist("the care for the workers", self._fleet.workers.take_over, self._events)
        self._tasks.begin(self._fleet.run())
        await self._frontends.take_over(on_found=self._begin_telling_keys)
        self._watch()

    async def _end_remains(self, host: ActorHost) -> None:
        """Ends the actors of a cluster that `baton down` has ended while Ray's head was away."""
        self._events.note("the cluster was ended while Ray's head was away: its last actors end now")
        for name in host.names():
            if name != CONTROLLER and host.adopt(name):
                await host.end(name)
        host.leave()

    async def _open_only_node(self) -> None:
        """Starts the only node's service while its workers start."""
        if self._plan.is_alone:
            await asyncio.gather(*(self._nodes.join(node, self._plan) for node in await self._means.host.nodes()))

    async def _renew_folder(self) -> None:
        await asyncio.to_thread(run_dir.renew, self._run_dir)
        await asyncio.sleep(RENEW_EVERY_S)

    def _watch(self) -> None:
        self._tasks.begin(repeat("the care for the run folder", self._renew_folder, self._events))
        self._frontends.keep(self._tasks, on_restart=self._introduce)
        if self._scaler is not None:
            self._tasks.begin(self._scaler.run())
        self._tasks.begin(self._nodes.watch())

    def _introduce(self, name: str) -> None:
        """Announces the workers to a new router; gives a new router or gateway the keys, which may have changed."""
        if name in self._plan.routers:
            self._fleet.introduce()
        self._begin_telling_keys(name)

    def _begin_telling_keys(self, name: str) -> None:
        step = partial(self._frontends.tell_keys_to, name)
        self._tasks.begin(persist(f"giving the {name} the keys", step, self._events))

    async def _go_by(self, listed: KeyList) -> None:
        self._frontends.plan = self._plan = self._plan.with_keys(listed)
        await asyncio.gather(self._frontends.tell_keys(), self._nodes.share(self._plan))

    async def _ray_drains(self, node: RayNode) -> None:
        await self.drain(node.name)
        await self.drained(node.name)

    async def _end(self) -> None:
        await self._fleet.workers.end()
        await asyncio.gather(self._nodes.end(), self._frontends.end())
        self._means.host.leave()
