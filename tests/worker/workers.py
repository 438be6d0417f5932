"""Whole workers in this process: a role's service over an engine of hashes, on a node's store that they share."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch

from decode_worker.behaviour import decode_behaviour
from engine.batch import Batch
from engine.core import EngineCore
from engine.hash_model import HashModel
from kv_store.arena import Arena
from kv_store.device_pool import DevicePool
from kv_store.directory import Directory
from kv_store.node_store import HOLD_TTL_S, NodeStore
from kv_store.transfers import ThreadTransfers
from prefill_worker.behaviour import prefill_behaviour
from wire.convert import sampling_to_pb
from wire.ids import PROTOCOL_VERSION
from wire.layout import KVLayout
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from wire.sampling import SamplingParams
from worker.commands import Command
from worker.config import BatchSettings
from worker.engine_watch import MAX_SILENCE_S
from worker.inbox import Inbox
from worker.service import WorkerService

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
VOCAB_SIZE = 997
POISON = (5, 6, 7)
"""A prompt after which logits are no numbers."""
PROMPT = tuple(range(1, 101))
TIMEOUT_S = 20.0
_BEHAVIOURS = {Role.PREFILL: prefill_behaviour, Role.DECODE: decode_behaviour}


class Model(HashModel):
    """Fails while it is broken, gives no numbers for POISON, and waits before each step while `may_go` is not set."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, VOCAB_SIZE)
        self.is_broken = False
        self.may_go = threading.Event()
        self.may_go.set()

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        assert self.may_go.wait(TIMEOUT_S)
        if self.is_broken:
            raise RuntimeError("out of memory")
        logits = super().forward(batch, kv)
        is_poisoned = (batch.token_ids == POISON[-1]) & (batch.positions == len(POISON) - 1)
        logits[is_poisoned[batch.sample_rows]] = float("nan")
        return logits


class Node:
    """The store that the workers of a test share."""

    def __init__(self, num_slots: int = 512) -> None:
        self.directory = Directory(num_slots)
        self.arena = Arena.anonymous(LAYOUT.block_bytes, num_slots)

    def store(self, pool: DevicePool) -> NodeStore:
        return NodeStore(LAYOUT, self.arena, self.directory, None, pool)


class Worker:
    """A service and what it is made of."""

    def __init__(
        self, role: Role, node: Node, num_blocks: int, on_broken: Callable[[], None], max_silence_s: float
    ) -> None:
        self.model = Model()
        pool = DevicePool(LAYOUT, num_blocks, self.model.device)
        store = node.store(pool)
        inbox: Inbox[Command] = Inbox()
        self.transfers = ThreadTransfers(store, inbox.ring)
        made = _BEHAVIOURS[role](BatchSettings(), LAYOUT.block_size)
        self.engine = EngineCore(self.model, pool, made.batcher, self.transfers)
        info = worker_pb2.WorkerInfo(
            worker_id=f"{role.value}-0",
            role=role.value,
            protocol_version=PROTOCOL_VERSION,
            layout=LAYOUT.encode(),
            max_context_len=self.model.max_context_len,
            num_blocks=num_blocks,
            num_arena_blocks=node.arena.num_slots,
            vocab_size=VOCAB_SIZE,
        )
        self.service = WorkerService(info, made, self.engine, inbox, store, on_broken, max_silence_s)

    async def status(self) -> worker_pb2.WorkerStatus:
        """With the books checked."""
        status = await self.service.get_status(worker_pb2.GetWorkerStatusRequest(check=True))
        assert list(status.problems) == []
        return status

    async def at_rest(self) -> worker_pb2.WorkerStatus:
        """The status once nobody has a page, nothing is copied and nothing held; long before holds run out."""
        async with asyncio.timeout(HOLD_TTL_S * 0.8):
            while True:
                status = await self.status()
                blocks = status.blocks
                in_use = blocks.owned + blocks.published + blocks.draining + status.num_running + status.num_waiting
                if not in_use and not status.host.num_holds:
                    return status


@asynccontextmanager
async def serving(
    role: Role,
    node: Node,
    num_blocks: int = 256,
    on_broken: Callable[[], None] = lambda: None,
    max_silence_s: float = MAX_SILENCE_S,
) -> AsyncIterator[Worker]:
    worker = Worker(role, node, num_blocks, on_broken, max_silence_s)
    await worker.service.start()
    try:
        yield worker
    finally:
        worker.model.may_go.set()
        await worker.service.close()
        worker.transfers.close()


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)


def prefill_request(
    prompt: Sequence[int] = PROMPT, sampling: SamplingParams | None = None, request_id: str = "r", attempt: int = 1
) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        request_id=request_id,
        attempt=attempt,
        namespace_root=bytes(32),
        prompt=inference_pb2.TokenIds(ids=prompt),
        sampling_params=sampling_to_pb(sampling or greedy(40)),
    )


def decode_request(
    prompt: Sequence[int] = PROMPT,
    sampling: SamplingParams | None = None,
    request_id: str = "r",
    attempt: int = 1,
    outputs: Sequence[Sequence[int]] = ((),),
) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        request_id=request_id,
        attempt=attempt,
        namespace_root=bytes(32),
        prompt=inference_pb2.TokenIds(ids=prompt),
        sampling_params=sampling_to_pb(sampling or greedy(40)),
        choices=[
            worker_pb2.ChoiceSoFar(index=index, output=inference_pb2.TokenIds(ids=output))
            for index, output in enumerate(outputs)
        ],
    )


def tokens_of(updates: Sequence[worker_pb2.DecodeUpdate], index: int = 0) -> list[int]:
    return [token for update in updates for one in update.choices if one.index == index for token in one.token_ids]
