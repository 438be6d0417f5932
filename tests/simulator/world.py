"""A simulated run: a whole cluster in one thread, by a plan, with its trace and the invariants that it broke."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar
from unittest.mock import patch

from deploy.controller.workers import CHANGE_GRACE_S, DRAIN_MARGIN_S
from kv_store.eviction.order import Priority
from kv_store.frame import checksum_of
from kv_store.node.arena import Arena
from kv_store.node.messages import Block
from kv_store.prefix import costs
from router import moves
from router.block_index import mark_of
from router.config import ClusterAccess, LatencyBounds, RouterConfig, RouterSettings
from tests.harness.answer import ChoiceAnswer, Reader
from tests.harness.assembled_worker import TOKEN, behaviour_of
from tests.harness.local_cluster import served
from tests.simulator import virtual_time
from tests.simulator.client import NO_NUMBERS, SimClient, caller_of
from tests.simulator.invariants import LAYOUT, Truth, Violation, Watch, model_of
from tests.simulator.network import Connection
from tests.simulator.node import Node
from tests.simulator.plan import ALONE, POISON, Fault, Kind, Plan, request_of
from tests.simulator.redis import SimRedis, SimRedisTier
from tests.simulator.router import SimRouter
from tests.simulator.strikes import strike
from tests.simulator.virtual_time import Died, VirtualLoop
from tests.simulator.worker import BATCH, SimWorker
from wire import errors
from wire.errors import BatonError, StoreError
from wire.ids import BlockKey, WorkerId
from wire.kv_policy import Sinks
from wire.pools import Role, Worker, WorkerState

T = TypeVar("T")
MAX_RUN_S = 400.0
TOKEN_S = 0.0006
"""What each worker is said to have learned: engines of this cluster take no time for a token."""
LATE_MS = 20.0
"""The limit on the first token of a third of the seeds."""
MAX_REST_S = 60.0
REPLACED_AFTER_S = 1.0
WAIT_S = 0.1
INTERLEAVED = 0.1
LOSE_COPIES = {Kind.FLIP, Kind.NO_NUMBERS, Kind.COLD_EMPTY, Kind.COLD_CORRUPT}
"""After these, blocks of an arena may be gone from Redis."""
NOBODYS = BlockKey(bytes(32))
"""No block has this key."""


@dataclass
class Run:
    """A run of a plan: what it broke, how each request ended, the attempts, and the faults that struck.

    num_cut: how often each request was cut off by the end of its router. num: splits, groups and jumps
    of prefixes, and evictions from arenas.
    """

    plan: Plan
    violations: list[Violation] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    attempts: set[str] = field(default_factory=set)
    struck: list[Fault] = field(default_factory=list)
    num_cut: list[int] = field(default_factory=list)
    num: Counter[str] = field(default_factory=Counter)


class World:
    """The cluster of a run, and its controller."""

    def __init__(self, run: Run) -> None:
        plan = run.plan
        self.run = run
        self.draw = random.Random(plan.seed)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.watch = Watch(self.note)
        self.watch.violations = run.violations
        self.wall_s = 1.7e9
        self.num_pages = plan.num_pages
        self.far_block_s = plan.far_block_s
        self.redis = SimRedis(self.draw, self.watch)
        self.nodes: list[Node] = []
        self.workers: list[SimWorker] = []
        self.model = model_of(plan.window)
        model = replace(served(self.model), vocab_size=POISON + 1)
        settings = RouterSettings(disaggregation=plan.disaggregation, max_queued_requests=plan.max_queued)
        limits = LatencyBounds(ttft_ms=LATE_MS if plan.seed % 3 == 0 else None)
        self._config = RouterConfig(
            model=model, cluster=ClusterAccess(TOKEN, "00" * 32), settings=settings, limits=limits
        )
        self._num_routers = self._num_nodes = 0
        self._controller_back_s = 0.0
        self._controller_death = loop.create_future()
        self._lost_nodes: dict[str, Node] = {}
        self.routers = [self._make_router() for _ in range(plan.num_routers)]
        self.truth = Truth(plan.window)
        self._of_sessions: set[BlockKey] = set()
        for _ in range(plan.layout.num_nodes):
            self.open_node()
        self._steps = Counter[str]()
        self._num_named = Counter[Role]()
        self._num_placed = Counter[Role]()
        self._listing = asyncio.Lock()
        self._errands: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        plan = self.run.plan
        clients = []
        for number, one in enumerate(plan.asks):
            for tokens in sequences(one.kind, plan.window):
                keys = self.truth.learn(self.routers[0].parts.dispatcher.root_of(caller_of(one).tenant), tokens)
                self._of_sessions.update(keys if one.session else ())
            may_be_refused = plan.max_queued < len(plan.asks)
            expected, find_router = reference(one.kind, plan.window), partial(self.find_router, one.tenant)
            clients.append(SimClient(number, one, expected, may_be_refused, find_router, self.watch))
        for router in self.routers:
            router.start()
        roles = [Role.PREFILL] * plan.num_prefill + [Role.DECODE] * plan.num_decode
        await asyncio.gather(*(self._start_one(role) for role in roles))
        await self.enlist()
        await self._in_time(clients)
        await self._rest()
        for worker in self.alive:
            worker.counts.judge(worker.parts.engine.stats())
        self.run.num["evictions"] = sum(node.directory.records.status().evictions for node in self.nodes)
        self._check_contents()
        for router in self.routers:
            await router.stop()
        for worker in self.workers:
            await self._end(worker)
        self.run.outcomes = [client.outcome for client in clients]
        self.run.took_s = [client.took_s for client in clients]
        self.run.num_cut = [client.num_cut for client in clients]
        for client in clients:
            client.judge_loss(plan.is_transparent_to(client.ask))
        if self.run.outcomes.count(NO_NUMBERS) > sum(fault.kind is Kind.NO_NUMBERS for fault in self.run.struck):
            self.watch.violated("promise", "more requests than one ended over logits that are no numbers")

    def note(self, what: str) -> None:
        self.run.trace.append(f"{self.loop.time():.6f} {what}")

    def count(self, what: str) -> None:
        self.run.num[what] += 1

    def step(self, worker: SimWorker, step: str, what: str = "") -> None:
        worker.process.require_alive()
        key = f"{worker.role.value} {step}"
        self._steps[key] += 1
        if step == "begin":
            self.run.attempts.add(what)
        self.note(f"{worker.name} {step} {what}".rstrip())
        for fault in self.run.plan.faults:
            if (fault.step, fault.nth) == (key, self._steps[key]):
                self.note(f"FAULT {fault}")
                self.run.struck.append(fault)
                Context().run(strike, self, fault, worker)
        self._check_router()
        worker.process.require_alive()

    def interleave(self, worker: SimWorker) -> None:
        if self.draw.random() < INTERLEAVED:
            others = [one for one in self.alive if one is not worker and one.transfers.is_waiting]
            if others:
                with suppress(Died):
                    other = self.draw.choice(others)
                    other.process.run(other.transfers.run_next)

    @property
    def alive(self) -> list[SimWorker]:
        return [worker for worker in self.workers if not worker.process.is_dead]

    def _serving(self, role: Role) -> list[SimWorker]:
        """The workers of a pool that neither leave it nor change to the other."""
        there = [one for one in self.alive if one.role is role]
        return [one for one in there if not one.is_leaving and one.joins is None]

    def errand(self, work: Any) -> None:
        """Lets the controller do something beside all else."""
        task = self.loop.create_task(work, context=Context())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def broke(self, worker: SimWorker) -> None:
        self.note(f"{worker.name} broke")
        self.loop.call_soon(self.crash, worker, context=Context())

    def crash(self, worker: SimWorker) -> None:
        """A worker's process ends now; others hear of it a moment later, and another worker takes its place."""
        if not worker.process.is_dead:
            Context().run(self._crash, worker)

    def _crash(self, worker: SimWorker) -> None:
        self.note(f"{worker.name} dies")
        self._kill(worker)
        self.errand(self._replace(worker))

    def open_node(self) -> Node:
        """A node joins."""
        name = f"node{self._num_nodes}"
        self._num_nodes += 1
        cold = SimRedisTier(self.redis, name, self.loop.time)
        self.nodes.append(Node(name, self.model.layout, self.run.plan.num_slots, cold, self.watch, self.redis.written))
        self._writing = self.loop.create_task(self.nodes[-1].write_cold(), context=Context())
        self.note(f"{name} joins")
        return self.nodes[-1]

    def lose(self, node: Node, back_after_s: float) -> None:
        """A node loses its power, for good; if it was the last one, another joins after a while."""
        if node.is_gone:
            return
        self.note(f"{node.name} is lost")
        for worker in self.alive:
            if worker.node is node:
                self.crash(worker)
        self.nodes.remove(node)
        self._lost_nodes[node.name] = node
        node.lose()
        if not self.nodes:
            self.loop.call_later(back_after_s, self.open_node, context=Context())

    def map(self, path: str) -> Arena:
        """Maps the arena of a node. Raises StoreError if it is no more."""
        if not self.nodes:
            raise StoreError("no node is there")
        return next((node for node in self.nodes if node.path == path), self.nodes[0]).map(path)

    def node_at(self, address: str) -> Node:
        return next((node for node in self.nodes if node.name == address), None) or self._lost_nodes[address]

    def lose_router(self, place: int = 0) -> None:
        """A router's process ends; clients and workers see their connections break, and another takes its place."""
        router = self.routers[place % len(self.routers)]
        if router.process.is_dead:
            return
        self.note(f"{router.process.name} dies")
        self.loop.kill(router.process)
        for connection in router.connections:
            self.loop.call_later(self.draw.random() * 0.002, connection.break_off, context=Context())
        self.errand(self._replace_router(router))

    def lose_controller(self, back_after_s: float) -> None:
        """The controller dies: nothing is replaced, and no router hears of members, until another one is there.

        That begins anew what was recorded as begun; calls to workers and routers go on meanwhile.
        """
        self.note("the controller dies")
        self._controller_back_s = max(self._controller_back_s, self.loop.time() + back_after_s)
        self._controller_death.set_result(None)
        self._controller_death = self.loop.create_future()
        self.errand(self.enlist())

    @property
    def has_controller(self) -> bool:
        return self.loop.time() >= self._controller_back_s

    async def _find_controller(self) -> None:
        """Waits for a controller that lives."""
        while not self.has_controller:  # noqa: ASYNC110
            await asyncio.sleep(WAIT_S)

    async def find_router(self, tenant: int) -> SimRouter:
        """Waits for a router that lives: each tenant has one of its own, and the others stand by."""
        while True:
            first = tenant % len(self.routers)
            for router in (*self.routers[first:], *self.routers[:first]):
                if not router.process.is_dead:
                    return router
            await asyncio.sleep(WAIT_S)

    async def _replace_router(self, lost: SimRouter) -> None:
        await asyncio.sleep(self.draw.random() * REPLACED_AFTER_S)
        await self._find_controller()
        router = self._make_router()
        self.routers[self.routers.index(lost)] = router
        router.start()
        await self.enlist()

    def _make_router(self) -> SimRouter:
        self._num_routers += 1
        return SimRouter(f"router{self._num_routers}", self._config, self._connect, lambda: self.has_controller)

    async def grow(self, role: Role, node: Node | None = None) -> None:
        """A further worker starts, on this node or any."""
        await self._start_one(role, node)
        await self.enlist()

    async def roll(self, worker: SimWorker, grace_s: float) -> None:
        """Another worker of the role takes a worker's place, and then it leaves."""
        if not worker.is_leaving:
            await self.grow(worker.role)
            await self.leave(worker, grace_s)

    async def leave(self, worker: SimWorker, grace_s: float) -> None:
        """A worker is drained and ends; the last one of its role is replaced before."""
        if worker.is_leaving or worker.process.is_dead:
            return
        worker.is_leaving = True
        if not self._serving(worker.role):
            await self._start_one(worker.role)
        await self._carry_out(lambda: self._drain(worker, grace_s))
        await self._end(worker)
        await self.enlist()

    async def change_role(self, worker: SimWorker) -> None:
        """A worker serves the other pool with all that it has, where others serve its own; any may leave for decode.

        A worker that does not change is drained and ended, and another starts in the pool that it was to join.
        """
        serving = self._serving(worker.role)
        if worker not in serving or (worker.role is Role.DECODE and len(serving) == 1):
            return
        worker.joins = role = worker.role.other
        self.note(f"{worker.name} is to serve {role.value}")
        has_changed = await self._carry_out(lambda: self._serve_as(worker, role))
        worker.joins = None
        if worker.process.is_dead or worker.is_leaving:
            return
        if has_changed:
            worker.role = role
            self.count("changes of role")
            await self.enlist()
        else:
            self.errand(self.grow(role))
            await self.leave(worker, 0.0)

    async def _drain(self, worker: SimWorker, grace_s: float) -> None:
        await self.enlist()
        self._reach(worker, "leave")
        await self._call(worker, lambda: worker.parts.service.drain(grace_s), grace_s + DRAIN_MARGIN_S)
        await self._let_fetch(worker.node, grace_s)

    async def _serve_as(self, worker: SimWorker, role: Role) -> bool:
        """Has a worker serve a role; returns whether it says that it does."""
        await self.enlist()
        self._reach(worker, "change")
        grace_s = CHANGE_GRACE_S[role]
        behaviour, service = behaviour_of(role, BATCH), worker.parts.service
        has_changed = await self._call(worker, lambda: service.serve_as(behaviour, grace_s), grace_s + DRAIN_MARGIN_S)
        self._reach(worker, "changed")
        return has_changed

    def _reach(self, worker: SimWorker, step: str) -> None:
        with suppress(Died):
            self.step(worker, step)

    async def _call(self, worker: SimWorker, call: Callable[[], Coroutine[Any, Any, int]], timeout_s: float) -> bool:
        """Calls a worker's actor; returns whether it has answered, and not with an error. The call itself goes on."""

        async def succeeds() -> bool:
            try:
                await call()
            except BatonError as error:
                self.note(f"{worker.name} answers: {error}")
                return False
            return True

        try:
            async with asyncio.timeout(timeout_s):
                return await worker.process.finish(succeeds()) is True
        except TimeoutError:
            return False

    async def _carry_out(self, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Lets the controller take a recorded step; a successor of one that dies meanwhile takes it anew."""
        while True:
            await self._find_controller()
            work = self.loop.create_task(step())
            await asyncio.wait([work, self._controller_death], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            work.cancel()

    async def drain_node(self, node: Node, grace_s: float) -> None:
        """All workers of a node leave, and then the node, unless no decode worker would stay elsewhere."""
        there = [one for one in self.alive if one.node is node]
        if node.is_leaving or all(one.node is node for one in self._serving(Role.DECODE)):
            return
        self.note(f"{node.name} drains")
        node.is_leaving = True
        await asyncio.gather(*(self.leave(worker, grace_s) for worker in there))
        spoilt = {fault.kind for fault in self.run.struck} & LOSE_COPIES
        is_left = node.directory.records.leave() or node.directory.records.status().num_holds
        if not node.is_gone and not spoilt and not is_left:
            lost = [block for block in node.directory.state.blocks() if not self._may_be_lost(node, block)]
            if any(block.name.key not in self.redis.frames for block in lost):
                self.watch.violated("promise", f"{node.name} takes away blocks that only it had")
        self.lose(node, 0.0)

    def _may_be_lost(self, node: Node, block: Block) -> bool:
        """Returns whether a node that drains needs no copy of a block: a tail, or superseded by its session."""
        is_least = node.directory.state.ledger.order.priority_of(block.slot) is Priority.LEAST
        return block.name.is_tail or (is_least and block.name.key in self._of_sessions)

    async def _let_fetch(self, node: Node, grace_s: float) -> None:
        """Waits, at a node that drains, for its holds, and for copies of what only it has."""
        end_s, records = self.loop.time() + grace_s, node.directory.records
        while node.is_leaving and (records.leave() or records.status().num_holds) and self.loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(WAIT_S)

    async def enlist(self) -> None:
        """Tells the router which workers there are, once a controller is there."""
        await self._find_controller()
        async with self._listing:
            serving = [worker for role in Role for worker in self._serving(role)]
            listed = [
                Worker(
                    WorkerId(worker.name),
                    worker.role,
                    worker.name,
                    WorkerState.READY if worker in serving else WorkerState.DRAINING,
                )
                for worker in self.alive
            ]
            living = [router for router in self.routers if not router.process.is_dead]
            are_taken = await asyncio.gather(*(router.enlist(listed) for router in living))
            for member in (member for router in living for member in router.parts.members):
                member.prefill_token_s = TOKEN_S
        if any(not taken and not router.process.is_dead for taken, router in zip(are_taken, living, strict=True)):
            # the controller tries again
            await asyncio.sleep(REPLACED_AFTER_S)
            self.errand(self.enlist())

    async def _start_one(self, role: Role, node: Node | None = None) -> None:
        while True:
            name = f"{role.value[0]}{self._num_named[role]}"
            self._num_named[role] += 1
            try:
                worker = SimWorker(self, node or self._place(role), name)
            except StoreError:  # the node is lost, or its directory away
                node = None
                await asyncio.sleep(REPLACED_AFTER_S)
                continue
            self.workers.append(worker)
            await worker.start()
            return

    def _place(self, role: Role) -> Node:
        """Chooses the next node of a role that is there; any, if none of these is. Raises StoreError without nodes."""
        layout = self.run.plan.layout
        names = [f"node{number}" for number in (layout.prefill if role is Role.PREFILL else layout.decode)]
        staying = [node for node in self.nodes if not node.is_leaving]
        there = [node for node in staying if node.name in names] or staying
        if not there:
            raise StoreError("no node is there")
        self._num_placed[role] += 1
        return there[self._num_placed[role] % len(there)]

    async def _replace(self, worker: SimWorker) -> None:
        await asyncio.sleep(self.draw.random() * REPLACED_AFTER_S)
        await self._find_controller()
        role = worker.joins or worker.role
        if not worker.is_leaving or not self._serving(role):
            await self._start_one(role)
        await self.enlist()

    async def _end(self, worker: SimWorker) -> None:
        """Ends a worker in good order."""
        if not worker.process.is_dead:
            await worker.process.finish(worker.parts.service.close())
        if not worker.process.is_dead:
            worker.process.run(worker.parts.close)
            self._kill(worker)

    def _kill(self, worker: SimWorker) -> None:
        self.loop.kill(worker.process)
        for connection in worker.connections:
            self.loop.call_later(self.draw.random() * 0.002, connection.break_off, context=Context())
        self.loop.call_later(
            self.draw.random() * 0.01, worker.node.forget, worker, worker.directory.names, context=Context()
        )

    def _connect(self, address: str) -> Connection:
        (worker,) = (one for one in self.workers if one.name == address)
        return worker.connect()

    def _check_router(self) -> None:
        """I8 and I10, as far as they hold at any time."""
        num_bounds = min(2, len({one.tenant for one in self.run.plan.asks}))  # tenants may have their parts of a second
        for router in self.routers:
            num_queued = router.parts.dispatcher.num_queued
            if num_queued > num_bounds * self._config.settings.max_queued_requests:
                self.watch.violated("I8", f"{num_queued} requests are queued")

    async def _in_time(self, clients: list[SimClient]) -> None:
        """I8: every client has its answer in time."""
        tasks = [asyncio.create_task(client.run()) for client in clients]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=MAX_RUN_S)
        for client, task in zip(clients, tasks, strict=True):
            if task in late:
                self.watch.violated("I8", f"request {client.number} never ended")
            else:
                task.result()

    async def _rest(self) -> None:
        """I1, I5, I10 and I12: nothing is left behind."""
        while self._errands:
            await asyncio.wait(self._errands)
        end_s = self.loop.time() + MAX_REST_S
        while (problems := list(self._left_behind())) and self.loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        for invariant, what in problems:
            self.watch.violated(invariant, what)

    def _left_behind(self) -> Iterator[tuple[str, str]]:
        for router in self.routers:
            yield from self._left_in(router)
        for worker in self.alive:
            yield from self._left_at(worker)
        for node in self.nodes:
            yield from self._left_on(node)
            yield from self._misplaced_on(node)

    def _left_in(self, router: SimRouter) -> Iterator[tuple[str, str]]:
        dispatcher = router.parts.dispatcher
        if num_open := dispatcher.num_queued + dispatcher.num_running:
            yield "I10", f"{num_open} requests are open"
        yield from (("I10", problem) for problem in router.parts.check())
        tasks = self.loop.tasks_of(router.process)
        left = [name for name in tasks if name.startswith(("Flow.", "InferenceApi.", "_watch_"))]
        yield from (("I5", f"the router has a task {name}") for name in left)

    def _misplaced_on(self, node: Node) -> Iterator[tuple[str, str]]:
        """I12: where a node has workers, each router's index comes to have the blocks of its arena, and no others."""
        there = {mark_of(block.name.key) for block in node.directory.state.blocks() if not block.name.is_tail}
        for router in self.routers if any(worker.node is node for worker in self.alive) else ():
            known = router.parts.index.marks(node.name)
            if known != there:
                num_known = "nothing" if known is None else len(known)
                yield "I12", f"the index knows {num_known} of {len(there)} on {node.name}"

    def _left_on(self, node: Node) -> Iterator[tuple[str, str]]:
        status = node.directory.records.status()
        num_draining = 0 if self._may_owe_slots else status.counts.draining
        counts = {
            "leases": status.num_leases,
            "holds": status.num_holds,
            "slots written to": num_draining,
            "slots in use": status.counts.owned + status.counts.published,
        }
        yield from (("I5", f"{node.name} has {count} {what}") for what, count in counts.items() if count)
        yield from (("I1", f"{node.name}: {problem}") for problem in node.directory.records.check())

    @property
    def _may_owe_slots(self) -> bool:
        """Whether a live writer may keep slots that it could not give back: its next batch does."""
        out_of_reach = {Kind.AWAY, Kind.RESTART, Kind.NODE_GONE, Kind.LOST_CALL, Kind.LOST_ANSWER}
        return any(fault.kind in out_of_reach for fault in self.run.struck)

    def _left_at(self, worker: SimWorker) -> Iterator[tuple[str, str]]:
        blocks, stats = worker.parts.engine.pool.ledger.counts(), worker.parts.engine.stats()
        counts = {
            "sequences": stats.num_running + stats.num_waiting,
            "transfers": worker.transfers.pending,
            "pages in use": blocks.owned + blocks.published + blocks.draining,
        }
        yield from (("I5", f"{worker.name} has {problem}") for problem in worker.parts.service.check())
        yield from (("I5", f"{worker.name} has {count} {what}") for what, count in counts.items() if count)
        yield from (("I1", f"{worker.name}: {problem}") for problem in worker.parts.engine.check())
        worker.process.run(worker.cold.delete, [NOBODYS])
        if worker.cold.status().state == "broken":
            yield "promise", f"{worker.name} leaves Redis alone, which answers"

    def _check_contents(self) -> None:
        """I3, I4 and I7: every block that can be found is what it is said to be."""
        struck = {fault.kind for fault in self.run.struck}
        for node in self.nodes:
            for block in node.directory.state.blocks():
                payload = node.arena.slot(block.slot)[: LAYOUT.payload_bytes]
                if Kind.FLIP not in struck:
                    self.watch.expect_whole(payload, block)
                if not block.name.is_tail:
                    self.watch.judge(self.truth, f"a block of {node.name}", block.name.key, block.checksum)
        for worker in self.alive:
            pool = worker.parts.engine.pool
            for page in pool.ledger.pages:
                if (key := pool.ledger.key_of(page)) is not None:
                    checksum = checksum_of(pool.page_bytes(page).numpy().data)
                    self.watch.judge(self.truth, f"a page of {worker.name}", key, checksum)
        for key, frame in self.redis.frames.items():
            if struck.isdisjoint((Kind.COLD_CORRUPT, Kind.FLIP)):  # such values are there, and never read
                checksum = checksum_of(memoryview(frame)[-LAYOUT.payload_bytes :])
                self.watch.judge(self.truth, "a block of the cold tier", key, checksum)


def simulate(plan: Plan) -> Run:
    """Runs a plan. The same plan has the same trace, in any process."""
    for one in plan.asks:
        reference(one.kind, plan.window)
    run = Run(plan)
    virtual_time.run(_simulate(run), random.Random(plan.seed))
    return run


async def _simulate(run: Run) -> None:
    with ExitStack() as patches:
        draw, loop = random.Random(run.plan.seed), asyncio.get_running_loop()
        patches.enter_context(patch("secrets.token_hex", lambda num_bytes: draw.randbytes(num_bytes).hex()))
        patches.enter_context(patch("secrets.randbits", draw.getrandbits))
        patches.enter_context(_costs(run.plan.far_block_s))
        patches.enter_context(patch.object(moves, "LEAST_GAIN_S", 0.0))
        world = World(run)
        patches.enter_context(patch("time.time", lambda: world.wall_s + loop.time()))
        patches.enter_context(patch("time.monotonic", loop.time))
        patches.enter_context(patch.object(Arena, "open", staticmethod(world.map)))
        patches.enter_context(patch.object(errors, "report", lambda error, **_: _bug(world, error)))
        patches.enter_context(world.watch.on_ledgers())
        patches.enter_context(_logs_to(world))
        loop.set_exception_handler(lambda _, context: _unhandled(world, context))
        await world.live()


@contextmanager
def _costs(far_block_s: float) -> Iterator[None]:
    """Lets workers expect reading and computing a block to take that long; as the product guesses, if it is 0."""
    with ExitStack() as patches:
        if far_block_s:
            patches.enter_context(patch.object(costs, "_READ_PRIOR_S", far_block_s))
            patches.enter_context(patch.object(costs, "_PREFILL_PRIOR_S", far_block_s / LAYOUT.block_size))
        yield


def _bug(world: World, error: BaseException) -> BatonError:
    world.watch.violated("bug", repr(error))
    return BatonError("internal error")


def _unhandled(world: World, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not isinstance(error, Died):
        world.watch.violated("bug", f"{context.get('message')}: {error!r}")


class _TraceHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"log: {record.getMessage()}")


@contextmanager
def _logs_to(world: World) -> Iterator[None]:
    """Lets the trace have what the code logs."""
    root, handler = logging.getLogger(), _TraceHandler(world)
    before, root.handlers = root.handlers, [handler]
    try:
        yield
    finally:
        root.handlers = before


@cache
def reference(kind: int, window: Sinks | None) -> list[ChoiceAnswer]:
    """The answer to a request of the catalogue where nothing goes wrong."""
    answer: list[ChoiceAnswer] = []
    if kind == POISON:
        return answer

    async def ask_alone() -> None:
        with _quiet():
            world = World(Run(Plan(0, ALONE, 0, 1, 64, 64, 1, (), (), window)))
            await world.grow(Role.DECODE)
            answer.extend(
                await Reader(world.routers[0].parts.dispatcher.open(request_of(kind), None).outbox).read_all()
            )

    virtual_time.run(ask_alone())
    return answer


@cache
def sequences(kind: int, window: Sinks | None) -> list[tuple[int, ...]]:
    """The tokens of each choice of a request of the catalogue, its prompt first, up to `max_tokens` whatever stops it.

    The model's own oracle tells those of greedy ones.
    """
    prompt, settings = tuple(request_of(kind).token_ids.ids), request_of(kind).sampling_params
    outputs = [choice.token_ids for choice in reference(kind, window)]
    if outputs and settings.temperature == 0.0:
        oracle = model_of(window).oracle(prompt, settings.max_tokens)
        assert outputs == [oracle[: len(outputs[0])]], "the reference is not the model's answer"
        outputs = [oracle]
    return [(*prompt, *output) for output in outputs]


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
