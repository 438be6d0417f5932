"""A whole cluster in this process: the real router, workers, engines and store, over in-memory twins of every wire."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.model.batch import DraftModel, Model
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.tiers.memory_tier import MemoryTier
from router.config import AdmissionBounds, ClusterAccess, RouterConfig, ServedModel, StreamBounds
from router.requests.public_prefixes import NO_PREFIXES, PublicPrefixes
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.line import Transport
from router.workers.local_transport import Faults, LocalTransport
from tests.harness.assembled_worker import FINGERPRINT, TOKEN, local_worker
from tests.harness.fake_cluster import Output, collect
from text.byte_tokenizer import ByteTokenizer
from text.chat import PlainRenderer
from text.codec import TextCodec
from wire.ids import WorkerId
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, Role, Worker, WorkerState
from worker.assembly import Assembly, Tiers
from worker.config import BatchSettings
from worker.engine_watch import MAX_SILENCE_S


@dataclass(frozen=True)
class Sizes:
    """Pages of a worker, slots of the arena, the bounds of a step and of the router, the longest step, the guesses.

    prefixes: whose blocks all tenants share.
    """

    num_blocks: int = 256
    num_slots: int = 512
    batch: BatchSettings = field(default_factory=BatchSettings)
    admission: AdmissionBounds = field(default_factory=AdmissionBounds)
    streams: StreamBounds = field(default_factory=StreamBounds)
    max_silence_s: float = MAX_SILENCE_S
    proposer: str = "off"
    draft: DraftModel | None = None
    prefixes: PublicPrefixes = NO_PREFIXES
    kv_policies: tuple[str, ...] = ("full",)


@dataclass(frozen=True)
class Parts:
    """A worker's model, its ways to the tiers, and its node."""

    model: Model
    tiers: Tiers
    node_id: str = ""


class LocalCluster:
    """Workers are named p0, p1, ... and d0, d1, ...; to the router, a name is an address too."""

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        codec: TextCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: of the directory, whose leases and holds run out by it."""
        self.directory = Directory(sizes.num_slots, clock, block_bytes=model.layout.block_bytes)
        self.arena = Arena.anonymous(model.layout.block_bytes, sizes.num_slots)
        self.cold = MemoryTier(model.layout)
        self.workers: dict[str, Assembly] = {}
        self.faults: dict[str, Faults] = {}
        self.transports: dict[str, LocalTransport] = {}
        self._model = model
        self._sizes = sizes
        self.port = LocalController(PoolSizes(0, 0))
        config = RouterConfig(
            served(model, sizes.kv_policies),
            ClusterAccess(TOKEN, "00" * 32),
            admission=sizes.admission,
            streams=sizes.streams,
        )
        codec = codec or ByteTokenizer()
        self.router = Router(config, codec, self._connect, self.port, PlainRenderer(), sizes.prefixes)

    async def start(self, num_prefill: int, num_decode: int) -> None:
        self.router.start()
        await self.resize(num_prefill, num_decode)

    async def resize(self, num_prefill: int, num_decode: int) -> None:
        await self.enlist(*(f"p{index}" for index in range(num_prefill)), *(f"d{index}" for index in range(num_decode)))

    async def enlist(self, *names: str, draining: str = "") -> None:
        """Starts workers that are new and lists these; those no longer listed keep running, unknown to the router."""
        for name in names:
            if name not in self.workers:
                self.workers[name] = await self._start_worker(name)
        refused = await self.router.membership.set(
            [Worker(WorkerId(name), _role(name), name, _state(name == draining)) for name in names]
        )
        assert refused == {}

    async def generate(self, request: pb.GenerateRequest, time_left_s: float | None = 60.0) -> Output:
        return await collect(self.router.dispatcher.open(request, time_left_s))

    async def status(self) -> cluster_pb2.ClusterStatus:
        """Checked: `problems` lists every invariant that does not hold."""
        return await self.router.statuses.read(cluster_pb2.GetStatusRequest(check=True))

    async def stop(self) -> None:
        await self.router.stop()
        for worker in self.workers.values():
            await worker.service.close()
            worker.close()

    def _connect(self, address: str) -> Transport:
        faults = self.faults.setdefault(address, Faults())
        self.transports[address] = LocalTransport(self.workers[address].service, faults)
        return self.transports[address]

    def _parts(self, name: str) -> Parts:
        """What the worker of that name stands on; here, what all workers do."""
        return Parts(self._model, Tiers(self.arena, self.directory, [self.cold]))

    async def _start_worker(self, name: str) -> Assembly:
        parts, sizes = self._parts(name), self._sizes
        worker = local_worker(
            parts.model,
            parts.tiers,
            name,
            _role(name),
            sizes.num_blocks,
            sizes.batch,
            sizes.max_silence_s,
            lambda: self._broke(name),
            node_id=parts.node_id,
            proposer=sizes.proposer,
            draft=sizes.draft,
        )
        await worker.service.start()
        return worker

    def _broke(self, name: str) -> None:
        """The worker of that name is of no use any more. May be called on any thread."""


@asynccontextmanager
async def local_cluster(
    model: Model, num_prefill: int, num_decode: int, sizes: Sizes | None = None
) -> AsyncIterator[LocalCluster]:
    """A running cluster."""
    cluster = LocalCluster(model, sizes or Sizes())
    await cluster.start(num_prefill, num_decode)
    try:
        yield cluster
    finally:
        await cluster.stop()


def _role(name: str) -> Role:
    return Role.PREFILL if name.startswith("p") else Role.DECODE


def _state(is_draining: bool) -> WorkerState:
    return WorkerState.DRAINING if is_draining else WorkerState.READY


def served(model: Model, kv_policies: tuple[str, ...] = ("full",)) -> ServedModel:
    """Describes a model as routers know it."""
    return ServedModel(
        name="twin",
        folder="",
        dtype=model.layout.dtype,
        max_context_len=model.max_context_len,
        vocab_size=model.vocab_size,
        fingerprint_hex=FINGERPRINT.hex(),
        layout_hex=model.layout.encode().hex(),
        kv_policies=kv_policies,
    )
