"""The assembly of a worker, from the model to the service, in the order of dependencies."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.core import EngineCore
from engine.grammar.grammars import Grammars
from engine.model.batch import CausalModel, DraftModel
from engine.model.decoder import Decoder
from engine.model.loading import load_model
from engine.model.weight_cache import WeightCache
from engine.speculation.draft_folder import naming_the_draft, open_draft
from engine.speculation.draft_proposer import MAX_CATCH_UP, DraftProposer
from engine.speculation.speculator import NgramProposer, Proposer, Speculator
from engine.step.prefill_meter import PrefillMeter
from engine.warm.warming import Warmth, compile_kernels, ignore_progress, limits_of, run_steps, warm
from kernels.backend import Backend, KVPages, on_any_device
from kernels.cpu.library import NoKernels
from kernels.selection import select_backend
from kv_store.block_store import BlockStore
from kv_store.device_pool import DevicePool
from kv_store.node.arena import Arena
from kv_store.node.directory_client import DirectoryClient
from kv_store.node.directory_port import DirectoryPort
from kv_store.node_store import NodeStore
from kv_store.peers.block_reader import BlockReader
from kv_store.tiers.cold_tier import BlockSource, ColdTier
from kv_store.tiers.cold_tiers import open_tiers
from kv_store.transfers import ThreadTransfers, Transfers
from wire.errors import ConfigError, ModelError
from wire.ids import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, release
from wire.pb import worker_pb2
from worker.config import WorkerConfig
from worker.job import Behaviour
from worker.loop import Inbox, WorkerLoop
from worker.progress import Progress
from worker.service import COLD, Warm, WorkerService
from worker.store_control import AsyncStore

log = logging.getLogger(__name__)

PEER_TIMEOUT_S = 1.0
"""Bound on each part of another node's answer: computing a block is quicker."""

_PROPOSERS: dict[str, Callable[[], Proposer | None]] = {"off": lambda: None, "ngram": NgramProposer}


@dataclass(frozen=True)
class Tiers:
    """A worker's access to the tiers below its pages. peer: makes the source of another node's blocks."""

    arena: Arena
    directory: DirectoryPort
    cold: Sequence[ColdTier] = ()
    peer: Callable[[str], BlockSource] | None = None


@dataclass(frozen=True)
class Threads:
    """The parts of a worker with threads besides its event loop, their clock, and the clock of engine steps."""

    clock: Callable[[], float] = time.monotonic
    new_inbox: Callable[[], Inbox] = Inbox
    new_loop: Callable[..., WorkerLoop] = WorkerLoop
    new_transfers: Callable[[BlockStore, Callable[[], None]], ThreadTransfers] = ThreadTransfers
    stopwatch: Callable[[], float] = time.perf_counter


THREADS = Threads()


@dataclass(frozen=True)
class Assembly:
    """A worker's service, not started yet, and its engine, transfers and description."""

    info: worker_pb2.WorkerInfo
    engine: EngineCore
    transfers: Transfers
    service: WorkerService

    def close(self) -> None:
        """Ends the transfers, in bounded time, once the service is closed. The rest ends with the process."""
        self.transfers.close()


def assemble(config: WorkerConfig, behaviour: Behaviour, on_broken: Callable[[], None]) -> Assembly:
    """Loads the model, joins the node's store, and assembles a worker on both. Blocks while it loads.

    Raises ModelError or ConfigError for a model that it cannot serve, StoreError without the node's directory.
    """
    torch.set_num_threads(config.num_threads)
    checkpoint = config.model
    device = torch.device(checkpoint.device)
    try:
        backend = select_backend(device, checkpoint.kernels)
    except NoKernels as error:
        raise ConfigError(f"worker.cpu_kernels: {error}") from error
    served, block_size, kv_dtype = checkpoint.served, config.block_size, checkpoint.kv_dtype
    folder, policy = Path(served.folder), checkpoint.kv_policy
    weights, began_s = WeightCache(checkpoint.weight_cache_bytes), time.monotonic()
    with _fitting(config):
        model = load_model(folder, served.dtype, device, block_size, backend, kv_dtype, policy, weights.load)
        draft = _load_draft(config, backend, weights)
    load_s = time.monotonic() - began_s
    _require_same_model(config, model.layout.dtype, backend.version)
    directory = DirectoryClient(config.store.directory_path)
    arena = Arena.open(directory.attach().arena_path)
    cold = open_tiers(config.store.cold, model.layout, config.store.mac_key)
    token, payload_bytes = config.server.token.encode(), model.layout.payload_bytes

    def peer(address: str) -> BlockSource:
        return BlockReader(address, payload_bytes, token, PEER_TIMEOUT_S, identity=config.server.identity)

    assembly = assemble_on(
        model,
        Tiers(arena, directory, cold, peer),
        config,
        behaviour,
        on_broken,
        draft=draft,
        definition=lambda: Checkpoint(folder).load_tokenizer().definition,
        warm_up=partial(_warm_up, model, draft, backend, config),
    )
    assembly.info.load_s, assembly.info.mapped_bytes = load_s, weights.mapped_bytes
    return assembly


