"""Routers in processes of their own, which are killed, and which have no file descriptors left."""

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import grpc.aio
import pytest

from tests.faults.remote_cluster import RemoteCluster
from tests.faults.rest import at_rest
from tests.faults.router_process import Order, RouterProcess, router_process
from tests.harness.answer import Reader, ask
from tests.harness.known_model import MODEL, prompt_of
from wire.convert import tiers_from_pb
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import CHANNEL_OPTIONS
from wire.typed_reader import to_json

NUM_REQUESTS = 6
MANY_TOKENS = 3000
MAX_FILES = 100
NUM_CONNECTIONS = 200
TIMEOUT_S = 30.0


@asynccontextmanager
async def a_router(cluster: RemoteCluster, max_files: int = 0) -> AsyncIterator[RouterProcess]:
    order = Order(to_json(cluster.router.config), cluster.addresses, max_files)
    async with router_process(order) as router:
        yield router


@asynccontextmanager
async def connected(router: RouterProcess) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(router.address, options=CHANNEL_OPTIONS) as channel:
        yield InferenceStub(channel)


def open_all(stub: InferenceStub, num_tokens: int) -> list[Reader]:
    return [Reader(stub.Generate(ask(prompt_of(number), num_tokens))) for number in range(NUM_REQUESTS)]


async def test_killed_it_leaves_nothing_at_the_workers_and_the_next_one_finds_them_warm() -> None:
    async with RemoteCluster.running(MODEL, 1, 1) as cluster:
        async with a_router(cluster) as router, connected(router) as stub:
            readers = open_all(stub, MANY_TOKENS)
            for reader in readers:
                await reader.read_tokens(10)
            await router.kill()
            for number, reader in enumerate(readers):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await reader.read_all()
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
                assert reader.choices[0].token_ids == MODEL.oracle(prompt_of(number), reader.num_tokens)
        await at_rest(cluster)
        next_one = cluster.open(ask(prompt_of(0), 20))
        [choice] = await next_one.read_all()
        assert choice.token_ids == MODEL.oracle(prompt_of(0), 20)
        assert next_one.complete is not None
        assert tiers_from_pb(next_one.complete.usage.cached_tokens)["device"] == 48


async def test_killed_before_decode_has_fetched_it_leaves_holds_that_run_out() -> None:
    async with RemoteCluster.running(MODEL, 1, 1) as cluster:
        cluster.models["d0"].pause()
        async with a_router(cluster) as router, connected(router) as stub:
            for reader in open_all(stub, MANY_TOKENS):
                await reader.read_tokens(1)
            await router.kill()
            assert cluster.directory.records.status().num_holds > 0
        cluster.models["d0"].go_on()
        await at_rest(cluster)


async def test_without_file_descriptors_streams_go_on_and_new_ones_come_later() -> None:
    async with RemoteCluster.running(MODEL, 1, 1) as cluster, a_router(cluster, MAX_FILES) as router:
        host, _, port = router.address.rpartition(":")
        async with connected(router) as stub:
            readers = open_all(stub, 400)
            for reader in readers:
                await reader.read_tokens(10)
            with ExitStack() as crowd:
                for _ in range(NUM_CONNECTIONS):
                    crowd.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
                for number, reader in enumerate(readers):
                    [choice] = await reader.read_all()
                    assert choice.token_ids == MODEL.oracle(prompt_of(number), 400)
                assert router.num_files() == MAX_FILES
        async with connected(router) as stub:
            [choice] = await Reader(stub.Generate(ask(prompt_of(0)), wait_for_ready=True, timeout=TIMEOUT_S)).read_all()
            assert choice.token_ids == MODEL.oracle(prompt_of(0), 40)
