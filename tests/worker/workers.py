"""Whole workers in this process: a role's service over an engine of hashes, on a node's store that they share."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kv_store.node.arena import Arena
from kv_store.node.directory import Directory
from kv_store.node_store import HOLD_TTL_S
from tests.local_worker import local_worker
from wire.convert import sampling_to_pb, status_of
from wire.layout import KVLayout
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from wire.sampling import SamplingParams
from worker.assembly import Assembly, Tiers
from worker.engine_watch import MAX_SILENCE_S

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
VOCAB_SIZE = 997
POISON = (5, 6, 7)
"""A prompt after which logits are no numbers."""
PROMPT = tuple(range(1, 101))
TIMEOUT_S = 20.0


class Model(HashModel):
    """Fails while it is broken, gives no numbers for POISON, and waits before each step while `may_go` is not set."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, VOCAB_SIZE)
        self.is_broken = False
        self.was_asked = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        self.was_asked.set()
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

    @property
    def tiers(self) -> Tiers:
        return Tiers(self.arena, self.directory, None)


class Worker:
    """A service and what it is made of."""

    def __init__(self, model: Model, assembly: Assembly) -> None:
        self.model = model
        self.engine = assembly.engine
        self.transfers = assembly.transfers
        self.service = assembly.service

    async def status(self) -> worker_pb2.WorkerStatus:
        """With the books checked."""
        status = await self.service.get_status(worker_pb2.GetWorkerStatusRequest(check=True))
        assert list(status.problems) == []
        return status

    async def at_work(self) -> None:
        """Returns once the model was asked for the first time."""
        assert await asyncio.to_thread(self.model.was_asked.wait, TIMEOUT_S)

    async def at_rest(self) -> worker_pb2.WorkerStatus:
        """The status once nobody has a page, nothing is copied and nothing held; long before holds run out."""
        async with asyncio.timeout(HOLD_TTL_S * 0.8):
            while True:
                status = await self.status()
                blocks = status.blocks
                in_use = blocks.owned + blocks.published + blocks.draining + status.num_running + status.num_waiting
                if not in_use and not status_of("host", status.tiers).counts["holds"]:
                    return status


@asynccontextmanager
async def serving(
    role: Role,
    node: Node,
    num_blocks: int = 256,
    on_broken: Callable[[], None] = lambda: None,
    max_silence_s: float = MAX_SILENCE_S,
) -> AsyncIterator[Worker]:
    model = Model()
    assembly = local_worker(
        model, node.tiers, f"{role.value}-0", role, num_blocks, max_silence_s=max_silence_s, on_broken=on_broken
    )
    worker = Worker(model, assembly)
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