def _warm_up(
    model: CausalModel,
    draft: Decoder | None,
    backend: Backend,
    config: WorkerConfig,
    kv: KVPages,
    draft_kv: KVPages | None,
) -> Warmth:
    """Warms the model, and its draft, whose steps have no graphs. Blocks for seconds on a GPU. Raises ConfigError."""
    batch, began_s = config.batch, time.monotonic()
    with Progress.beside(Path(config.store.directory_path), config.worker_id) as progress:
        report = ignore_progress if model.device.type == "cpu" else progress.note
        if draft is not None and draft_kv is not None:
            limits = limits_of(draft, draft_kv, batch.max_running, MAX_CATCH_UP)
            run_steps(draft, draft_kv, compile_kernels(draft, backend, draft_kv, limits, report))
        limits = limits_of(model, kv, batch.max_running, batch.max_step_tokens)
        warmth = warm(model, backend, kv, limits, report)
    log.info("warm after %.1f s; sizes without a graph: %s", time.monotonic() - began_s, warmth.without_program)
    return warmth


@contextmanager
def _fitting(config: WorkerConfig) -> Iterator[None]:
    """Turns a device's lack of memory into ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"worker {config.worker_id}: the model and {config.num_blocks} blocks of KV do not fit into the "
            f"memory of {config.model.device}: lower worker.pool_bytes, or serve a smaller model"
        ) from error


def _load_draft(config: WorkerConfig, backend: Backend, weights: WeightCache) -> Decoder | None:
    """Loads the draft, with as many threads as the model's kernels. Raises ModelError for an unfit folder."""
    if config.speculation.draft is None:
        return None
    with naming_the_draft():
        draft = open_draft(Path(config.speculation.draft), Checkpoint(Path(config.model.served.folder)))
        device, block_size = torch.device(config.model.device), config.block_size
        return Decoder.load(draft.folder, None, device, block_size, backend, load_weights=weights.load)


def assemble_on(
    model: CausalModel,
    tiers: Tiers,
    config: WorkerConfig,
    behaviour: Behaviour,
    on_broken: Callable[[], None],
    threads: Threads = THREADS,
    draft: DraftModel | None = None,
    definition: Callable[[], str] = str,
    warm_up: Callable[[KVPages, KVPages | None], Warm] = lambda kv, draft_kv: COLD,
) -> Assembly:
    """Makes an engine over a model, its draft and a store, and a service over the engine. on_broken: see WorkerService.

    definition: reads the tokenizer, at the first grammar. warm_up: warms model and draft on their pages.
    """
    num_open = config.batch.num_open(model.layout.block_size)
    with _fitting(config):
        pool = DevicePool(model.layout, config.num_blocks, model.device, num_open)
        proposer = DraftProposer(draft, pool.ledger.num_pages) if draft else _PROPOSERS[config.speculation.proposer]()
    # Before the model is warm, from when on what is compiled counts as late: a store compiles the sums of its pages.
    store = NodeStore(model.layout, tiers.arena, tiers.directory, tiers.cold, pool, threads.clock, tiers.peer)
    warm = warm_up(pool.kv, proposer.pool.kv if isinstance(proposer, DraftProposer) else None)
    inbox = threads.new_inbox()
    transfers = threads.new_transfers(store, inbox.ring)
    transfers.start()
    speculator = Speculator(proposer, config.speculation.max_draft_len, threads.stopwatch)
    meter = PrefillMeter(store.costs, threads.stopwatch)
    engine = EngineCore(model, pool, behaviour.batcher, transfers, speculator, meter=meter)
    info = _describe(config, model, tiers.arena.num_slots)
    grammars = Grammars(definition, model.vocab_size, model.eos_token_ids)
    service = WorkerService(
        info,
        behaviour,
        engine,
        inbox,
        AsyncStore(store.control, tiers.directory.records),
        on_broken,
        config.max_silence_s,
        threads.clock,
        threads.new_loop,
        grammars,
        warm,
    )
    return Assembly(info, engine, transfers, service)


def _require_same_model(config: WorkerConfig, dtype: str, backend_version: str) -> None:
    """Raises ModelError if the folder is not, or no longer, the cluster's model: KV would be mixed up.

    Runs after loading, so that any earlier change shows. The digest cache avoids reading unchanged files again. A head
    without a GPU has named a version for any device.
    """
    checkpoint, digests = Checkpoint(Path(config.model.served.folder)), DigestCache.of_user()
    versions = backend_version, on_any_device(backend_version)
    if config.model.served.fingerprint not in (checkpoint.fingerprint(dtype, one, digests) for one in versions):
        problem = f"the model folder is not that of the cluster, or has changed since: node {config.store.node_id}"
        problem += "" if config.model.device == "cpu" else "; or its GPU, or its version of Triton, is another"
        raise ModelError(problem, folder=config.model.served.folder)


def _describe(config: WorkerConfig, model: CausalModel, num_arena_blocks: int) -> worker_pb2.WorkerInfo:
    """Describes this process, with a newly drawn epoch."""
    return worker_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=config.role.value,
        protocol_version=PROTOCOL_VERSION,
        oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
        release=release(),
        epoch=secrets.token_hex(8),
        fingerprint=config.model.served.fingerprint,
        layout=model.layout.encode(),
        max_context_len=model.max_context_len,
        num_blocks=config.num_blocks,
        num_arena_blocks=num_arena_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        pid=os.getpid(),
        node_id=config.store.node_id,
        block_address=config.store.block_address,
    )
