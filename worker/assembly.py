"""A worker's parts, from the model to the store, made in the order in which they need one another."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch import Model
from engine.batcher import Batcher
from engine.checkpoint import Checkpoint
from engine.core import EngineCore
from engine.decoder import Decoder
from engine.digest_cache import DigestCache
from engine.fingerprint import fingerprint
from kernels.backend import select_backend
from kv_store.arena import Arena
from kv_store.block_store import BlockStore
from kv_store.device_pool import DevicePool
from kv_store.directory_client import DirectoryClient
from kv_store.node_store import NodeStore
from kv_store.redis_tier import RedisTier
from kv_store.transfers import ThreadTransfers, Transfers
from wire.errors import ModelError
from wire.ids import PROTOCOL_VERSION
from wire.pb import worker_pb2
from worker.commands import Command
from worker.config import WorkerConfig
from worker.inbox import Inbox


@dataclass(frozen=True)
class Assembly:
    """What a WorkerService runs on, and what is to be closed after it."""

    info: worker_pb2.WorkerInfo
    engine: EngineCore
    inbox: Inbox[Command]
    store: BlockStore
    transfers: Transfers

    def close(self) -> None:
        """Ends the transfers, within bounds. The rest goes with the process."""
        self.transfers.close()


def assemble(config: WorkerConfig, batcher: Batcher) -> Assembly:
    """Loads the model, joins the node's store, and puts an engine over both. Blocks for as long as loading takes.

    Raises ModelError or ConfigError for what cannot be served, StoreError if the node's directory is not there.
    """
    torch.set_num_threads(config.num_threads)
    model = Decoder.load(
        Path(config.model.folder), config.model.dtype, torch.device(config.model.device), config.pool.block_size
    )
    _require_same_model(config, model.layout.dtype)
    pool = DevicePool(model.layout, config.pool.num_blocks, model.device)
    directory = DirectoryClient(config.store.directory_path)
    arena = Arena.open(directory.attach().arena_path)
    cold = RedisTier(config.store.redis_url, model.layout) if config.store.redis_url else None
    store = NodeStore(model.layout, arena, directory, cold, pool)
    inbox: Inbox[Command] = Inbox()
    transfers = ThreadTransfers(store, inbox.ring)
    engine = EngineCore(model, pool, batcher, transfers)
    return Assembly(describe(config, model, arena.num_slots), engine, inbox, store, transfers)


def _require_same_model(config: WorkerConfig, dtype: str) -> None:
    """Raises ModelError if the folder is not, or no longer, what the cluster was started with: KV would be mixed up.

    Looked at after loading, so that a change at any time before shows. Files that have not changed are not read again.
    """
    checkpoint = Checkpoint(Path(config.model.folder))
    version = select_backend(torch.device(config.model.device)).version
    if fingerprint(checkpoint.files, dtype, version, DigestCache.of_user()) != config.model.fingerprint:
        raise ModelError("the model folder has changed since the cluster was started", folder=config.model.folder)


def describe(config: WorkerConfig, model: Model, num_arena_blocks: int) -> worker_pb2.WorkerInfo:
    """What this process says of itself; its epoch is drawn here."""
    return worker_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=config.role,
        protocol_version=PROTOCOL_VERSION,
        epoch=secrets.token_hex(8),
        fingerprint=config.model.fingerprint,
        layout=model.layout.encode(),
        max_context_len=model.max_context_len,
        num_blocks=config.pool.num_blocks,
        num_arena_blocks=num_arena_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        pid=os.getpid(),
    )
