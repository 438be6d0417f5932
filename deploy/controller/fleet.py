"""The workers of a cluster: started, watched and ended as the pools ask, and announced to the router."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from operator import attrgetter

from deploy.actors.actor_host import ActorHost
from deploy.actors.liveness import PROBE_EVERY_S, FailureDetector
from deploy.controller.event_log import EventLog
from deploy.controller.pools import Pools
from deploy.controller.tasks import Tasks, reason_of, repeat
from deploy.plan.cluster_plan import ClusterPlan, Home
from deploy.plan.machine import Machine, inspect_machine
from deploy.plan.resources import RayNode, require_node, service_of
from deploy.plan.sizing import require_room
from deploy.processes.atomic_file import AtomicFile
from wire.errors import BatonError, ConfigError, DeadlineExceeded, InvalidRequest, Unavailable, WorkerNotFound
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState

PLACE_TIMEOUT_S = 180.0
"""For Ray to find room for a worker, and for its process to begin."""
START_TIMEOUT_S = 900.0
DRAIN_MARGIN_S = 10.0
TELL_TIMEOUT_S = 20.0
GREET_TIMEOUT_S = 10.0
WHERE_TIMEOUT_S = 10.0
NOT_YET = "the pools do not have the size asked for yet"
TARGETS = {Role.PREFILL: "prefill_worker.actor:PrefillActor", Role.DECODE: "decode_worker.actor:DecodeActor"}

log = logging.getLogger(__name__)


class MemberList:
    """The workers that serve, as the router is to know them. `is_announced` becomes False at every change of them."""

    def __init__(self, pools: Pools, host: ActorHost, events: EventLog) -> None:
        self._pools = pools
        self._host = host
        self._events = events
        self._refused: dict[WorkerId, str] = {}
        self._announcing = asyncio.Lock()
        self.is_announced = False

    async def announce(self) -> None:
        """Tells the router the sizes of the pools, and which workers serve and drain.

        `is_announced` stays False if it does not hear or take it.
        """
        async with self._announcing:
            self.is_announced = True  # a change during the call makes it False again
            members = [worker for worker in self._pools if worker.address]
            told = {"sizes": asdict(self._pools.sizes), "workers": [asdict(worker) for worker in members]}
            listed = json.dumps(told, default=attrgetter("value"))
            try:
                answer = await self._host.call("router", "set_members", listed, timeout_s=TELL_TIMEOUT_S)
            except BatonError as error:
                log.info("the router is not told of %d workers: %s", len(members), error.message)
                self.is_announced = False
                return
            refused: dict[WorkerId, str] = json.loads(answer)
            self.is_announced = self.is_announced and not refused
            for worker_id, reason in refused.items() - self._refused.items():
                self._events.note(f"the router does not take worker {worker_id}: {reason}")
            self._refused = refused


@dataclass
class Fleet:
    """The workers of both pools. The task of `run` looks after them; each start and each end is a task of its own."""

    pools: Pools
    host: ActorHost
    plan: ClusterPlan
    join: Callable[[RayNode], Awaitable[Home]]
    events: EventLog
    record: AtomicFile
    clock: Callable[[], float] = time.monotonic
    inspect: Callable[[], Machine] = inspect_machine

    def __post_init__(self) -> None:
        self._member_list = MemberList(self.pools, self.host, self.events)
        self._is_recorded = True
        self._detectors: dict[WorkerId, FailureDetector] = {}
        self._failures: list[str] = []
        self._tasks = Tasks()
        self._endings = {role: Tasks() for role in Role}  # of processes; only a start of the same role waits for them
        self._services: dict[WorkerId, str] = {}  # of nodes that drain, for each of their workers
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def is_settled(self) -> bool:
        """True when both pools are as asked, and the router has all of their workers."""
        return self.pools.are_as_asked and self._member_list.is_announced

    async def take_over(self) -> None:
        """Goes on with the workers that an earlier controller has left, and replaces dead ones."""
        are_there = {worker: await asyncio.to_thread(self.host.adopt, worker.id) for worker in self.pools}
        for worker, is_there in are_there.items():
            if not is_there:
                self.pools.forget(worker.id)
                self.events.note(f"worker {worker.id} was lost")
            elif worker.state is not WorkerState.READY:
                if self.pools.leaving and (place := await self._place_of(worker.id)) in self.pools.leaving:
                    self._services[worker.id] = service_of(place)
                self._tasks.begin(self._carry_out(worker))
        if not self.pools.num_ready.decode:  # a router that was told of no worker would drop those that it has
            with suppress(TimeoutError):
                async with asyncio.timeout(GREET_TIMEOUT_S):
                    await self._tasks.wait()

    async def run(self) -> None:
        """Looks after the workers until cancelled."""
        await repeat("the care for the workers", self._step, self.events)

    async def settle(self, timeout_s: float) -> None:
        """Returns when all is as asked. Raises Unavailable, with the reason, after one more failed start."""
        num_failures = len(self._failures)
        await self._wait_for(lambda: self.is_settled or len(self._failures) > num_failures, timeout_s, NOT_YET)
        if not self.is_settled:
            raise Unavailable(self._failures[-1])

    async def resize(self, prefill: int | None, decode: int | None) -> dict[str, int]:
        """Takes an order, None leaving a pool as it is; returns its numbers, for `scaled`.

        Raises InvalidRequest, or ConfigError for workers that would not fit, and then changes nothing.
        """
        if sum(astuple(self.pools.resized(prefill, decode))) > sum(astuple(self.pools.sizes)):
            nodes = await self._nodes()
            if len(nodes) == 1 and nodes[0].is_head:
                machine = await asyncio.to_thread(self.inspect)
                self._require_room_here(machine, self.pools.resized(prefill, decode))
            else:
                rooms = await asyncio.gather(*(self._room(node) for node in nodes))
                self._require_room_on(rooms, self.pools.resized(prefill, decode))
        numbers = self.pools.resize(prefill, decode)
        self._tell_of_change()
        self.events.note(f"scaling to {self.pools.sizes.prefill} prefill, {self.pools.sizes.decode} decode")
        self._wake.set()
        await self._notify()
        return numbers

    async def scaled(self, numbers: dict[str, int], timeout_s: float) -> PoolSizes:
        """Returns the number of ready workers once the orders of `resize` are carried out, in the router too.

        Raises Overtaken, Unavailable with the reason for an order that was given up, or DeadlineExceeded.
        """

        def are_scaled() -> bool:
            return self.pools.have_done(numbers) and self._member_list.is_announced

        await self._wait_for(are_scaled, timeout_s, NOT_YET)
        return self.pools.num_ready

    async def drain(self, worker_id: WorkerId) -> None:
        """Begins to take a worker out. Raises WorkerNotFound, or InvalidRequest for the last decode worker."""
        worker = self.pools.release(worker_id)
        self._tell_of_change()
        if worker is not None:
            self._tasks.begin(self._carry_out(worker))
        await self._notify()

    async def drained(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Returns when the worker is gone. Raises DeadlineExceeded."""
        await self._wait_for(lambda: worker_id not in self.pools, timeout_s, f"worker {worker_id} is still draining")

    async def drain_node(self, node: RayNode) -> None:
        """Begins to take out all workers of a node, which gets no others.

        Raises InvalidRequest where no decode worker would stay on another node.
        """
        did_leave = node.id in self.pools.leaving
        self.pools.leaving.add(node.id)  # before the look, so that no worker starts here unseen
        here = await self._workers_on(node)
        others = [one for one in self.pools if one.role is Role.DECODE and one.id not in here]
        if not any(one.state is WorkerState.READY for one in others):
            if not did_leave:
                self.pools.leaving.discard(node.id)
                self._tell_of_change()  # the record may have it by now
            raise InvalidRequest("worker_id", "at least one decode worker must stay, on another node")
        for worker_id in here:
            self._services[worker_id] = node.service
            with suppress(WorkerNotFound):  # it was lost meanwhile
                await self.drain(worker_id)

    async def drained_node(self, node: RayNode, timeout_s: float) -> None:
        """Returns when no worker is on the node. Raises DeadlineExceeded."""
        known = [worker_id for worker_id, service in self._services.items() if service == node.service]
        for worker_id in {*known, *await self._workers_on(node)}:
            await self.drained(worker_id, timeout_s)

    async def _workers_on(self, node: RayNode) -> list[WorkerId]:
        workers = [worker.id for worker in self.pools]
        places = await asyncio.gather(*(self._place_of(worker_id) for worker_id in workers))
        return [worker_id for worker_id, place in zip(workers, places, strict=True) if place == node.id]

    async def _place_of(self, worker_id: WorkerId) -> str:
        """Returns the id of a worker's node; nothing where the worker does not tell."""
        try:
            return await self.host.where(worker_id, WHERE_TIMEOUT_S)
        except BatonError:
            return ""

    async def suspect(self, worker_id: WorkerId) -> None:
        """Probes a worker that the router cannot reach."""
        if worker_id in self.pools:
            await self._probe(worker_id)

    def introduce(self) -> None:
        """Tells all workers to a router that knows of none."""
        self._member_list.is_announced = False
        self._wake.set()

    async def end(self) -> None:
        """Ends all workers, whatever they do."""
        self._tasks.cancel()
        for worker in self.pools:
            self._endings[worker.role].begin(self.host.end(worker.id))
        await asyncio.gather(*(endings.wait() for endings in self._endings.values()))

    def _require_room_here(self, machine: Machine, after: PoolSizes) -> None:
        used_bytes = [self.host.memory_bytes(worker.id) for worker in self.pools]
        num_gpus = sum(after[role] * self.plan.resources(role).num_gpus for role in Role)
        require_room(self.pools.sizes, after, used_bytes, num_gpus, machine)

    def _require_room_on(self, rooms: Sequence[tuple[RayNode, Machine | None]], after: PoolSizes) -> None:
        """Passes over a role for which a node without workers has the resources: its first one finds out."""
        for role in Role:
            machines = [machine for node, machine in rooms if node.has(self.plan.resources(role))]
            known = [machine for machine in machines if machine is not None]
            most, num_more = sum(self.plan.num_more(role, one) for one in known), after[role] - self.pools.sizes[role]
            if machines and len(known) == len(machines) and num_more > most:
                problem = f"{num_more} more {role.value} workers do not fit into the memory of {len(known)} nodes"
                raise ConfigError(f"{problem}: at most {most} do")

    async def _room(self, node: RayNode) -> tuple[RayNode, Machine | None]:
        """Returns the node with its memory as its service sees it; None without a service."""
        try:
            return node, await self.host.inspect(node.service)
        except Unavailable:
            return node, None

    async def _step(self) -> None:
        self._wake.clear()
        if not self._is_recorded:
            self._write_record()
        if planned := self.pools.plan(self.clock()):
            self._tell_of_change()
        for worker in planned:
            self._tasks.begin(self._carry_out(worker))
        if not self._member_list.is_announced:
            await self._member_list.announce()
        await self._notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_EVERY_S):
                await self._wake.wait()
        await asyncio.gather(*(self._probe(worker.id) for worker in self.pools))

    async def _carry_out(self, worker: Worker) -> None:
        await (self._start(worker) if worker.state is WorkerState.STARTING else self._dismiss(worker))
        self._wake.set()
        await self._notify()

    async def _start(self, worker: Worker) -> None:
        """Starts a worker, once the processes of its role's lost workers are gone. Any failure is a failed start."""
        await self._endings[worker.role].wait()
        if not self.pools.has(worker.id, WorkerState.STARTING):
            return  # it was stopped meanwhile
        began_s = self.clock()
        try:
            address = await self._serve(worker)
        except Exception as error:
            if self.pools.has(worker.id, WorkerState.STARTING):  # else it was stopped meanwhile
                log.info("worker %s did not start", worker.id, exc_info=error)
                self._failures.append(f"worker {worker.id} did not start: {reason_of(error)}")
                self._lose(worker, self._failures[-1])
            return
        if self.pools.has(worker.id, WorkerState.STARTING):
            self.pools.became_ready(worker.id, address)
            self._tell_of_change()
            self.events.note(f"worker {worker.id} is ready after {self.clock() - began_s:.1f} s")

    async def _serve(self, worker: Worker) -> str:
        node = await self._place(worker)
        if node.id in self.pools.leaving:
            raise Unavailable(f"node {node.name} drains")
        config = self.plan.worker_config(worker, await self.join(node))
        answer = await self.host.start(worker.id, config.to_json(), START_TIMEOUT_S)
        return str(json.loads(answer)["address"])

    async def _place(self, worker: Worker) -> RayNode:
        """Begins a worker's process; returns the node that Ray has chosen for it."""
        resources = self.plan.resources(worker.role)
        require_node(resources, await self._nodes())
        self.host.launch(worker.id, TARGETS[worker.role], resources, not_on=tuple(self.pools.leaving))
        node_id = await self.host.where(worker.id, PLACE_TIMEOUT_S)
        for node in await self.host.nodes():
            if node.id == node_id:
                return node
        raise Unavailable("its node was lost")

    async def _nodes(self) -> list[RayNode]:
        """Lists the nodes that do not drain."""
        return [one for one in await self.host.nodes() if not (one.is_leaving or one.id in self.pools.leaving)]

    async def _dismiss(self, worker: Worker) -> None:
        """Lets a worker finish its requests, if it serves, and ends it."""
        if worker.address:
            await self._member_list.announce()
            began_s = self.clock()
            await self._let_finish(worker.id)
            await self._let_fetch(worker.id, self.clock() - began_s)
            self.pools.finished(worker.id)
            await self._member_list.announce()
        await self.host.end(worker.id)
        self.pools.forget(worker.id)
        self._detectors.pop(worker.id, None)
        self._services.pop(worker.id, None)
        self._tell_of_change()
        self.events.note(f"worker {worker.id} has left")

    async def _let_finish(self, worker_id: WorkerId) -> None:
        try:
            grace_s = self.plan.config.worker.drain_grace_s
            answer = await self.host.call(worker_id, "drain", grace_s, timeout_s=grace_s + DRAIN_MARGIN_S)
        except BatonError as error:
            self.events.note(f"worker {worker_id} was lost while draining: {error.message}")
            return
        if num_unfinished := json.loads(answer)["unfinished"]:
            self.events.note(f"worker {worker_id} handed over {num_unfinished} requests")

    async def _let_fetch(self, worker_id: WorkerId, gone_s: float) -> None:
        """Keeps a worker of a node that drains, by which decode finds its blocks, until they are fetched or copied.

        gone_s: the part of the grace that is over.
        """
        service = self._services.get(worker_id)
        if service is None:
            return
        try:
            grace_s = max(0, self.plan.config.worker.drain_grace_s - int(gone_s))
            left = json.loads(await self.host.call(service, "drain", grace_s, timeout_s=grace_s + DRAIN_MARGIN_S))
        except BatonError as error:
            self.events.note(f"the arena of {service} was lost while draining: {error.message}")
            return
        if any(left.values()):
            self.events.note(f"{service} goes with {left['unfetched']} prompts and {left['unwritten']} blocks")

    async def _probe(self, worker_id: WorkerId) -> None:
        """Probes a READY worker; STARTING and DRAINING ones report through their own task."""
        if not self.pools.has(worker_id, WorkerState.READY):
            return
        liveness = await self.host.probe(worker_id)
        reason = self._detectors.setdefault(worker_id, FailureDetector()).judge(liveness, self.clock())
        if reason is not None and self.pools.has(worker_id, WorkerState.READY):
            self._lose(self.pools[worker_id], f"worker {worker_id} {reason}")

    def _lose(self, worker: Worker, reason: str) -> None:
        self.events.note(reason)
        self._detectors.pop(worker.id, None)
        if failure := self.pools.lost(worker.id, self.clock(), reason):
            self.events.note(failure)
        self._tell_of_change()
        self._endings[worker.role].begin(self.host.end(worker.id))
        self._wake.set()

    def _tell_of_change(self) -> None:
        self._member_list.is_announced = False
        self._write_record()

    def _write_record(self) -> None:
        """Writes the pools down. If that fails, work goes on, and the next step tries again."""
        is_recorded = self.record.try_write(self.pools.to_json().encode())
        if self._is_recorded and not is_recorded:
            self.events.note("the pools cannot be written down: a controller that takes over now will not know them")
        self._is_recorded = is_recorded

    async def _wait_for(self, holds: Callable[[], bool], timeout_s: float, problem: str) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(holds)
        except TimeoutError as error:
            raise DeadlineExceeded(problem) from error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
