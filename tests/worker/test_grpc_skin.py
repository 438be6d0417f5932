"""A worker behind a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.model.hash_model import HashModel
from tests.worker.workers import (
    LAYOUT,
    PROMPT,
    TIMEOUT_S,
    VOCAB_SIZE,
    Node,
    Worker,
    decode_request,
    greedy,
    prefill_request,
    serving,
    tokens_of,
)
from wire.convert import status_of
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable, Unsupported
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.pools import Role
from wire.rpc import CHANNEL_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error
from worker.config import ServerSettings
from worker.grpc_skin import SERVICE_NAME, WorkerServer

TOKEN = ((TOKEN_METADATA, "the cluster's"),)
SETTINGS = ServerSettings(token="the cluster's")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with serving(Role.DECODE, Node()) as worker:
        yield worker


@pytest.fixture
async def server(decode: Worker) -> AsyncIterator[WorkerServer]:
    server = WorkerServer(decode.service, SETTINGS)
    yield server
    await server.stop()


@pytest.fixture
async def channel(server: WorkerServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(await server.start(), options=CHANNEL_OPTIONS) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> WorkerStub:
    return WorkerStub(channel)


async def health(channel: grpc.aio.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    status: int = (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)).status
    return status


async def test_streams_a_request(stub: WorkerStub) -> None:
    call = stub.Decode(decode_request(), metadata=TOKEN, timeout=TIMEOUT_S)
    assert tokens_of([update async for update in call]) == HashModel(LAYOUT, VOCAB_SIZE).oracle(PROMPT, 40)


async def test_tells_who_it_is_and_how_it_is(stub: WorkerStub) -> None:
    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), metadata=TOKEN, timeout=TIMEOUT_S)
    assert (info.worker_id, info.role, info.layout) == ("decode-0", "decode", LAYOUT.encode())
    request = worker_pb2.GetWorkerStatusRequest(check=True)
    status = await stub.GetStatus(request, metadata=TOKEN, timeout=TIMEOUT_S)
    assert (status.state, status.blocks.free, list(status.problems)) == ("ready", 256, [])
    assert status_of("host", status.tiers).blocks.total == 512


@pytest.mark.parametrize("metadata", [(), ((TOKEN_METADATA, "another's"),)], ids=["no token", "wrong token"])
async def test_refuses_whoever_does_not_know_the_token(stub: WorkerStub, metadata: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.GetInfo(worker_pb2.GetInfoRequest(), metadata=metadata, timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        [update async for update in stub.Decode(decode_request(), metadata=metadata, timeout=TIMEOUT_S)]
    assert isinstance(from_rpc_error(unary.value), Unauthenticated)
    assert isinstance(from_rpc_error(stream.value), Unauthenticated)


async def test_errors_arrive_as_what_they_are(stub: WorkerStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [update async for update in stub.Decode(decode_request(prompt=()), metadata=TOKEN, timeout=TIMEOUT_S)]
    assert isinstance(from_rpc_error(raised.value), InvalidRequest)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Prefill(prefill_request(), metadata=TOKEN, timeout=TIMEOUT_S)
    assert isinstance(from_rpc_error(raised.value), Unsupported)


async def test_cancelling_a_call_that_is_not_read_takes_it_out_of_the_engine(stub: WorkerStub, decode: Worker) -> None:
    call = stub.Decode(decode_request(sampling=greedy(3000)), metadata=TOKEN, timeout=TIMEOUT_S)
    await call.read()
    call.cancel()
    assert (await decode.at_rest()).generated_tokens < 3000
    assert await decode.service.drain(0.0) == 0


async def test_deadline_of_a_call_is_the_requests(stub: WorkerStub, decode: Worker) -> None:
    decode.model.may_go.clear()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.Decode(decode_request(sampling=greedy(3000)), metadata=TOKEN, timeout=0.1):
            pass
    assert isinstance(from_rpc_error(raised.value), DeadlineExceeded)
    decode.model.may_go.set()  # which the engine may hear of before the end of the call
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_health_needs_no_token_and_ends_with_draining(channel: grpc.aio.Channel, stub: WorkerStub) -> None:
    assert await health(channel) == SERVING
    await stub.StartDrain(worker_pb2.StartDrainRequest(), metadata=TOKEN, timeout=TIMEOUT_S)
    assert await health(channel) == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Decode(decode_request(), metadata=TOKEN, timeout=TIMEOUT_S).read()
    assert isinstance(from_rpc_error(raised.value), Unavailable)


async def test_many_calls_go_over_one_connection(stub: WorkerStub) -> None:
    async def tokens(number: int) -> list[int]:
        request = decode_request(PROMPT[number:], request_id=str(number))
        return tokens_of([update async for update in stub.Decode(request, metadata=TOKEN, timeout=TIMEOUT_S)])

    oracle = HashModel(LAYOUT, VOCAB_SIZE)
    outputs = await asyncio.gather(*(tokens(number) for number in range(8)))
    assert outputs == [oracle.oracle(PROMPT[number:], 40) for number in range(8)]


async def test_a_port_that_is_taken_is_a_configuration_error(server: WorkerServer, decode: Worker) -> None:
    port = int((await server.start()).rsplit(":", 1)[1])
    second = WorkerServer(decode.service, ServerSettings(token="t", port=port))
    with pytest.raises(ConfigError):
        await second.start()
