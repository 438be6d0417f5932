"""The pools, and the actions that bring them to their sizes. Pure: events in, actions out.

starting -> ready -> draining -> gone
    \\        ^ |        ^
    \\        | v        |
    \\      changing ----/       of the other pool from now on, and ready once the process serves it
    \\---------\\-----------\\---> lost, and replaced unless it was draining
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.actors.liveness import backoff_s
from deploy.controller.pool import Pool, leaving
from deploy.plan.rules import range_problem
from deploy.roll.roll import MAX_FAILED_STARTS, Roll
from wire.errors import ConfigError, InvalidRequest, Overtaken, Unavailable, WorkerNotFound
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState
from wire.typed_reader import from_json, to_json

VERSION = 2
NONE = PoolSizes(0, 0)
_WORKER_NAME = re.compile(r"(prefill|decode)-([0-9]{1,9})")


@dataclass(frozen=True)
class Order:
    """The last order of a pool; order numbers grow.

    reached: the most workers that were ready at once, at most the requested size; an abandoned order ends at it.
    failure: the reason for abandoning it.
    """

    role: Role
    number: int = 0
    reached: int = 0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolsRecord:
    """The record from which a new controller takes over the pools.

    A controller writes it before it acts, so that it names every worker that may exist; some may have died, or not
    started yet. num_named: the number of names given so far, for each role; no name is given twice. orders: none in
    records of version 1. leaving: ids of draining nodes, which get no workers. vacating: workers on these, whose places
    others take. roll: none in earlier releases' records.
    """

    sizes: PoolSizes
    workers: tuple[Worker, ...] = ()
    num_named: PoolSizes = NONE
    orders: tuple[Order, ...] = ()
    leaving: tuple[str, ...] = ()
    vacating: tuple[WorkerId, ...] = ()
    roll: Roll = field(default_factory=Roll)
    version: int = VERSION


class Pools:
    """Both pools. Pure: `now_s` is always a reading of one monotonic clock."""

    def __init__(self, record: PoolsRecord) -> None:
        self.sizes = record.sizes
        self.leaving = set(record.leaving)
        self._vacating = set(record.vacating)
        self.roll = record.roll
        self._workers = {worker.id: worker for worker in record.workers}
        self._num_named = record.num_named
        self._orders = {role: Order(role, reached=record.sizes[role]) for role in Role}
        self._orders |= {order.role: order for order in record.orders}
        self._num_failures = Counter[Role]()
        self._paused_until_s: dict[Role, float] = {}

    @classmethod
    def from_json(cls, text: str) -> "Pools":
        """Reads a PoolsRecord. Raises ConfigError for a malformed record, or for a later version."""
        record = from_json(PoolsRecord, text, "pools")
        if not 1 <= record.version <= VERSION:
            raise ConfigError(f"pools.version: must be between 1 and {VERSION}")
        return cls(record)

    @classmethod
    def recovered(
        cls, planned: PoolSizes, living: Sequence[str], known: Sequence[str] = (), roll: Roll | None = None
    ) -> "Pools":
        """Makes pools from the living workers, for a controller without a record.

        The workers are started once more, which changes nothing for a serving worker. A pool without workers gets its
        planned size. known: names given before, which are not reused. roll: the revision of new workers;
        workers found that may have another one are replaced.
        """
        workers, num_named = [], dict.fromkeys(Role, 0)
        for index, name in enumerate((*living, *known)):
            if found := _WORKER_NAME.fullmatch(name):
                role = Role(found[1])
                num_named[role] = max(num_named[role], int(found[2]) + 1)
                workers += [Worker(WorkerId(name), role)] if index < len(living) else []
        found_sizes = {role.value: sum(one.role is role for one in workers) or planned[role] for role in Role}
        named = PoolSizes(**{role.value: number for role, number in num_named.items()})
        sizes = PoolSizes(**found_sizes)
        return cls(PoolsRecord(sizes=sizes, workers=tuple(workers), num_named=named, roll=roll or Roll()))

    def to_json(self) -> str:
        return to_json(
            PoolsRecord(
                sizes=self.sizes,
                workers=tuple(self),
                num_named=self._num_named,
                orders=tuple(self._orders.values()),
                leaving=tuple(self.leaving),
                vacating=tuple(self._vacating & self._workers.keys()),
                roll=self.roll,
            )
        )

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: WorkerId) -> Worker:
        """Raises WorkerNotFound."""
        if worker_id not in self._workers:
            raise WorkerNotFound("no worker of that id", worker_id=worker_id[:64])
        return self._workers[worker_id]

    def has(self, worker_id: WorkerId, state: WorkerState) -> bool:
        """Whether the worker exists and is in this state."""
        return worker_id in self and self[worker_id].state is state

    def pool(self, role: Role) -> Pool:
        """Returns a pool as it stands now."""
        return Pool(
            role=role,
            size=self.sizes[role],
            surge=int(self.roll.surge is role),
            workers=[worker for worker in self if worker.role is role],
            vacating=self._vacating,
        )

    @property
    def are_as_asked(self) -> bool:
        return all(self.pool(role).is_as_asked for role in Role)

    def resized(self, prefill: int | None = None, decode: int | None = None) -> PoolSizes:
        """Returns the sizes after an order; None leaves a pool as it is. Raises InvalidRequest."""
        given = {role: size for role, size in (("prefill", prefill), ("decode", decode)) if size is not None}
        for role, size in given.items():
            if problem := range_problem(f"pools.{role}", size):
                raise InvalidRequest(f"pools.{role}", problem)
        return replace(self.sizes, **given)

    def resize(self, prefill: int | None = None, decode: int | None = None) -> dict[str, int]:
        """Takes an order; returns its number for each pool that it names. Raises InvalidRequest.

        An order that repeats a pool's requested size keeps the last order's number.
        """
        sizes = self.resized(prefill, decode)
        given = {Role.PREFILL: prefill, Role.DECODE: decode}
        return {role.value: self._order(role, sizes[role]) for role, size in given.items() if size is not None}

    def have_done(self, numbers: Mapping[str, int]) -> bool:
        """Whether the orders of `resize` are carried out. Raises Overtaken, or Unavailable for an abandoned order."""
        for role, number in numbers.items():
            order = self._orders[Role(role)]
            if order.number != number:
                raise Overtaken(f"overtaken by a later order: {role} {self.sizes[order.role]}")
            if order.failure:
                raise Unavailable(order.failure)
        return all(self.pool(Role(role)).is_as_asked for role in numbers)

    def release(self, worker_id: WorkerId) -> Worker | None:
        """Shrinks a worker's pool by this worker; returns the worker to drain, or None if it drains already.

        Raises WorkerNotFound, or InvalidRequest if the pool cannot spare it.
        """
        worker = self[worker_id]
        if worker.state is WorkerState.DRAINING:
            return None
        if worker.role is Role.DECODE and self.sizes.decode == 1:
            raise InvalidRequest("worker_id", "at least one decode worker must stay")
        self._order(worker.role, max(0, self.sizes[worker.role] - 1))
        return self.dismiss(worker_id)

    def dismiss(self, worker_id: WorkerId) -> Worker:
        """Marks a worker DRAINING, without an order: its pool gets another. Raises WorkerNotFound."""
        return self._change(leaving(self[worker_id]))

    def vacate(self, worker_ids: Iterable[WorkerId]) -> None:
        """Has others take the places of these workers, whose node drains: the sizes stay, and `plan` drains them."""
        self._vacating.update(worker_ids)

    def became_ready(self, worker_id: WorkerId, address: str) -> None:
        """Marks a STARTING or CHANGING worker READY, and clears the failures of its role. Ignores a DRAINING worker."""
        worker = self[worker_id]
        self._num_failures[worker.role] = 0
        self.roll = self.roll.became_ready(worker)
        if worker.state in (WorkerState.STARTING, WorkerState.CHANGING):
            self._change(worker, state=WorkerState.READY, address=address)
            pool, order = self.pool(worker.role), self._orders[worker.role]
            self._orders[pool.role] = replace(order, reached=max(order.reached, min(len(pool.ready), pool.size)))

    def finished(self, worker_id: WorkerId) -> None:
        """Marks a draining worker as without requests, by removing its address."""
        self._change(self[worker_id], address="")

    def forget(self, worker_id: WorkerId) -> None:
        """Drops a worker that has ended, without counting a failure of its role."""
        self._workers.pop(worker_id, None)

    def lost(self, worker_id: WorkerId, now_s: float, reason: str = "") -> str:
        """Drops a worker that died or did not start. Each further failure makes the next start wait longer.

        After three failures in a row an order for more workers is abandoned: the size becomes the number reached. The
        first failure may take a roll back. Returns the reason, or "".
        """
        worker = self._workers.pop(worker_id, None)
        if worker is None or worker.state is not WorkerState.STARTING:
            return ""
        role = worker.role
        self._num_failures[role] += 1
        self._paused_until_s[role] = now_s + backoff_s(self._num_failures[role])
        wanted, self.roll = self.roll.wanted, self.roll.failed_start(worker, self._num_failures[role], reason)
        if self.roll.wanted != wanted:
            self._num_failures[role] = 0
            del self._paused_until_s[role]
            return self.roll.failure
        order, asked = self._orders[role], self.sizes[role]
        if self._num_failures[role] < MAX_FAILED_STARTS or order.reached >= asked:
            return ""
        failure = f"{role.value} stays at {order.reached} of the {asked} workers asked for: {reason}"
        self._orders[role] = replace(order, failure=failure)
        self.sizes = replace(self.sizes, **{role.value: order.reached})
        return failure

    def plan(self, now_s: float, roles_are_alike: bool = False) -> list[Worker]:
        """Returns the workers to start, to change and to drain now, as STARTING, CHANGING and DRAINING.

        Notes the actions as begun: the next plan is empty unless something changes. roles_are_alike: whether a worker
        can serve either pool.
        """
        vacating = [worker for worker in self if worker.id in self._vacating]
        self.roll = self.roll.stepped(self._staying, vacating)
        pools = {role: self.pool(role) for role in Role}
        may_change = roles_are_alike and not self.outdated
        given = {role: pools[role].given(pools[role.other]) if may_change else [] for role in Role}
        return [worker for pool in pools.values() for worker in self._begin(pool, given, now_s)]

    def _begin(self, pool: Pool, given: Mapping[Role, list[Worker]], now_s: float) -> list[Worker]:
        """given: the workers that each pool passes to the other."""
        is_paused = now_s < self._paused_until_s.get(pool.role, now_s)
        return [
            *(
                self._change(self._workers.pop(one.id), role=pool.role.other, state=WorkerState.CHANGING)
                for one in given[pool.role]
                if one.state is WorkerState.READY
            ),
            *(self.dismiss(one.id) for one in pool.dismissed(given[pool.role])),
            *(self._hire(pool.role) for _ in range(-pool.surplus - len(given[pool.role.other])) if not is_paused),
        ]

    def _order(self, role: Role, size: int) -> int:
        order = self._orders[role]
        if size != self.sizes[role] or order.failure:
            self._orders[role] = Order(role, order.number + 1, min(order.reached, size))
            self._num_failures[role] = 0
            self.sizes = replace(self.sizes, **{role.value: size})
        return self._orders[role].number

    @property
    def outdated(self) -> list[Worker]:
        """The workers of another revision than the wanted one, which a roll replaces."""
        return self.roll.outdated(self._staying)

    @property
    def replaced(self) -> Worker | None:
        """The outdated worker to dismiss, for its replacement is READY; None while there is none."""
        return self.roll.replaced(self._staying, self.sizes)

    @property
    def _staying(self) -> list[Worker]:
        """The workers whose places no others take."""
        return [worker for worker in self if worker.id not in self._vacating]

    def _hire(self, role: Role) -> Worker:
        number = self._num_named[role]
        self._num_named = replace(self._num_named, **{role.value: number + 1})
        worker_id = WorkerId(f"{role.value}-{number}")
        self.roll = self.roll.hired(worker_id)
        return self._change(Worker(worker_id, role))

    def _change(self, worker: Worker, **changes: Any) -> Worker:
        self._workers[worker.id] = replace(worker, **changes)
        return self._workers[worker.id]
