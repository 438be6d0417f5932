"""A worker of the simulated cluster: the real one, whose engine and transfers take turns on the event loop."""

import asyncio
import random
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

import torch

from cli.bench.plan.paced_worker import VirtualInbox
from engine.core import EngineCore
from engine.events import Failed, Jumped
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from kv_store.block_store import BlockStore
from kv_store.device_pool import Fence
from kv_store.frame import checksum_of
from kv_store.transfers import Done, Fetch, Prefetch, ThreadTransfers, Transfer
from tests.harness.assembled_worker import local_worker
from tests.simulator.invariants import PromptCounts, Truth, Watch
from tests.simulator.network import Connection
from tests.simulator.node import Node, SimDirectoryClient
from tests.simulator.peers import SimPeer
from tests.simulator.plan import POISON
from tests.simulator.redis import SimRedis, SimRedisTier
from tests.simulator.virtual_time import Process
from wire.errors import PromptReturned
from wire.pools import Role
from wire.tier import Tier
from worker.assembly import Assembly, Threads, Tiers
from worker.config import BatchSettings
from worker.loop import Inbox, StepReport, WorkerLoop

BATCH = BatchSettings(max_step_tokens=48, max_running=16, max_chunk_tokens=32)
MAX_SILENCE_S = 5.0
STEP_S = 0.005
NEVER = -1e4
COPIES_S = (0.0, 0.0005, 0.001, 0.002, 0.02)
SLOW_COLD_S = 0.3


class World(Protocol):
    """The cluster, as a worker knows it."""

    draw: random.Random
    watch: Watch
    truth: Truth
    redis: SimRedis
    num_pages: int
    model: HashModel
    far_block_s: float

    def node_at(self, address: str) -> Node:
        """Finds a node by the address of its block port, gone or not."""

    def step(self, worker: "SimWorker", step: str, what: str = "") -> None:
        """A worker comes to a step of the hand-off, at which faults may strike."""

    def interleave(self, worker: "SimWorker") -> None:
        """Lets a transfer of another worker run now."""

    def crash(self, worker: "SimWorker") -> None:
        """A worker's process ends now."""

    def count(self, what: str) -> None:
        """Counts a split, a group or a jump of the run."""

    def broke(self, worker: "SimWorker") -> None:
        """A worker is of no use any more."""


class SimWorker:
    """A process of a node. `stalled_until_s`: its engine makes no step before.

    role: of the pool that it serves, as the controller knows. joins: the role that it changes to, if it does.
    """

    def __init__(self, world: World, node: Node, name: str) -> None:
        self.name = name
        self.role = Role.PREFILL if name.startswith("p") else Role.DECODE
        self.process = Process(name)
        self.world = world
        self.node = node
        self.is_leaving = False
        self.joins: Role | None = None
        self.stalled_until_s = 0.0
        self.lag_s = 0.0
        self.has_lost_lease = False
        self.num_lost_calls = self.num_lost_answers = 0
        self.num_cut_blocks = self.num_blocks_twice = 0
        self.connections: list[Connection] = []
        self.counts = PromptCounts(world.watch, name)
        self.model = SimModel(world.model, self._be_poisoned)
        self._loop = asyncio.get_running_loop()
        self.directory = SimDirectoryClient(self, node)
        self.parts: Assembly = self.process.run(self._assemble)

    @property
    def transfers(self) -> "SimTransfers":
        assert isinstance(self.parts.transfers, SimTransfers)
        return self.parts.transfers

    async def start(self) -> None:
        await self.process.finish(self.parts.service.start())

    def connect(self) -> Connection:
        """Opens a connection from the router."""

        def note(step: str, what: str) -> None:
            self.world.step(self, step, what)

        self.connections.append(Connection(self.process, self.parts.service, self.world.draw, note))
        return self.connections[-1]

    def clock(self) -> float:
        return self._loop.time() + self.lag_s

    def step(self, step: str) -> None:
        self.world.step(self, step)

    def interleave(self) -> None:
        self.world.interleave(self)

    def on_cold_call(self) -> None:
        """A call of Redis, which may take long."""
        self.step("cold")
        if self.world.redis.is_slow:
            self.lag_s += SLOW_COLD_S

    def on_far_block(self) -> None:
        """A block has come from a cold tier or another node, which takes as long as the plan says."""
        self.lag_s += self.world.far_block_s

    def check(self) -> None:
        """I1: the books of the pool."""
        self.world.watch.expect_none("I1", self.name, self.parts.engine.pool.ledger.check())

    def _be_poisoned(self) -> None:
        self.world.crash(self)
        self.process.require_alive()

    def _assemble(self) -> Assembly:
        """Raises StoreError without a directory."""
        arena = self.node.map(self.directory.attach().arena_path)
        self.cold = SimRedisTier(self.world.redis, self.name, self.clock, self.on_cold_call, self.on_far_block)
        tiers = Tiers(arena, self.directory, [self.cold], lambda address: SimPeer(self, self.world.node_at(address)))
        threads = Threads(
            self.clock,
            lambda: VirtualInbox(),
            lambda *parts: SimLoop(self, *parts),
            lambda store, wake: SimTransfers(self, store, wake),
            self.clock,
        )
        return local_worker(
            self.model,
            tiers,
            self.name,
            self.role,
            self.world.num_pages,
            BATCH,
            MAX_SILENCE_S,
            lambda: self.world.broke(self),
            threads,
            self.node.name,
        )


