"""A worker behind a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.model.hash_model import HashModel
from router.workers.grpc_transport import GrpcTransport
from router.workers.line import Line
from tests.worker.workers import (
    LAYOUT,
    PROMPT,
    TIMEOUT_S,
    VOCAB_SIZE,
    Attempt,
    Node,
    Worker,
    begin_of,
    greedy,
    serving,
    tokens_of,
)
from wire.convert import status_of
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable
from wire.ids import AttemptId, RequestId
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.pools import Role
from wire.rpc import LINE_OPTIONS, TOKEN_METADATA
from wire.rpc_status import from_rpc_error
from worker.config import ServerSettings
from worker.server import SERVICE_NAME, WorkerServer

Call = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]
SECRET = "the cluster's"
TOKEN = ((TOKEN_METADATA, SECRET),)
CONNECT = "/baton.v1.Worker/Connect"
ORACLE = HashModel(LAYOUT, VOCAB_SIZE)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with serving(Role.DECODE, Node()) as worker:
        yield worker


@pytest.fixture
async def server(decode: Worker) -> AsyncIterator[WorkerServer]:
    server = WorkerServer(decode.service, ServerSettings(SECRET))
    yield server
    await server.stop()


@pytest.fixture
async def address(server: WorkerServer) -> str:
    return await server.start()


@pytest.fixture
async def line(address: str) -> AsyncIterator[Line]:
    line = Line(GrpcTransport(address, SECRET))
    yield line
    await line.close(Unavailable("the test is over"))


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=LINE_OPTIONS) as channel:
        yield channel


def connect(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = TOKEN) -> Call:
    return cast(Call, WorkerStub(channel).Connect(metadata=metadata, timeout=TIMEOUT_S))


async def health(channel: grpc.aio.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    status: int = (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)).status
    return status


async def read_to_the_end(call: grpc.aio.StreamStreamCall[Any, worker_pb2.ConnectResponse]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await call.read() is not grpc.aio.EOF:
            pass


async def read_all(call: Call) -> list[worker_pb2.ConnectResponse]:
    """The messages up to that with the end of an attempt."""
    responses: list[worker_pb2.ConnectResponse] = []
    while not any(update.HasField("end") for response in responses for update in response.updates):
        response = await call.read()
        assert isinstance(response, worker_pb2.ConnectResponse)
        responses.append(response)
    return responses


async def test_streams_a_request(line: Line) -> None:
    assert tokens_of(await Attempt(line, begin_of()).end()) == ORACLE.oracle(PROMPT, 40)


async def test_many_requests_go_over_one_line(line: Line) -> None:
    attempts = [Attempt(line, begin_of(PROMPT[number:], request_id=str(number))) for number in range(8)]
    outputs = [tokens_of(await attempt.end()) for attempt in attempts]
    assert outputs == [ORACLE.oracle(PROMPT[number:], 40) for number in range(8)]


async def test_answers_what_it_is_and_how_it_is(line: Line) -> None:
    info = await line.info(TIMEOUT_S)
    assert (info.worker_id, info.role, info.layout) == ("decode-0", "decode", LAYOUT.encode())
    status = await line.status(check=True, timeout_s=TIMEOUT_S)
    assert (status.state, status.blocks.free, list(status.problems)) == ("ready", 256, [])
    assert status_of("host", status.tiers).blocks.total == 512


@pytest.mark.parametrize("metadata", [(), ((TOKEN_METADATA, "another's"),)], ids=["no token", "wrong token"])
async def test_refuses_a_line_without_the_clusters_token(
    channel: grpc.aio.Channel, decode: Worker, metadata: tuple[tuple[str, str], ...]
) -> None:
    call = connect(channel, metadata)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert isinstance(from_rpc_error(raised.value), Unauthenticated)
    assert decode.service.check() == []


async def test_errors_arrive_as_what_they_are(line: Line) -> None:
    with pytest.raises(InvalidRequest):
        await Attempt(line, begin_of(prompt=())).end()


async def test_the_workers_own_timer_ends_an_attempt(line: Line, decode: Worker) -> None:
    decode.model.may_go.clear()
    with pytest.raises(DeadlineExceeded):
        await Attempt(line, begin_of(sampling=greedy(3000), time_left_s=0.1)).end()
    decode.model.may_go.set()
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_the_end_of_a_line_takes_its_attempts_out_of_the_engine(
    channel: grpc.aio.Channel, line: Line, decode: Worker
) -> None:
    call = connect(channel)
    await call.write(worker_pb2.ConnectRequest(begins=[begin_of(sampling=greedy(3000), request_id="lost")]))
    await call.read()
    kept = Attempt(line, begin_of())
    call.cancel()
    assert tokens_of(await kept.end()) == ORACLE.oracle(PROMPT, 40)
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_a_router_that_has_no_more_orders_has_ended_its_line(channel: grpc.aio.Channel, decode: Worker) -> None:
    call = connect(channel)
    await call.write(worker_pb2.ConnectRequest(begins=[begin_of(sampling=greedy(3000))]))
    await call.read()
    await call.done_writing()
    await read_to_the_end(call)
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_a_message_that_is_none_ends_the_line_and_aborts_its_attempts(
    channel: grpc.aio.Channel, decode: Worker
) -> None:
    call = channel.stream_stream(CONNECT, bytes, worker_pb2.ConnectResponse.FromString)(
        metadata=TOKEN, timeout=TIMEOUT_S
    )
    begin = worker_pb2.ConnectRequest(begins=[begin_of(sampling=greedy(3000))])
    await call.write(begin.SerializeToString())
    await call.read()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read_to_the_end(call)
    assert isinstance(from_rpc_error(raised.value), InvalidRequest)
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_an_order_at_which_the_worker_fails_ends_its_line_alone(
    channel: grpc.aio.Channel, line: Line, decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Attempt(line, begin_of())
    await kept.first()
    monkeypatch.setattr(decode.service, "renew", lambda _: 1 // 0)
    call = connect(channel)
    await call.write(worker_pb2.ConnectRequest(renewals=[worker_pb2.AttemptId(request_id="r", attempt=1)]))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert tokens_of(await kept.end()) == ORACLE.oracle(PROMPT, 40)


async def test_a_router_that_does_not_read_holds_up_no_step(channel: grpc.aio.Channel, decode: Worker) -> None:
    """What the connection does not take joins, so that a router that goes on finds few messages."""
    num_tokens = 1000
    call = connect(channel)
    sampling = replace(greedy(num_tokens), logprobs=20)
    await call.write(worker_pb2.ConnectRequest(begins=[begin_of(sampling=sampling)]))
    await decode.at_work()
    assert (await decode.at_rest()).generated_tokens == num_tokens
    responses = await read_all(call)
    tokens = tokens_of(update for response in responses for update in response.updates)
    assert tokens == ORACLE.oracle(PROMPT, num_tokens)
    assert len(responses) < num_tokens / 2


async def test_health_needs_no_token_and_ends_with_draining(
    channel: grpc.aio.Channel, server: WorkerServer, line: Line, decode: Worker
) -> None:
    assert await health(channel) == SERVING
    await server.refuse_new_work()
    assert await health(channel) == NOT_SERVING
    await decode.service.drain(0.0)
    with pytest.raises(Unavailable):
        await Attempt(line, begin_of()).end()


async def test_a_stopped_server_ends_its_lines(server: WorkerServer, line: Line, decode: Worker) -> None:
    attempt = Attempt(line, begin_of(sampling=greedy(3000)))
    await attempt.first()
    await server.stop()
    with pytest.raises(Unavailable):
        await attempt.end()
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_releases_arrive(line: Line, decode: Worker) -> None:
    """Over gRPC as in the process: an attempt at another worker of the node may hold what this one is told of."""
    line.release(AttemptId(RequestId("r"), 1))
    line.renew([AttemptId(RequestId("r"), 1)])
    assert (await line.status(check=True, timeout_s=TIMEOUT_S)).state == "ready"


async def test_a_port_that_is_taken_is_a_configuration_error(address: str, decode: Worker) -> None:
    port = int(address.rsplit(":", 1)[1])
    second = WorkerServer(decode.service, ServerSettings(token="t", port=port))
    with pytest.raises(ConfigError):
        await second.start()
