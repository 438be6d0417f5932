"""A whole cluster in this process, behind the ports that it would have, and what must be so after every bad input."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from engine.model.hash_model import HashModel
from router.ports.server import RouterServer
from tests.bad_input.refusal import Refusal, refused
from tests.faults.rest import at_rest
from tests.harness.answer import ChoiceAnswer, Reader, ask
from tests.harness.assembled_worker import TOKEN
from tests.harness.cluster import until
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.local_cluster import Sizes
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA
from worker.config import ServerSettings
from worker.server import WorkerServer

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)
SIZES = Sizes(num_blocks=64, num_slots=256)
PROMPT = tuple(range(50))
NUM_TOKENS = 12
CLUSTER_TOKEN = ((TOKEN_METADATA, TOKEN),)
GOOD = ask(PROMPT, NUM_TOKENS).SerializeToString()
MAX_CALL_S = 20.0
GENERATE = "/baton.v1.Inference/Generate"
Metadata = Sequence[tuple[str, str | bytes]]
GenerateCall = grpc.aio.UnaryStreamCall[bytes, pb.GenerateResponse]


@dataclass(frozen=True)
class Footprint:
    """What this process has open."""

    num_tasks: int
    num_files: int

    @classmethod
    def now(cls) -> "Footprint":
        return cls(len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))

    def is_within(self, other: "Footprint") -> bool:
        return self.num_tasks <= other.num_tasks and self.num_files <= other.num_files


@dataclass
class Ports:
    """The ports `public`, `operator`, `p0` and `d0`: addresses, and channels that stay open."""

    cluster: FaultyCluster
    addresses: Mapping[str, str]
    channels: Mapping[str, grpc.aio.Channel]
    footprint: Footprint

    def generate(self, message: bytes, time_left_s: float | None = MAX_CALL_S, metadata: Metadata = ()) -> GenerateCall:
        """A call with these bytes."""
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, pb.GenerateResponse] = self.channels["public"].unary_stream(
            GENERATE, bytes, pb.GenerateResponse.FromString
        )
        return generate(message, timeout=time_left_s, metadata=metadata)

    async def answer(self, message: bytes, time_left_s: float = MAX_CALL_S) -> list[ChoiceAnswer]:
        """Of each choice. Raises AioRpcError."""
        return await Reader(self.generate(message, time_left_s)).read_all()

    async def refusal(self, port: str, method: str, message: bytes, metadata: Metadata = CLUSTER_TOKEN) -> Refusal:
        """How a call ends that must not end well."""
        call = self.channels[port].unary_stream(method, bytes, bytes)
        return await refused(call(message, timeout=MAX_CALL_S, metadata=metadata))

    async def require_unharmed(self) -> None:
        """A good request has its answer, all books are whole, and no task or file is left."""
        [choice] = await self.answer(GOOD)
        assert choice.token_ids == MODEL.oracle(PROMPT, NUM_TOKENS)
        await at_rest(self.cluster)
        try:
            await until(lambda: Footprint.now().is_within(self.footprint))
        except TimeoutError:
            assert Footprint.now() == self.footprint

    async def warm_up(self) -> None:
        """Does once what opens something that stays open."""
        await self.answer(GOOD)
        for port in self.channels:
            await self.refusal(port, "/unknown", b"")
        await at_rest(self.cluster)
        self.footprint = Footprint.now()


@asynccontextmanager
async def serving(sizes: Sizes = SIZES) -> AsyncIterator[Ports]:
    """A cluster of one prefill and one decode worker."""
    cluster = FaultyCluster(MODEL, sizes)
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.enlist("p0", "d0")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cluster.stop)
        stack.push_async_callback(router.stop)
        by_port = {"public": addresses.public, "operator": addresses.operator}
        for name in cluster.workers:
            by_port[name] = await stack.enter_async_context(_worker_port(cluster, name))
        channels = {
            port: await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
            for port, address in by_port.items()
        }
        ports = Ports(cluster, by_port, channels, Footprint.now())
        await ports.warm_up()
        yield ports


@asynccontextmanager
async def _worker_port(cluster: FaultyCluster, name: str) -> AsyncIterator[str]:
    server = WorkerServer(cluster.workers[name].service, ServerSettings(TOKEN))
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()
