"""The processes of the pools' workers: each is placed, started, probed while READY, drained, and ended."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from deploy.actors.actor_host import ActorHost, ask
from deploy.controller.pool import leaving
from deploy.controller.pools import Pools
from deploy.controller.supervised import EventLog, SupervisedActor, Supervision, Tasks, reason_of
from deploy.deadlines import PLACE_S, WORKER_START_S
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.machine import RayNode, require_node, service_of
from deploy.scaling.demand import START_S
from wire.errors import BatonError, Unavailable
from wire.ids import WorkerId
from wire.pools import Drained, MemberList, MembersAnswer, Role, Worker, WorkerState
from wire.served_model import ServedModel
from wire.tier import Duration
from wire.typed_reader import to_json, to_message

DRAIN_MARGIN_S = 10.0
CHANGE_GRACE_S = {Role.DECODE: 1, Role.PREFILL: 0}
"""Time for the attempts of a worker that changes to a role: prompts may end, streams go on at others by cache hits."""
ASK_EVERY_S = 0.5
SET_MEMBERS_TIMEOUT_S = 20.0
GREET_TIMEOUT_S = 10.0
WHERE_TIMEOUT_S = 10.0
TARGET = "deploy.actors.worker:PoolWorker"


log = logging.getLogger(__name__)


class RouterMembers:
    """Announces the pools to the routers. `are_announced` becomes False at each change.

    refused: the workers that a router did not take at the last announcement, with its reason. needed: the workers
    without which a router's open requests could not end; a router that does not answer needs the same as before.
    models: lists the versions that workers have, the wanted one first.
    """

    def __init__(
        self,
        pools: Pools,
        routers: Sequence[str],
        host: ActorHost,
        events: EventLog,
        models: Callable[[], tuple[ServedModel, ...]] = tuple,
    ) -> None:
        self._pools = pools
        self._routers = routers
        self._host = host
        self._events = events
        self._models = models
        self.refused: dict[WorkerId, str] = {}
        self.needed: set[WorkerId] = set()
        self._announcing = asyncio.Lock()
        self.are_announced = False

    async def announce(self) -> None:
        """Sends the sizes of the pools, and the serving and draining workers.

        `are_announced` stays False if a router does not answer, or refuses a worker.
        """
        async with self._announcing:
            self.are_announced = True  # a change during the call makes it False again
            serving = tuple(
                leaving(worker) if worker.state is WorkerState.CHANGING else worker
                for worker in self._pools
                if worker.address
            )
            members = to_message(MemberList(self._pools.sizes, serving, self._models()))
            answers = await asyncio.gather(*(self._tell(router, members) for router in self._routers))
            refused = {worker_id: reason for one in answers for worker_id, reason in one.reasons.items()}
            self.needed = {
                *(() if self.are_announced else self.needed),
                *(worker_id for one in answers for worker_id in one.needed),
            }
            self.are_announced = self.are_announced and not refused
            for worker_id, reason in refused.items() - self.refused.items():
                self._events.note(f"the router does not take worker {worker_id}: {reason}")
            self.refused = refused

    async def _tell(self, router: str, members: str) -> MembersAnswer:
        """Sends the members to a router; returns its answer, an empty one if it does not answer."""
        try:
            answers, timeout_s = MembersAnswer, SET_MEMBERS_TIMEOUT_S
            return await ask(self._host, router, "set_members", members, answers=answers, timeout_s=timeout_s)
        except BatonError as error:
            log.info("the %s does not know the workers yet: %s", router, error.message)
            self.are_announced = False
            return MembersAnswer({})


class Workers:
    """The actors of the pools. Each start and each drain is a task; `on_change` follows each change of the pools.

    plan_of: returns the plan of a worker's revision. join: waits for a node's service for the KV layout of a plan, and
    returns the node's baseline for it.
    """

    def __init__(
        self,
        pools: Pools,
        plan_of: Callable[[WorkerId], ClusterPlan],
        join: Callable[[RayNode, ClusterPlan], Awaitable[NodeBaseline]],
        means: Supervision,
        members: RouterMembers,
        on_change: Callable[[], None],
    ) -> None:
        self._pools = pools
        self._plan_of = plan_of
        self._join = join
        self._means = means
        self._events = means.events
        self._clock = means.clock
        self._members = members
        self._on_change = on_change
        self._actors: dict[WorkerId, SupervisedActor] = {}
        self._tasks = Tasks()
        self._endings = {role: Tasks() for role in Role}  # only a start of the same role waits for them
        self.failures: list[str] = []
        self.start_duration = Duration(START_S)
        """The usual time from a worker's order until it serves."""

    async def take_over(self) -> None:
        """Takes over the workers of an earlier controller, and forgets lost workers."""
        are_there = {worker: await asyncio.to_thread(self._means.host.adopt, worker.id) for worker in self._pools}
        for worker, is_there in are_there.items():
            if not is_there:
                self._pools.forget(worker.id)
                self._events.note(f"worker {worker.id} was lost")
            elif worker.state is not WorkerState.READY:
                self.begin(worker)
        if not self._pools.pool(Role.DECODE).ready:  # an empty member list would make the router drop its workers
            with suppress(TimeoutError):
                async with asyncio.timeout(GREET_TIMEOUT_S):
                    await self._tasks.wait()

    async def nodes(self) -> list[RayNode]:
        """Lists the nodes that do not drain. Raises Unavailable."""
        leaving = self._pools.leaving
        return [one for one in await self._means.host.nodes() if not (one.is_leaving or one.id in leaving)]

    async def on_node(self, node_id: str) -> list[WorkerId]:
        """Lists the workers on a node, also draining workers; a worker that does not answer is on no node."""
        workers = [worker.id for worker in self._pools]
        places = await asyncio.gather(*map(self._node_of, workers))
        return [worker_id for worker_id, place in zip(workers, places, strict=True) if place == node_id]

    def begin(self, worker: Worker) -> None:
        """Begins to start a STARTING worker, to have a CHANGING one change, or to drain and end a DRAINING one."""
        acts = {WorkerState.STARTING: self._start, WorkerState.CHANGING: self._change}
        self._tasks.begin(acts.get(worker.state, self._dismiss)(worker))

    async def probe(self, worker_id: WorkerId) -> None:
        """Probes a READY worker, and drops it once it is lost; STARTING and DRAINING workers report by their tasks."""
        if not self._pools.has(worker_id, WorkerState.READY):
            return
        reason = await self._actor(worker_id).judge()
        if reason is not None and self._pools.has(worker_id, WorkerState.READY):
            self._lose(self._pools[worker_id], f"worker {worker_id} {reason}")

    async def end(self) -> None:
        """Ends all workers, without draining."""
        self._tasks.cancel()
        for worker in self._pools:
            self._endings[worker.role].begin(self._means.host.end(worker.id))
        await asyncio.gather(*(endings.wait() for endings in self._endings.values()))

    def _actor(self, worker_id: WorkerId) -> SupervisedActor:
        if worker_id not in self._actors:
            self._actors[worker_id] = SupervisedActor(worker_id, TARGET, self._means)
        return self._actors[worker_id]

    async def _node_of(self, worker_id: WorkerId) -> str:
        """Returns the id of a worker's node; "" if the worker does not answer."""
        with suppress(BatonError):
            return await self._actor(worker_id).node_id(WHERE_TIMEOUT_S)
        return ""

    async def _start(self, worker: Worker) -> None:
        """Starts a worker, once the processes of its role's lost workers are gone. Any failure is a failed start."""
        await self._endings[worker.role].wait()
        if not self._pools.has(worker.id, WorkerState.STARTING):
            return  # an order has removed it meanwhile
        began_s = self._clock()
        try:
            address = await self._serve(worker)
        except Exception as error:
            if self._pools.has(worker.id, WorkerState.STARTING):
                log.info("worker %s did not start", worker.id, exc_info=error)
                self.failures.append(f"worker {worker.id} did not start: {reason_of(error)}")
                self._lose(worker, self.failures[-1])
            return
        if self._pools.has(worker.id, WorkerState.STARTING):
            self._pools.became_ready(worker.id, address)
            self._on_change()
            self.start_duration.learn(took_s := self._clock() - began_s)
            self._events.note(f"worker {worker.id} is ready after {took_s:.1f} s")

    async def _serve(self, worker: Worker) -> str:
        """Returns the address of a worker on the node that Ray has chosen for it."""
        actor, plan = self._actor(worker.id), self._plan_of(worker.id)
        resources = plan.resources(worker.role)
        require_node(resources, await self.nodes())
        actor.launch(resources, not_on=tuple(self._pools.leaving))
        node_id = await actor.node_id(PLACE_S)
        node = next((one for one in await self._means.host.nodes() if one.id == node_id), None)
        if node is None:
            raise Unavailable("its node was lost")
        if node.id in self._pools.leaving:
            raise Unavailable(f"node {node.name} drains")
        config = plan.worker_config(worker, await self._join(node, plan))
        address = (await actor.start(to_json(config), WORKER_START_S)).public
        await self._serve_as(worker)  # it may have started long ago, and have changed its role since
        return address

    async def _change(self, worker: Worker) -> None:
        """Has a worker serve the pool that it is of now. A worker that does not is drained and ended, and replaced."""
        began_s = self._clock()
        await self._members.announce()
        try:
            await self._serve_as(worker)
        except BatonError as error:
            self._events.note(f"worker {worker.id} does not change its role: {error.message}")
            if self._pools.has(worker.id, WorkerState.CHANGING):
                self.begin(self._pools.dismiss(worker.id))
                self._on_change()
            return
        if self._pools.has(worker.id, WorkerState.CHANGING):  # else it has been dismissed meanwhile
            self._pools.became_ready(worker.id, worker.address)
            self._on_change()
            self._events.note(
                f"worker {worker.id} serves {worker.role.value} now, after {self._clock() - began_s:.1f} s"
            )

    async def _serve_as(self, worker: Worker) -> None:
        """Has a worker serve its role; does nothing if it does. Raises BatonError."""
        host, role, grace_s = self._means.host, worker.role.value, CHANGE_GRACE_S[worker.role]
        timeout_s = grace_s + DRAIN_MARGIN_S
        left = await ask(host, worker.id, "serve_as", role, grace_s, answers=Drained, timeout_s=timeout_s)
        self._note_handed_over(worker.id, left)

    async def _dismiss(self, worker: Worker) -> None:
        """Drains a worker, if it serves and no router needs it, and ends it.

        A draining node's worker stays until the node's blocks are fetched or copied, for decode finds them through it.
        """
        if worker.address:
            await self._members.announce()
            await self._until_unneeded(worker.id)
            plan = self._plan_of(worker.id)
            grace_s = plan.config.worker.drain_grace_s
            place, until_s = await self._node_of(worker.id), self._clock() + grace_s
            self._note_handed_over(worker.id, await self._drain(worker.id, until_s))
            if place in self._pools.leaving:
                left = await self._drain(service := service_of(place, plan.layout_tag), until_s)
                if left != Drained():
                    self._events.note(f"{service} goes with {left.unfetched} prompts and {left.unwritten} blocks")
            self._pools.finished(worker.id)
            await self._members.announce()
        await self._means.host.end(worker.id)
        self._pools.forget(worker.id)
        self._actors.pop(worker.id, None)
        self._on_change()
        self._events.note(f"worker {worker.id} has left")

    async def _until_unneeded(self, worker_id: WorkerId) -> None:
        """Waits while a router needs a worker, for requests that were open before it was announced as DRAINING.

        It does not wait for a worker that is lost, or whose node Ray drains.
        """
        until_s = self._clock() + self._plan_of(worker_id).config.router.max_deadline_s
        if worker_id in self._members.needed:
            self._events.note(f"worker {worker_id} is the last of its model's version, and stays for open requests")
        while worker_id in self._members.needed and self._clock() < until_s and not await self._is_going(worker_id):
            await asyncio.sleep(ASK_EVERY_S)
            await self._members.announce()

    async def _is_going(self, worker_id: WorkerId) -> bool:
        """Probes a worker; tells whether it is lost, or Ray drains its node: that drain may have a deadline."""
        with suppress(Unavailable):
            leaving = [one.id for one in await self._means.host.nodes() if one.is_leaving]
            return await self._actor(worker_id).judge() is not None or await self._node_of(worker_id) in leaving
        return False

    async def _drain(self, name: str, until_s: float) -> Drained:
        """Drains an actor; if it does not answer, notes its loss."""
        grace_s = max(0, int(until_s - self._clock()))
        try:
            return await ask(
                self._means.host, name, "drain", grace_s, answers=Drained, timeout_s=grace_s + DRAIN_MARGIN_S
            )
        except BatonError as error:
            self._events.note(f"{name} was lost while draining: {error.message}")
            return Drained()

    def _note_handed_over(self, worker_id: WorkerId, left: Drained) -> None:
        if left.unfinished:
            self._events.note(f"worker {worker_id} handed over {left.unfinished} requests")

    def _lose(self, worker: Worker, reason: str) -> None:
        self._events.note(reason)
        self._actors.pop(worker.id, None)
        if failure := self._pools.lost(worker.id, self._clock(), reason):
            self._events.note(failure)
        self._on_change()
        self._endings[worker.role].begin(self._means.host.end(worker.id))
