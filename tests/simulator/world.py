"""A simulated run: a whole cluster in one thread, by a plan, with its trace and the invariants that it broke."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from kv_store.node.arena import Arena
from router.config import AdmissionBounds, ClusterAccess, RouterConfig
from router.ports.inference import InferenceApi
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.line import Transport
from tests.faults.answer import ChoiceAnswer, Reader
from tests.faults.fragments import FragmentTokenizer
from tests.local_cluster.cluster import served
from tests.local_worker import TOKEN
from tests.simulator import virtual_time
from tests.simulator.client import NO_NUMBERS, SimClient
from tests.simulator.invariants import LAYOUT, MODEL, Truth, Violation, Watch
from tests.simulator.node import Node, SimColdTier
from tests.simulator.plan import POISON, Fault, Kind, Plan, request_of
from tests.simulator.strikes import strike
from tests.simulator.virtual_time import Died, VirtualLoop
from tests.simulator.worker import SimWorker
from wire import errors
from wire.errors import BatonError, StoreError
from wire.frame import checksum_of
from wire.ids import PageId, WorkerId
from wire.pools import PoolSizes, Role, Worker, WorkerState

MAX_RUN_S = 400.0
MAX_REST_S = 60.0
REPLACED_AFTER_S = 1.0
INTERLEAVED = 0.1


@dataclass
class Run:
    """A run of a plan: what it broke, how each request ended, the attempts, and the faults that struck."""

    plan: Plan
    violations: list[Violation] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    attempts: set[str] = field(default_factory=set)
    struck: list[Fault] = field(default_factory=list)


class World:
    """The cluster of a run, and its controller."""

    def __init__(self, run: Run) -> None:
        plan = run.plan
        self.run = run
        self.draw = random.Random(plan.seed)
        self.loop = asyncio.get_running_loop()
        self.watch = Watch(self.note)
        self.watch.violations = run.violations
        self.wall_s = 1.7e9
        self.num_pages = plan.num_pages
        self.cold = SimColdTier(LAYOUT)
        self.node = Node("node0", LAYOUT, plan.num_slots, self.cold, self.watch)
        self.workers: list[SimWorker] = []
        bounds = AdmissionBounds(max_queued_requests=plan.max_queued)
        model = replace(served(MODEL), vocab_size=POISON + 1)
        config = RouterConfig(model, ClusterAccess(TOKEN, "00" * 32), admission=bounds)
        self.router = Router(config, FragmentTokenizer(), self._connect, LocalController(PoolSizes(0, 0)))
        self.api = InferenceApi(config.model, self.router.dispatcher, config.streams)
        self.truth = Truth(self.router.dispatcher.root)
        self._steps = Counter[str]()
        self._num_named = Counter[Role]()
        self._listing = asyncio.Lock()
        self._errands: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        plan = self.run.plan
        clients = []
        for number, one in enumerate(plan.asks):
            for tokens in sequences(one.kind):
                self.truth.learn(tokens)
            may_be_refused = plan.max_queued < len(plan.asks)
            clients.append(SimClient(number, one, reference(one.kind), may_be_refused, self.api, self.watch))
        self.router.start()
        writing = asyncio.create_task(self.node.write_cold())
        roles = [Role.PREFILL] * plan.num_prefill + [Role.DECODE] * plan.num_decode
        await asyncio.gather(*(self._start_one(role) for role in roles))
        await self.enlist()
        await self._in_time(clients)
        await self._rest()
        self._check_contents()
        writing.cancel()
        await self.router.stop()
        for worker in self.workers:
            await self._end(worker)
        self.run.outcomes = [client.outcome for client in clients]
        self.run.took_s = [client.took_s for client in clients]
        for client in clients:
            client.judge_loss(plan.is_transparent)
        if self.run.outcomes.count(NO_NUMBERS) > sum(fault.kind is Kind.NO_NUMBERS for fault in self.run.struck):
            self.watch.violated("promise", "more requests than one ended over logits that are no numbers")

    def note(self, what: str) -> None:
        self.run.trace.append(f"{self.loop.time():.6f} {what}")

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

    async def grow(self, role: Role) -> None:
        await self._start_one(role)
        await self.enlist()

    async def leave(self, worker: SimWorker, grace_s: float) -> None:
        """A worker is drained and ends; the last one of its role is replaced before."""
        if worker.is_leaving or worker.process.is_dead:
            return
        worker.is_leaving = True
        if not any(one.role is worker.role and not one.is_leaving for one in self.alive):
            await self._start_one(worker.role)
        await self.enlist()
        await worker.process.finish(worker.parts.service.drain(grace_s))
        await self._end(worker)
        await self.enlist()

    async def enlist(self) -> None:
        """Tells the router which workers there are."""
        async with self._listing:
            states = {True: WorkerState.DRAINING, False: WorkerState.READY}
            listed = [
                Worker(WorkerId(worker.name), worker.role, worker.name, states[worker.is_leaving])
                for worker in self.alive
            ]
            refused = await self.router.membership.set(listed)
        if refused:  # the controller tries again
            await asyncio.sleep(REPLACED_AFTER_S)
            self.errand(self.enlist())

    async def _start_one(self, role: Role) -> None:
        while True:
            name = f"{role.value[0]}{self._num_named[role]}"
            self._num_named[role] += 1
            try:
                worker = SimWorker(self, self.node, name)
            except StoreError:  # the node's directory is away
                await asyncio.sleep(REPLACED_AFTER_S)
                continue
            self.workers.append(worker)
            await worker.start()
            return

    async def _replace(self, worker: SimWorker) -> None:
        await asyncio.sleep(self.draw.random() * REPLACED_AFTER_S)
        if not worker.is_leaving or not any(one.role is worker.role and not one.is_leaving for one in self.alive):
            await self._start_one(worker.role)
        await self.enlist()

    async def _end(self, worker: SimWorker) -> None:
        """Ends a worker in good order."""
        if not worker.process.is_dead:
            await worker.process.finish(worker.parts.service.close())
        if not worker.process.is_dead:
            worker.process.run(worker.parts.close)
            self._kill(worker)

    def _kill(self, worker: SimWorker) -> None:
        assert isinstance(self.loop, VirtualLoop)
        self.loop.kill(worker.process)
        for connection in worker.connections:
            self.loop.call_later(self.draw.random() * 0.002, connection.break_off, context=Context())
        self.loop.call_later(
            self.draw.random() * 0.01, worker.node.forget, worker, worker.directory.names, context=Context()
        )

    def _connect(self, address: str) -> Transport:
        (worker,) = (one for one in self.workers if one.name == address)
        return worker.connect()

    def _check_router(self) -> None:
        """I8 and I10, as far as they hold at any time."""
        bounds = self.router.config.admission
        if self.router.dispatcher.num_queued > bounds.max_queued_requests:
            self.watch.violated("I8", f"{self.router.dispatcher.num_queued} requests are queued")

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
        """I1, I5 and I10: nothing is left behind."""
        while self._errands:
            await asyncio.wait(self._errands)
        end_s = self.loop.time() + MAX_REST_S
        while (problems := list(self._left_behind())) and self.loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        for invariant, what in problems:
            self.watch.violated(invariant, what)

    def _left_behind(self) -> Iterator[tuple[str, str]]:
        dispatcher = self.router.dispatcher
        if dispatcher.num_queued + dispatcher.num_running:
            yield "I10", f"{dispatcher.num_queued + dispatcher.num_running} requests are open"
        yield from (("I10", problem) for problem in self.router.check())
        for worker in self.alive:
            yield from self._left_at(worker)
        assert isinstance(self.loop, VirtualLoop)
        tasks = [name for name in self.loop.tasks_of(None) if name.startswith(("Flow.", "InferenceApi.", "_watch_"))]
        yield from (("I5", f"the router has a task {name}") for name in tasks)
        status = self.node.directory.status()
        num_draining = 0 if self._may_owe_slots else status.counts.draining
        counts = {
            "leases": status.num_leases,
            "holds": status.num_holds,
            "slots written to": num_draining,
            "slots in use": status.counts.owned + status.counts.published,
        }
        yield from (("I5", f"the arena has {count} {what}") for what, count in counts.items() if count)
        yield from (("I1", f"arena: {problem}") for problem in self.node.directory.check())

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

    def _check_contents(self) -> None:
        """I3, I4 and I7: every block that can be found is what it is said to be."""
        struck = {fault.kind for fault in self.run.struck}
        for block in self.node.directory.blocks():
            payload = self.node.arena.slot(block.slot)[: LAYOUT.payload_bytes]
            if Kind.FLIP not in struck:
                self.watch.expect_whole(payload, block)
            if not block.name.is_tail:
                self.watch.judge(self.truth, "a block of the arena", block.name.key, block.checksum)
        for worker in self.alive:
            pool = worker.parts.engine.pool
            for page in map(PageId, range(pool.ledger.num_pages)):
                if (key := pool.ledger.key_of(page)) is not None:
                    checksum = checksum_of(pool.page_bytes(page).numpy().data)
                    self.watch.judge(self.truth, f"a page of {worker.name}", key, checksum)
        for key, frame in self.cold.frames.items():
            if struck.isdisjoint((Kind.COLD_CORRUPT, Kind.FLIP)):  # such values are there, and never read
                checksum = checksum_of(memoryview(frame)[-LAYOUT.payload_bytes :])
                self.watch.judge(self.truth, "a block of the cold tier", key, checksum)


def simulate(plan: Plan) -> Run:
    """Runs a plan. The same plan has the same trace, in any process."""
    for one in plan.asks:
        reference(one.kind)
    run = Run(plan)
    virtual_time.run(_simulate(run), random.Random(plan.seed))
    return run


async def _simulate(run: Run) -> None:
    with ExitStack() as patches:
        draw, loop = random.Random(run.plan.seed), asyncio.get_running_loop()
        patches.enter_context(patch("secrets.token_hex", lambda num_bytes: draw.randbytes(num_bytes).hex()))
        patches.enter_context(patch("secrets.randbits", draw.getrandbits))
        world = World(run)
        patches.enter_context(patch("time.time", lambda: world.wall_s + loop.time()))
        patches.enter_context(patch.object(Arena, "open", staticmethod(world.node.map)))
        patches.enter_context(patch.object(errors, "report", lambda error, **_: _bug(world, error)))
        patches.enter_context(world.watch.on_ledgers())
        patches.enter_context(_logs_to(world))
        loop.set_exception_handler(lambda _, context: _unhandled(world, context))
        await world.live()


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
def reference(kind: int) -> list[ChoiceAnswer]:
    """The answer to a request of the catalogue where nothing goes wrong."""
    answer: list[ChoiceAnswer] = []
    if kind == POISON:
        return answer

    async def ask_alone() -> None:
        with _quiet():
            world = World(Run(Plan(0, 0, 1, 64, 64, 1, (), ())))
            await world.grow(Role.DECODE)
            answer.extend(await Reader(world.router.dispatcher.open(request_of(kind), None).outbox).read_all())

    virtual_time.run(ask_alone())
    return answer


@cache
def sequences(kind: int) -> list[tuple[int, ...]]:
    """The tokens of each choice of a request of the catalogue, its prompt first, up to `max_tokens` whatever stops it.

    The model's own oracle tells those of greedy ones.
    """
    prompt, settings = tuple(request_of(kind).token_ids.ids), request_of(kind).sampling_params
    outputs = [choice.token_ids for choice in reference(kind)]
    if outputs and settings.temperature == 0.0:
        oracle = MODEL.oracle(prompt, settings.max_tokens)
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
