"""A router before fake workers, all in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from router.config import ClusterAccess, RouterConfig, ServedModel
from router.requests.dispatch import OpenRequest
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.local_transport import Faults, LocalTransport
from tests.harness.fake_worker import FINGERPRINT, LAYOUT, FakeWorker, oracle
from text.byte_tokenizer import ByteTokenizer
from text.chat import PlainRenderer
from wire.ids import WorkerId
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, Role, Worker, WorkerState

VOCAB_SIZE = 300
PROMPT = "hello, world"
WAIT_S = 10.0
"""How long tests wait for what must come: long for a busy machine."""
CONFIG = RouterConfig(
    model=ServedModel(
        name="fake",
        folder="",
        dtype="float32",
        max_context_len=2000,
        vocab_size=VOCAB_SIZE,
        fingerprint_hex=FINGERPRINT.hex(),
        layout_hex=LAYOUT.encode().hex(),
    ),
    cluster=ClusterAccess(token="the cluster's token", secret_hex="00" * 32),
)


@dataclass(frozen=True)
class Output:
    """What a client has of a request that ended well."""

    token_ids: dict[int, list[int]]
    text: dict[int, str]
    complete: pb.Complete


class FakeCluster:
    """Workers are named p0, p1, ... and d0, d1, ...; to the router, a name is an address too."""

    def __init__(self, config: RouterConfig) -> None:
        self.port = LocalController(PoolSizes(0, 0))
        self.workers: dict[str, FakeWorker] = {}
        self.transports: dict[str, LocalTransport] = {}
        self.faults: dict[str, Faults] = {}
        self.router = Router(config, ByteTokenizer(), self._connect, self.port, PlainRenderer())

    async def resize(self, num_prefill: int, num_decode: int) -> dict[WorkerId, str]:
        """Lists so many workers; those that are new are made first."""
        roles = {f"p{i}": Role.PREFILL for i in range(num_prefill)} | {f"d{i}": Role.DECODE for i in range(num_decode)}
        for name, role in roles.items():
            self.workers.setdefault(name, FakeWorker(WorkerId(name), role))
        return await self.enlist(*roles)

    async def enlist(self, *names: str, draining: str = "") -> dict[WorkerId, str]:
        states = {draining: WorkerState.DRAINING}
        return await self.router.membership.set(
            [Worker(WorkerId(one), self.workers[one].role, one, states.get(one, WorkerState.READY)) for one in names]
        )

    def open(self, request: pb.GenerateRequest, time_left_s: float | None = 20.0) -> OpenRequest:
        return self.router.dispatcher.open(request, time_left_s)

    async def generate(self, request: pb.GenerateRequest) -> Output:
        return await collect(self.open(request))

    async def problems(self) -> list[str]:
        """What is left behind although no request is open."""
        status = await self.router.statuses.read(cluster_pb2.GetStatusRequest(check=True))
        busy = [f"{name} serves a call" for name, worker in self.workers.items() if worker.open_calls]
        lost = {worker.worker_id for worker in status.workers if worker.state == "lost"}
        return [*(one for one in status.problems if one.split(":")[0] not in lost), *busy]

    async def come_to_rest(self) -> None:
        """Returns when nothing is open, held, assigned or served any more; TimeoutError if that does not come."""
        dispatcher = self.router.dispatcher
        await until(lambda: not dispatcher.num_running and not dispatcher.num_queued)
        async with asyncio.timeout(WAIT_S):
            while await self.problems():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def _connect(self, address: str) -> LocalTransport:
        self.transports[address] = LocalTransport(self.workers[address], self.faults.setdefault(address, Faults()))
        return self.transports[address]


@asynccontextmanager
async def running(num_prefill: int, num_decode: int, config: RouterConfig = CONFIG) -> AsyncIterator[FakeCluster]:
    """A cluster that is checked for leaks in the end."""
    cluster = FakeCluster(config)
    cluster.router.start()
    await cluster.resize(num_prefill, num_decode)
    try:
        yield cluster
        await cluster.come_to_rest()
    finally:
        await cluster.router.stop()


def request(**sampling: Any) -> pb.GenerateRequest:
    """Prompt "hello, world" (three blocks), seed 1 unless told otherwise."""
    return pb.GenerateRequest(text=PROMPT, sampling_params=pb.SamplingParams(**{"seed": 1, **sampling}))


def expected(length: int, choice: int = 0, seed: int = 1) -> list[int]:
    """The output for `request` of `max_tokens` tokens."""
    return oracle(PROMPT.encode(), choice, seed, length)


async def until(condition: Callable[[], object]) -> None:
    """Lets the others run until the condition holds; TimeoutError if it never does."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def collect(request: OpenRequest) -> Output:
    """Reads a stream to its end. Raises what it ends with."""
    token_ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    complete: pb.Complete | None = None
    async for response in request.outbox:
        assert complete is None, "something came after the last message"
        if response.WhichOneof("event") == "complete":
            complete = response.complete
            continue
        index = response.chunk.index
        token_ids.setdefault(index, []).extend(response.chunk.token_ids)
        text[index] = text.get(index, "") + response.chunk.text
    assert complete is not None
    return Output(token_ids, text, complete)
