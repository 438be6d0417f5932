"""A whole cluster in this process: real router, workers, engines and store, over in-memory twins of every wire."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

from engine.model.batch import CausalModel, DraftModel
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.tiers.memory_tier import MemoryTier
from router.config import ClusterAccess, Disaggregation, RouterConfig, RouterSettings, TraceSettings
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from router.workers.local_transport import WorkerPort
from tests.harness.assembled_worker import FINGERPRINT, TOKEN, local_worker
from tests.harness.cluster import Cluster, role_of
from text.byte_tokenizer import ByteTokenizer
from text.tokenizer_protocol import TextCodec
from wire.served_model import ServedModel, ServedNamespace
from worker.assembly import Assembly, Tiers
from worker.config import MAX_SILENCE_S, BatchSettings

ALWAYS = RouterSettings(disaggregation=Disaggregation.ALWAYS)
"""Settings for tests in which each prompt is handed off, whatever the load."""


@dataclass(frozen=True)
class Sizes:
    """Pages of a worker, slots of the arena, the bounds of a step and of the router, the longest step, the guesses.

    prefixes: whose blocks all tenants share. earlier: namespaces that the secret has served before.
    """

    num_blocks: int = 256
    num_slots: int = 512
    batch: BatchSettings = field(default_factory=BatchSettings)
    settings: RouterSettings = ALWAYS
    max_silence_s: float = MAX_SILENCE_S
    proposer: str = "off"
    draft: DraftModel | None = None
    prefixes: PublicPrefixes = NO_PREFIXES
    kv_policies: tuple[str, ...] = ("full",)
    traces: TraceSettings = field(default_factory=TraceSettings)
    earlier: tuple[ServedNamespace, ...] = ()


@dataclass(frozen=True)
class Parts:
    """A worker's model, its ways to the tiers, its node, its tokenizer's definition and its model's fingerprint."""

    model: CausalModel
    tiers: Tiers
    node_id: str = ""
    definition: Callable[[], str] = lambda: ByteTokenizer().definition
    fingerprint: bytes | None = None


class LocalCluster(Cluster[Assembly]):
    """A cluster of real workers on one node, which all have one model."""

    def __init__(
        self,
        model: CausalModel,
        sizes: Sizes,
        codec: TextCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: of the directory, whose leases and holds run out by it."""
        config = RouterConfig(
            model=served(model, sizes.kv_policies),
            cluster=ClusterAccess(TOKEN, "00" * 32),
            settings=replace(sizes.settings, grpc_port=0, metrics_port="off"),  # others may run beside
            traces=sizes.traces,
            earlier=sizes.earlier,
        )
        super().__init__(config, codec, sizes.prefixes)
        self.directory = Directory(sizes.num_slots, clock, block_bytes=model.layout.block_bytes)
        self.arena = Arena.anonymous(model.layout.block_bytes, sizes.num_slots)
        self.cold = MemoryTier(model.layout)
        self._model = model
        self._sizes = sizes

    async def stop(self) -> None:
        await super().stop()
        for worker in self.workers.values():
            await worker.service.close()
            worker.close()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, model: CausalModel, num_prefill: int, num_decode: int, sizes: Sizes | None = None
    ) -> AsyncIterator[Self]:
        """Runs a cluster with so many workers."""
        cluster = cls(model, sizes or Sizes())
        await cluster.start(num_prefill, num_decode)
        try:
            yield cluster
        finally:
            await cluster.stop()

    def _port(self, worker: Assembly) -> WorkerPort:
        return worker.service

    def _parts(self, name: str) -> Parts:
        """What the worker of that name stands on; here, what all workers do."""
        return Parts(self._model, Tiers(self.arena, self.directory, [self.cold]))

    async def _start_worker(self, name: str) -> Assembly:
        parts, sizes = self._parts(name), self._sizes
        worker = local_worker(
            parts.model,
            parts.tiers,
            name,
            role_of(name),
            sizes.num_blocks,
            sizes.batch,
            sizes.max_silence_s,
            lambda: self._broke(name),
            node_id=parts.node_id,
            proposer=sizes.proposer,
            draft=sizes.draft,
            definition=parts.definition,
            fingerprint=parts.fingerprint,
        )
        await worker.service.start()
        return worker

    def _broke(self, name: str) -> None:
        """The worker of that name is of no use any more. May be called on any thread."""


def served(model: CausalModel, kv_policies: tuple[str, ...] = ("full",)) -> ServedModel:
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
