"""Whole workers in this process: a role's service over an engine of hashes, on a node's store that they share."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from kv_store.node.directory import Directory
from router.workers.line import Line
from tests.harness.assembled_worker import local_worker
from tests.harness.faulty_transport import Faults, FaultyTransport
from tests.harness.known_model import LAYOUT
from tests.harness.node import Node
from wire.convert import sampling_to_pb, status_of
from wire.errors import Unavailable
from wire.ids import AttemptId, number_of
from wire.pb import inference_pb2, worker_pb2
from wire.pools import Role
from wire.sampling import SamplingParams
from worker.assembly import Assembly
from worker.config import MAX_SILENCE_S
from worker.service import WorkerService

VOCAB_SIZE = 997
POISON = (5, 6, 7)
"""A prompt after which logits are no numbers."""
PROMPT = tuple(range(1, 101))
TIMEOUT_S = 60.0


class Model(HashModel):
    """Fails while it is broken, gives no numbers for POISON, and waits before each step while `may_go` is not set."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, VOCAB_SIZE)
        self.is_broken = False
        self.was_asked = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self.was_asked.set()
        assert self.may_go.wait(TIMEOUT_S)
        if self.is_broken:
            raise RuntimeError("out of memory")
        logits = super().forward(batch, kv)
        is_poisoned = (batch.token_ids == POISON[-1]) & (batch.positions == len(POISON) - 1)
        logits[is_poisoned[batch.sample_rows]] = float("nan")
        return logits


def timeless_node(num_slots: int = 512) -> Node:
    """Makes the store that the workers of a test share. Its clock stands still: holds end by their release alone."""
    return Node(LAYOUT, num_slots, directory=Directory(num_slots, clock=lambda: 0.0))


class Attempt:
    """An attempt under way on a line: its updates so far, and its end."""

    def __init__(self, line: Line, begin: worker_pb2.Begin) -> None:
        self._line = line
        self._id = AttemptId(begin.id)
        self.updates: list[worker_pb2.Update] = []
        self._arrived = asyncio.Event()
        self._running = asyncio.create_task(line.run(begin, self._take))

    async def first(self) -> None:
        """Returns once an update is here."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._arrived.wait()

    async def end(self) -> list[worker_pb2.Update]:
        """All updates, after the last. Raises the error that ended the attempt."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._running
        return self.updates

    def abort(self) -> None:
        """Stops listening, of which the worker is told."""
        self._running.cancel()

    def end_choice(self, index: int) -> None:
        self._line.end_choices(self._id, [index])

    def _take(self, update: worker_pb2.Update) -> bool:
        self.updates.append(update)
        self._arrived.set()
        return True


class Caller:
    """A router's line to a worker. Belongs to the running event loop."""

    def __init__(self, service: WorkerService, faults: Faults | None = None) -> None:
        self.transport = FaultyTransport(service, faults)
        self.line = Line(self.transport)

    def begin(self, begin: worker_pb2.Begin) -> Attempt:
        return Attempt(self.line, begin)

    async def decode(self, begin: worker_pb2.Begin) -> list[worker_pb2.Update]:
        """All updates of an attempt. Raises the error that ended it."""
        return await self.begin(begin).end()

    async def prefill(self, begin: worker_pb2.Begin) -> worker_pb2.Update:
        """The updates of an attempt as one. Raises the error that ended it."""
        joined = worker_pb2.Update()
        for update in await self.decode(begin):
            joined.MergeFrom(update)
        return joined

    async def close(self) -> None:
        await self.line.close(Unavailable("the test is over"))


class Worker:
    """A service, what it is made of, and a line to it."""

    def __init__(self, model: Model, assembly: Assembly) -> None:
        self.model = model
        self.engine = assembly.engine
        self.transfers = assembly.transfers
        self.service = assembly.service
        self.caller = Caller(self.service)

    async def status(self) -> worker_pb2.WorkerStatus:
        """With the books checked."""
        status = await self.service.status(check=True)
        assert list(status.problems) == []
        return status

    async def num_holds(self) -> int:
        return status_of("host", (await self.status()).tiers).counts["holds"]

    async def at_work(self) -> None:
        """Returns once the model was asked for the first time."""
        assert await asyncio.to_thread(self.model.was_asked.wait, TIMEOUT_S)

    async def was_aborted(self) -> None:
        """Returns once the aborts of all attempts have reached the worker."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.service.attempts):
                await self.service.status()

    async def at_rest(self) -> worker_pb2.WorkerStatus:
        """The status once nothing has a page, is copied, held or under way."""
        await self.idle()
        async with asyncio.timeout(TIMEOUT_S):
            while await self.num_holds():
                pass
        return await self.status()

    async def idle(self) -> worker_pb2.WorkerStatus:
        """The status once nothing has a page, is copied or under way, whatever is held."""
        async with asyncio.timeout(TIMEOUT_S):
            while _num_in_use(await self.service.status()) or self.service.check():
                pass
        return await self.status()


def _num_in_use(status: worker_pb2.WorkerStatus) -> int:
    blocks = status.blocks
    return blocks.owned + blocks.published + blocks.draining + status.num_running + status.num_waiting


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
        await worker.caller.close()
        worker.transfers.close()


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)


def begin_of(
    prompt: Sequence[int] = PROMPT,
    sampling: SamplingParams | None = None,
    request_id: str = "r",
    attempt: int = 1,
    outputs: Sequence[Sequence[int]] = ((),),
    time_left_s: float = 300.0,
) -> worker_pb2.Begin:
    """An attempt at a request of one choice, which has no output yet."""
    return worker_pb2.Begin(
        id=f"{request_id}/{attempt}",
        namespace_root=bytes(32),
        prompt=inference_pb2.TokenIds(ids=prompt),
        sampling_params=sampling_to_pb(sampling or greedy(40)),
        choices=[
            worker_pb2.UnfinishedChoice(index=index, output=inference_pb2.TokenIds(ids=output))
            for index, output in enumerate(outputs)
        ],
        time_left_s=time_left_s,
    )


def tokens_of(updates: Iterable[worker_pb2.Update], index: int = 0) -> list[int]:
    return [token for update in updates for one in update.choices if one.index == index for token in one.token_ids]


def prompt_source(updates: Iterable[worker_pb2.Update]) -> worker_pb2.PromptSource:
    """Where the KV of the prompt came from, which is told once."""
    (source,) = (update.prompt for update in updates if update.HasField("prompt"))
    return source


def attempts_of(updates: Iterable[worker_pb2.Update]) -> set[int]:
    return {number_of(AttemptId(update.id)) for update in updates}
