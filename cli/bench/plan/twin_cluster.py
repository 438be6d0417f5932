"""A cluster in this process, on virtual time: real router, workers, engines and store; the model computes nothing."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Self

from baton.results import read_timeline
from cli.bench.open_loop import OpenLoopClient, RequestTiming
from cli.bench.plan.costs import WorkCosts
from cli.bench.plan.paced_worker import PacedLoop, PacedModel, PacedRecords, PacedTransfers, VirtualInbox
from cli.bench.schedule import Arrival
from decode_worker.behaviour import decode_behaviour
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from prefill_worker.behaviour import prefill_behaviour
from router.config import ClusterAccess, LatencyBounds, RouterConfig, RouterSettings
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.line import Transport
from router.workers.local_transport import LocalTransport
from text.byte_tokenizer import ByteTokenizer
from wire.errors import BatonError
from wire.ids import WorkerId
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, Role, Worker, WorkerState
from wire.served_model import FINGERPRINT_BYTES, ServedModel
from worker.assembly import Assembly, Threads, Tiers, assemble_on
from worker.config import BatchSettings, CheckpointSettings, ServerSettings, StoreSettings, WorkerConfig

VOCAB_SIZE = 256
TOKEN, SECRET_HEX = "twin", "00" * 32
_BEHAVIOURS = {Role.PREFILL: prefill_behaviour, Role.DECODE: decode_behaviour}


@dataclass(frozen=True, kw_only=True)
class TwinSettings:
    """The settings of a twin cluster, on one node. num_pages: a worker's pages. num_slots: the arena's slots.

    limits: decide which prompts are deferred.
    """

    costs: WorkCosts = field(default_factory=WorkCosts)
    batch: BatchSettings = field(default_factory=BatchSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    limits: LatencyBounds = field(default_factory=LatencyBounds)
    block_size: int = 16
    max_context_len: int = 8192
    num_pages: int = 4096
    num_slots: int = 16384

    @property
    def layout(self) -> KVLayout:
        """The layout of a block of few bytes: their copies take modelled time."""
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=self.block_size, dtype="float32")

    @property
    def model(self) -> ServedModel:
        layout, fingerprint = self.layout, bytes(FINGERPRINT_BYTES)
        return ServedModel(
            name="twin",
            folder="",
            dtype=layout.dtype,
            max_context_len=self.max_context_len,
            vocab_size=VOCAB_SIZE,
            fingerprint_hex=fingerprint.hex(),
            layout_hex=layout.encode().hex(),
        )


class TwinCluster(OpenLoopClient):
    """A cluster, and the client that loads it. Needs a loop of virtual time, and reads no other clock."""

    def __init__(self, settings: TwinSettings, sizes: PoolSizes) -> None:
        super().__init__(inf)
        self._settings = settings
        self._sizes = sizes
        self._clock = asyncio.get_running_loop().time
        self._models: dict[Role, list[PacedModel]] = {role: [] for role in Role}
        self._workers: dict[str, Assembly] = {}
        self._draw = random.Random(0)
        block_bytes = settings.layout.block_bytes
        self._directory = directory = Directory(settings.num_slots, self._clock, block_bytes=block_bytes)
        directory.records = PacedRecords(directory.state)
        self._tiers = Tiers(Arena.anonymous(block_bytes, settings.num_slots), directory)
        router = replace(settings.router, grpc_port=0, metrics_port="off", routers=1, public_prefixes=())
        access = ClusterAccess(TOKEN, SECRET_HEX)
        config = RouterConfig(model=settings.model, cluster=access, settings=router, limits=settings.limits)
        self.router = Router(config, ByteTokenizer(), self._connect, LocalController(PoolSizes(0, 0)))

    async def __aenter__(self) -> Self:
        self.router.start()
        names = [(f"{role.value}-{number}", role) for role in Role for number in range(self._sizes[role])]
        for name, role in names:
            self._workers[name] = worker = self._make_worker(name, role)
            await worker.service.start()
        listed = [Worker(WorkerId(name), role, name, WorkerState.READY) for name, role in names]
        refused = await self.router.membership.set(listed)
        assert not refused, refused
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.router.stop()
        for worker in self._workers.values():
            await worker.service.close()
            worker.close()

    async def max_context_len(self) -> int:
        return self._settings.max_context_len

    def busy_s(self, role: Role) -> float:
        """Returns the mean time that the engines of a pool have worked."""
        models = self._models[role]
        return sum(model.busy_s for model in models) / max(1, len(models))

    async def ask(self, arrival: Arrival, answer: RequestTiming) -> None:
        """Implements `OpenLoopClient.ask`, without a timeout."""
        await asyncio.sleep(self._draw.choice(self._settings.costs.request_s))
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=arrival.output_len, seed=0, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=arrival.prompt), sampling_params=sampling)
        try:
            async for response in self.router.dispatcher.open(request, None).outbox:
                if response.HasField("chunk"):
                    answer.note(len(response.chunk.token_ids))
                else:
                    answer.cached_len = sum(one.tokens for one in response.complete.usage.cached_tokens)
                    answer.spans = read_timeline(response.complete.timeline).spans
        except BatonError as failure:
            answer.fail(failure.status.grpc, failure.message)

    def _connect(self, address: str) -> Transport:
        return LocalTransport(self._workers[address].service)

    def _make_worker(self, name: str, role: Role) -> Assembly:
        settings, costs = self._settings, self._settings.costs
        model = PacedModel(costs, settings.layout, VOCAB_SIZE, settings.max_context_len)
        self._models[role].append(model)

        def clock() -> float:
            return self._clock() + model.spent_s

        config = WorkerConfig(
            worker_id=name,
            role=role,
            model=CheckpointSettings(settings.model),
            num_blocks=settings.num_pages,
            store=StoreSettings("", SECRET_HEX),
            server=ServerSettings(TOKEN),
            batch=settings.batch,
        )
        new_loop = partial(PacedLoop, model, costs.message_s, clock)
        new_transfers = partial(PacedTransfers, costs, clock, self._directory.records)
        threads = Threads(self._clock, VirtualInbox, new_loop, new_transfers, clock)
        behaviour = _BEHAVIOURS[role](settings.batch, settings.block_size)
        return assemble_on(model, self._tiers, config, behaviour, lambda: None, threads)
