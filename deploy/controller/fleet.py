"""The workers of a cluster: orders for the pools, and the loop that carries them out."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial

from deploy.actors.liveness import PROBE_EVERY_S
from deploy.controller.pools import Pools
from deploy.controller.supervised import Supervision, repeat
from deploy.controller.workers import RouterMembers, Workers
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import Machine, RayNode, inspect_machine, service_of
from deploy.plan.model import ModelFacts
from deploy.plan.sizing import require_room, without_arena
from deploy.processes.atomic_file import AtomicFile
from deploy.roll.revisions import Revisions, changes, rolled
from deploy.roll.roll import Roll
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, WorkerState
from wire.served_model import ServedModel

NOT_YET = "the pools do not have the size asked for yet"


@dataclass(kw_only=True)
class Fleet:
    """The workers of both pools, which the task of `run` brings to their sizes, and the record of the pools."""

    pools: Pools
    plan: ClusterPlan
    join: Callable[[RayNode, ClusterPlan], Awaitable[NodeBaseline]]
    means: Supervision
    record: AtomicFile
    revisions: Revisions
    inspect: Callable[[], Machine] = inspect_machine

    def __post_init__(self) -> None:
        routers = self.plan.routers
        self._members = RouterMembers(self.pools, routers, self.means.host, self.means.events, self._models)
        self.workers = Workers(self.pools, self._plan_of, self.join, self.means, self._members, self._pools_changed)
        self._is_recorded = True
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()

    def plan_with(self, layout_tag: str) -> ClusterPlan | None:
        """Returns the plan of workers with a layout's tag, of new workers if they have it; None if no worker has it."""
        return next((one for one in self._plans if one.layout_tag == layout_tag), None)

    @property
    def served(self) -> ServedModel:
        """The model with which a router starts: the wanted one once a READY decode worker has it, else another's."""
        wanted = self.pools.roll.wanted
        numbers = [self.pools.roll.of(one.id) for one in self.pools.pool(Role.DECODE).ready]
        return self.revisions[wanted if wanted in numbers or not numbers else numbers[0]].model.served

    @property
    def is_settled(self) -> bool:
        """Whether both pools have their requested sizes, and the router has all of their workers."""
        return self.pools.are_as_asked and self._members.are_announced

    async def run(self) -> None:
        """Supervises the workers until cancelled."""
        await repeat("the care for the workers", self._step, self.means.events)

    async def settle(self, timeout_s: float) -> None:
        """Waits until the pools are settled. Raises Unavailable, with the reason, after one more failed start."""
        failures, num_failures = self.workers.failures, len(self.workers.failures)
        await self._wait_for(lambda: self.is_settled or len(failures) > num_failures, timeout_s, NOT_YET)
        if not self.is_settled:
            raise Unavailable(failures[-1])

    async def resize(self, prefill: int | None, decode: int | None) -> dict[str, int]:
        """Takes an order, None leaving a pool as it is; returns the order's numbers, for `scaled`.

        Raises InvalidRequest, or ConfigError for workers that do not fit, and then changes nothing.
        """
        if sum(astuple(self.pools.resized(prefill, decode))) > sum(astuple(self.pools.sizes)):
            await self._require_room(lambda: self.pools.resized(prefill, decode), self._plan_now)
        numbers = self.pools.resize(prefill, decode)
        self.means.events.note(f"scaling to {self.pools.sizes.prefill} prefill, {self.pools.sizes.decode} decode")
        self._pools_changed()
        return numbers

    async def scaled(self, numbers: dict[str, int], timeout_s: float) -> PoolSizes:
        """Waits until the orders of `resize` are carried out, in the router, too; returns the number of ready workers.

        Raises Overtaken, Unavailable with the reason for an abandoned order, or DeadlineExceeded.
        """
        await self._wait_for(lambda: self.pools.have_done(numbers) and self._members.are_announced, timeout_s, NOT_YET)
        return PoolSizes(*(len(self.pools.pool(role).ready) for role in Role))

    async def roll(self, config: ClusterConfig, model: ModelFacts) -> int:
        """Begins to replace all workers, one by one, by workers of a new revision; returns its number, for `rolled`.

        The order of the roll that is under way, repeated, has its number. Raises InvalidRequest while another roll is
        under way, ConfigError for a change that no roll makes or without room for one more worker and a new arena,
        Unavailable; then nothing changes.
        """
        roll = self.pools.roll
        revision = rolled(self.revisions[roll.wanted if roll.before is None else roll.before], config, model)
        if roll.before is not None and replace(revision, number=roll.wanted) == self.revisions[roll.wanted]:
            return roll.wanted
        roll.begun(tuple(self.pools))
        try:
            for role in Role:
                await self._require_room(partial(self._surged, role), self.revisions.plan_by(revision))
        except ConfigError as error:
            needs = "a roll has one worker more for a while, and a second arena where the KV layout changes"
            raise ConfigError(f"{needs}: {error.message}") from error
        begun = self.pools.roll.begun(tuple(self.pools))  # again: another order may have come meanwhile
        self.revisions.add(replace(revision, number=begun.wanted))
        told = changes(self.revisions[self.pools.roll.wanted], revision)
        self.means.events.note(f"rolling {len(tuple(self.pools))} workers to revision {begun.wanted}: {told}")
        self.pools.roll = begun
        self._pools_changed()
        return begun.wanted

    async def rolled(self, number: int, timeout_s: float) -> None:
        """Waits until all workers have a revision. Raises Unavailable, with the reason, if it was taken back.

        Raises DeadlineExceeded, and the roll goes on.
        """
        await self._wait_for(lambda: self.pools.roll.has_done(number), timeout_s, "the roll is still under way")

    def drain(self, worker_id: WorkerId) -> None:
        """Begins to drain a worker. Raises WorkerNotFound, or InvalidRequest for the last decode worker."""
        worker = self.pools.release(worker_id)
        self._pools_changed()
        if worker is not None:
            self.workers.begin(worker)

    async def drained(self, worker_id: WorkerId, timeout_s: float) -> None:
        """Waits until the worker is gone. Raises DeadlineExceeded."""
        await self._wait_for(lambda: worker_id not in self.pools, timeout_s, f"worker {worker_id} is still draining")

    async def drain_node(self, node: RayNode) -> None:
        """Begins to drain all workers of a node, which gets no new workers; others start in their places elsewhere.

        The last decode worker goes once another is READY. Raises InvalidRequest if no other node can have any.
        """
        did_leave = node.id in self.pools.leaving
        self.pools.leaving.add(node.id)  # before the look, so that no worker starts here unseen
        here, nodes = await self.workers.on_node(node.id), await self.workers.nodes()
        without = {role for role in Role if not any(one.has(self._plan_now.resources(role)) for one in nodes)}
        others = [one for one in self.pools if one.role is Role.DECODE and one.id not in here]
        if Role.DECODE in without and not any(one.state is WorkerState.READY for one in others):
            if not did_leave:
                self.pools.leaving.discard(node.id)
                self._pools_changed()  # the record may have it by now
            raise InvalidRequest("worker_id", "at least one decode worker must stay, on another node")
        for role in without & {one.role for one in self.pools if one.id in here}:
            lack = f"no other node has room for {role.value} workers of node {node.name}"
            self.means.events.note(f"{lack}: the pool has its size again when one joins")
        self.pools.vacate(here)
        self._pools_changed()

    async def drained_node(self, node: RayNode, timeout_s: float) -> None:
        """Waits until no worker is on the node. Raises DeadlineExceeded."""
        for worker_id in await self.workers.on_node(node.id):
            await self.drained(worker_id, timeout_s)

    def introduce(self) -> None:
        """Announces all workers to a new router."""
        self._members.are_announced = False
        self._wake.set()

    async def _step(self) -> None:
        self._wake.clear()
        if not self._is_recorded:
            self._write_record()
        roll = self.pools.roll
        if planned := self.pools.plan(self.means.clock(), self._plan_now.roles_are_alike):
            self._pools_changed()
        elif self.pools.roll != roll:
            self._write_record()
        for worker in planned:
            self.workers.begin(worker)
        if not self._members.are_announced:
            await self._members.announce()
        self._roll_on(roll)
        self._notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_EVERY_S):
                await self._wake.wait()
        await asyncio.gather(*(self.workers.probe(worker.id) for worker in self.pools))

    @property
    def _plans(self) -> Iterator[ClusterPlan]:
        """The plans of new workers and of the present ones, one of each revision."""
        roll = self.pools.roll
        return map(self.revisions.plan_of, dict.fromkeys((roll.wanted, *(roll.of(one.id) for one in self.pools))))

    @property
    def _plan_now(self) -> ClusterPlan:
        """The plan of new workers."""
        return self.revisions.plan_of(self.pools.roll.wanted)

    def _models(self) -> tuple[ServedModel, ...]:
        """Lists the versions of the model that workers have, the wanted one first; none before the first roll."""
        if not self.pools.roll.last:
            return ()
        wanted, *others = (one.model.served for one in self._plans)
        return wanted, *{one.namespace: one for one in others if one.namespace != wanted.namespace}.values()

    def _plan_of(self, worker_id: WorkerId) -> ClusterPlan:
        return self.revisions.plan_of(self.pools.roll.of(worker_id))

    def _roll_on(self, before: Roll) -> None:
        """Drains a worker whose replacement the routers have taken; takes a roll back whose worker they refuse.

        before: the roll at the step's begin.
        """
        roll = self.pools.roll
        if before.before is not None and roll.before is None:
            self.means.events.note(f"all workers have revision {roll.wanted} now")
        if roll.before is None and not self.pools.outdated:
            self.revisions.keep({roll.wanted, *roll.revisions.values()})
        new = [one for one in self._members.refused if roll.of(one) == roll.wanted]
        if roll.before is not None and new:
            self.pools.roll = roll.taken_back(f"the router does not take {new[0]}: {self._members.refused[new[0]]}")
            self.means.events.note(self.pools.roll.failure)
            self._dismiss(new[0])
        elif self._members.are_announced and (worker := self.pools.replaced) is not None:
            self.pools.roll = replace(roll, surge=None)
            self.means.events.note(f"worker {worker.id} of revision {roll.of(worker.id)} is replaced, and drains")
            self._dismiss(worker.id)

    def _dismiss(self, worker_id: WorkerId) -> None:
        """Begins to drain a worker whose pool keeps its size."""
        worker = self.pools.dismiss(worker_id)
        self._pools_changed()
        self.workers.begin(worker)

    def _surged(self, role: Role) -> PoolSizes:
        """Returns the sizes with one worker more of a role that has any."""
        size = self.pools.sizes[role]
        return replace(self.pools.sizes, **{role.value: size + bool(size)})

    async def _require_room(self, after: Callable[[], PoolSizes], plan: ClusterPlan) -> None:
        """Raises ConfigError if workers for sizes do not fit, which are asked for when the nodes' room is known.

        plan: the new workers'.
        """
        nodes = await self.workers.nodes()
        if len(nodes) == 1 and nodes[0].is_head:
            machine = self._without_new_arena(await asyncio.to_thread(self.inspect), plan)
            self._require_room_here(machine, after(), plan)
            if self.plan_with(plan.layout_tag) is None:  # workers of another layout tell little of its memory
                self._require_room_on([(nodes[0], machine)], after(), plan)
        else:
            rooms = await asyncio.gather(*(self._room(node, plan) for node in nodes))
            self._require_room_on(rooms, after(), plan)

    def _without_new_arena(self, machine: Machine, plan: ClusterPlan) -> Machine:
        """Returns a machine less the memory of the arena that it gets if no worker has the plan's layout yet.

        Raises ConfigError without room for that arena.
        """
        is_new = self.plan_with(plan.layout_tag) is None
        return without_arena(plan.config, plan.model, machine) if is_new else machine

    def _require_room_here(self, machine: Machine, after: PoolSizes, plan: ClusterPlan) -> None:
        used_bytes = [self.means.host.memory_bytes(worker.id) for worker in self.pools]
        num_gpus = sum(after[role] * plan.resources(role).num_gpus for role in Role)
        require_room(self.pools.sizes, after, used_bytes, num_gpus, machine)

    def _require_room_on(
        self, rooms: Sequence[tuple[RayNode, Machine | None]], after: PoolSizes, plan: ClusterPlan
    ) -> None:
        """Raises ConfigError if new workers do not fit on any node.

        Skips a role that a node without workers can host: the start of its first worker finds out.
        """
        for role in Role:
            machines = [machine for node, machine in rooms if node.has(plan.resources(role))]
            known = [machine for machine in machines if machine is not None]
            most, num_more = (
                sum(plan.num_more(role, one) for one in known),
                after[role] - self.pools.sizes[role],
            )
            if machines and len(known) == len(machines) and num_more > most:
                problem = f"{num_more} more {role.value} workers do not fit into the memory of {len(known)} nodes"
                raise ConfigError(f"{problem}: at most {most} do")

    async def _room(self, node: RayNode, plan: ClusterPlan) -> tuple[RayNode, Machine | None]:
        """Returns the node with the memory that a service of it reports; None without a service."""
        for tag in dict.fromkeys(one.layout_tag for one in self._plans):
            with suppress(Unavailable):
                return node, self._without_new_arena(await self.means.host.inspect(service_of(node.id, tag)), plan)
        return node, None

    def _pools_changed(self) -> None:
        """Records a change before acting on it, and wakes the loop, which announces it."""
        self._members.are_announced = False
        self._write_record()
        self._wake.set()
        self._notify()

    def _write_record(self) -> None:
        """Writes the record of the pools. If that fails, work goes on, and the next step tries again."""
        is_recorded = self.record.try_write(self.pools.to_json().encode())
        if self._is_recorded and not is_recorded:
            self.means.events.note(
                "the pools cannot be written down: a controller that takes over now will not know them"
            )
        self._is_recorded = is_recorded

    async def _wait_for(self, holds: Callable[[], bool], timeout_s: float, problem: str) -> None:
        """Waits until `holds()` is true, asking after each change. Raises DeadlineExceeded with limit and problem."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"after {timeout_s:.0f} s {problem}: see `baton status`") from error

    def _notify(self) -> None:
        """Wakes all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