class SimModel(HashModel):
    """The model of all workers; `on_poison` does not return. The next `num_failing` steps fail, and in the next
    `num_without_numbers` one sequence has logits that are no numbers.
    """

    def __init__(self, model: HashModel, on_poison: Callable[[], None]) -> None:
        vars(self).update(vars(model))
        self._model = model
        self.vocab_size = POISON + 1
        self.num_failing = self.num_without_numbers = 0
        self._on_poison = on_poison

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        if POISON in batch.token_ids:
            self._on_poison()
        if self.num_failing:
            self.num_failing -= 1
            raise RuntimeError("a step that fails")
        logits = torch.nn.functional.pad(self._model.forward(batch, kv), (0, 1), value=NEVER)
        if self.num_without_numbers and len(logits):
            self.num_without_numbers -= 1
            logits[0] = torch.nan
        return logits


class SimLoop(WorkerLoop):
    """The loop of an engine without a thread: a task makes its turns, each a drawn time after the one before."""

    def __init__(
        self, worker: SimWorker, engine: EngineCore, inbox: Inbox, deliver: Callable[[StepReport], None], *parts: Any
    ) -> None:
        def watched(outcome: StepReport) -> None:
            worker.counts.take(outcome)
            for event in outcome.events:
                if isinstance(event, Failed) and isinstance(event.error, PromptReturned):
                    worker.world.count("moves")
                    worker.step("return")
            for event in outcome.output.before:
                if isinstance(event, Jumped):
                    worker.world.count("jumps")
                    worker.step("jump")
            deliver(outcome)

        super().__init__(engine, inbox, watched, *parts)
        self._worker = worker
        self._has_ended = False

    def start(self) -> None:
        self._turning = asyncio.create_task(self._turn_for_ever())

    def stop(self, timeout_s: float) -> bool:
        self.is_running = False
        if self._worker.stalled_until_s < inf:
            while self._go_on():
                pass
        return self._has_ended

    async def _turn_for_ever(self) -> None:
        while self._go_on():
            assert isinstance(self._inbox, VirtualInbox)
            if not self._has_more_to_do:
                await self._inbox.wait()
            await asyncio.sleep(self._worker.world.draw.random() * 2 * STEP_S)
            while (left_s := self._worker.stalled_until_s - self._worker.clock()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(min(left_s, 1000.0))

    def _go_on(self) -> bool:
        if self._engine.has_requests and not self._has_ended:
            self._worker.step("turn")
        self._has_ended = self._has_ended or not self.run_or_wind_up()
        if self._engine.has_requests:
            self._worker.check()
        return not self._has_ended


class SimTransfers(ThreadTransfers):
    """Transfers without a thread: each runs a drawn time after its order, or in the midst of another worker's."""

    def __init__(self, worker: SimWorker, store: BlockStore, wake: Any) -> None:
        super().__init__(store, wake)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._is_running = False

    @property
    def is_waiting(self) -> bool:
        """Whether a transfer could run now."""
        return not (self._orders.empty() or self._is_running or self.is_closing)

    def start(self) -> None:
        """Begins nothing: orders have timers of their own."""

    def begin(self, transfer: Transfer) -> None:
        pages, ledger = set(transfer.pages), self._worker.parts.engine.pool.ledger
        self._worker.world.watch.use(transfer, ledger, pages, self._worker.clock, inf)
        super().begin(transfer)
        delay_s = self._worker.world.draw.choice(COPIES_S)
        is_group = isinstance(transfer, Fetch) and transfer.step is not None
        if is_group:  # its pages drain for as long as it is read
            delay_s += len(transfer.names) * self._worker.world.far_block_s
        self._loop.call_later(delay_s + max(0.0, self._worker.lag_s), self.run_next)
        if is_group:
            self._worker.world.count("groups")
            self._worker.step("group")
        if isinstance(transfer, Prefetch):
            self._worker.world.count("prefetches")

    def run_next(self) -> None:
        """Runs the oldest transfer, if one waits."""
        if self.is_waiting:
            self._is_running = True
            self._worker.lag_s = 0.0
            self.run_one()
            self._is_running = False

    def _end_of(self, transfer: Transfer, fence: Fence) -> Done:
        worker = self._worker
        worker.has_lost_lease = False
        done = super()._end_of(transfer, fence)
        worker.world.watch.end(transfer)
        if done.error is not None:
            worker.world.watch.violated("bug", f"{worker.name}: a transfer failed: {done.error}")
        if done.reading.later is not None:
            worker.world.count("splits")
        if isinstance(transfer, Fetch | Prefetch):
            self._check_fetched(transfer, done)
        worker.world.watch.expect_none("I1", "arena", worker.node.directory.records.check())
        return done

    def _check_fetched(self, fetch: Transfer, done: Done) -> None:
        """I4, I7 and I9, of the blocks that a fetch has brought."""
        worker, pool = self._worker, self._worker.parts.engine.pool
        places = [place for place, block in enumerate(done.reading.blocks) if isinstance(block, Tier)]
        if worker.has_lost_lease and places:
            worker.world.watch.violated("I9", f"{worker.name}: a fetch counts, though its lease had run out")
        for place, page in zip(places, fetch.pages, strict=False):
            name = fetch.names[place]
            if not name.is_tail:
                checksum = checksum_of(pool.page_bytes(page).numpy().data)
                worker.world.watch.judge(worker.world.truth, f"{worker.name}: a fetched block", name.key, checksum)
