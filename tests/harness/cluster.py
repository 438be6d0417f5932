"""A router before workers of one kind, all in this process: what clusters of tests have in common."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.config import RouterConfig
from router.requests.dispatch import OpenRequest
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from router.router import Router
from router.workers.controller_port import LocalController
from router.workers.line import Transport
from router.workers.local_transport import WorkerPort
from tests.harness.answer import Reader
from tests.harness.faulty_transport import Faults, FaultyTransport
from text.byte_tokenizer import ByteTokenizer
from text.chat import PlainRenderer, Renderer
from text.tokenizer_protocol import TextCodec
from wire.ids import WorkerId
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pools import PoolSizes, Role, Worker, WorkerState

WAIT_S = 10.0
"""How long tests wait for what must come: long for a busy machine."""
W = TypeVar("W")


class Cluster(ABC, Generic[W]):
    """Workers are named p0, p1, ... and d0, d1, ...; to the router, a name is an address too."""

    def __init__(
        self,
        config: RouterConfig,
        codec: TextCodec | None = None,
        prefixes: PublicPrefixes = NO_PREFIXES,
        renderer: Renderer | None = None,
    ) -> None:
        self.port = LocalController(PoolSizes(0, 0))
        self.workers: dict[str, W] = {}
        self.changed_roles: dict[str, Role] = {}
        self.transports: dict[str, FaultyTransport] = {}
        self.faults: dict[str, Faults] = {}
        parts = config, codec or ByteTokenizer(), self._connect, self.port, renderer or PlainRenderer(), prefixes
        self.router = Router(*parts)

    async def start(self, num_prefill: int, num_decode: int) -> None:
        self.router.start()
        await self.resize(num_prefill, num_decode)

    async def stop(self) -> None:
        await self.router.stop()

    async def resize(self, num_prefill: int, num_decode: int) -> None:
        await self.enlist(*(f"p{index}" for index in range(num_prefill)), *(f"d{index}" for index in range(num_decode)))

    async def enlist(self, *names: str, draining: str = "") -> None:
        """Starts workers that are new and lists these; those no longer listed keep running, unknown to the router."""
        for name in names:
            if name not in self.workers:
                self.workers[name] = await self._start_worker(name)
        states = {draining: WorkerState.DRAINING}
        roles = {name: role_of(name) for name in names} | self.changed_roles
        listed = [Worker(WorkerId(name), roles[name], name, states.get(name, WorkerState.READY)) for name in names]
        assert await self.router.membership.set(listed) == {}

    async def generate(self, request: pb.GenerateRequest, time_left_s: float | None = 60.0) -> "Output":
        return await collect(self.router.dispatcher.open(request, time_left_s))

    async def status(self) -> cluster_pb2.ClusterStatus:
        """Checked: `problems` lists every invariant that does not hold."""
        return await self.router.statuses.read(cluster_pb2.GetStatusRequest(check=True))

    @abstractmethod
    async def _start_worker(self, name: str) -> W: ...

    @abstractmethod
    def _port(self, worker: W) -> WorkerPort:
        """Returns what the router connects to."""

    def _connect(self, address: str) -> Transport:
        faults = self.faults.setdefault(address, Faults())
        self.transports[address] = FaultyTransport(self._port(self.workers[address]), faults)
        return self.transports[address]


@dataclass(frozen=True)
class Output:
    """What a client has of a request that ended well, by choice."""

    token_ids: dict[int, list[int]]
    text: dict[int, str]
    complete: pb.Complete


async def collect(request: OpenRequest) -> Output:
    """Reads a stream to its end. Raises what it ends with."""
    reader = Reader(request.outbox)
    await reader.read_all()
    choices = {index: choice for index, choice in reader.by_index.items() if choice.token_ids}
    assert reader.complete is not None
    return Output(
        {index: choice.token_ids for index, choice in choices.items()},
        {index: choice.text for index, choice in choices.items()},
        reader.complete,
    )


async def until(condition: Callable[[], object]) -> None:
    """Lets the others run until the condition holds; TimeoutError if it never does."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def role_of(name: str) -> Role:
    return Role.PREFILL if name.startswith("p") else Role.DECODE
