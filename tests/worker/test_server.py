"""A worker behind a real gRPC server."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.plan.authority import Authority
from engine.model.hash_model import HashModel
from router.workers.grpc_transport import GrpcTransport
from router.workers.line import Line
from tests.harness.known_model import LAYOUT
from tests.harness.one_worker import (
    PROMPT,
    TIMEOUT_S,
    VOCAB_SIZE,
    Attempt,
    Worker,
    begin_of,
    greedy,
    serving,
    timeless_node,
    tokens_of,
)
from wire import rpc
from wire.convert import status_of
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable
from wire.ids import AttemptId
from wire.pb import worker_pb2
from wire.pb.worker_pb2_grpc import WorkerStub
from wire.pools import Role
from wire.rpc import LINE_OPTIONS, NONCE_METADATA, first_of_line, from_rpc_error
from wire.trust.identity import NONCE_BYTES, Identity, prove
from worker.config import ServerSettings
from worker.server import SERVICE_NAME, WorkerServer

Call = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]
SECRET = "the cluster's"
NONCE = b"n" * NONCE_BYTES
CONNECT = "/baton.v1.Worker/Connect"
ORACLE = HashModel(LAYOUT, VOCAB_SIZE)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with serving(Role.DECODE, timeless_node()) as worker:
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


async def connect(channel: grpc.aio.Channel) -> Call:
    """A call on which both sides have proven the token."""
    call = cast(Call, WorkerStub(channel).Connect(metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S))
    await call.write(await first_of_line(call, SECRET, NONCE))
    return call


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
    info = await line.questions.info(TIMEOUT_S)
    assert (info.worker_id, info.role, info.layout) == ("decode-0", "decode", LAYOUT.encode())
    status = await line.questions.status(check=True, timeout_s=TIMEOUT_S)
    assert (status.state, status.blocks.free, list(status.problems)) == ("ready", 256, [])
    assert status_of("host", status.tiers).blocks.total == 512


NONCES: dict[str, tuple[tuple[str, str | bytes], ...]] = {
    "none": (),
    "the token in its place": (("baton-cluster-token", SECRET),),
    "short": ((NONCE_METADATA, NONCE[1:]),),
    "long": ((NONCE_METADATA, NONCE + b"n"),),
}


async def require_refused(call: Call, decode: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read_to_the_end(call)
    assert type(from_rpc_error(raised.value)) is Unauthenticated
    assert decode.service.check() == []


@pytest.mark.parametrize("metadata", NONCES.values(), ids=NONCES)
async def test_refuses_a_line_without_a_nonce(
    channel: grpc.aio.Channel, decode: Worker, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    await require_refused(cast(Call, WorkerStub(channel).Connect(metadata=metadata, timeout=TIMEOUT_S)), decode)


UNPROVEN = {
    "an order": worker_pb2.ConnectRequest(begins=[begin_of()]),
    "the token": worker_pb2.ConnectRequest(proof=SECRET.encode()),
    "a proof to other nonces": worker_pb2.ConnectRequest(proof=prove(SECRET.encode(), b"router", NONCE, NONCE)),
}


@pytest.mark.parametrize("first", UNPROVEN.values(), ids=UNPROVEN)
async def test_refuses_a_line_whose_first_message_proves_nothing(
    channel: grpc.aio.Channel, decode: Worker, first: worker_pb2.ConnectRequest
) -> None:
    call = cast(Call, WorkerStub(channel).Connect(metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S))
    await call.write(first)
    await require_refused(call, decode)


async def test_refuses_the_workers_own_proof_sent_back(channel: grpc.aio.Channel, decode: Worker) -> None:
    call = cast(Call, WorkerStub(channel).Connect(metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S))
    sent = cast(bytes, dict(await call.initial_metadata())[NONCE_METADATA])
    await call.write(worker_pb2.ConnectRequest(proof=sent[NONCE_BYTES:]))
    await require_refused(call, decode)


async def test_a_line_that_says_nothing_is_ended(
    channel: grpc.aio.Channel, decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_PROOF_S", 0.02)
    call = cast(Call, WorkerStub(channel).Connect(metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S))
    await require_refused(call, decode)


async def test_bytes_that_are_no_message_prove_nothing(channel: grpc.aio.Channel, decode: Worker) -> None:
    connect = channel.stream_stream(CONNECT, bytes, worker_pb2.ConnectResponse.FromString)
    call = connect(metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S)
    await call.write(b"\xff\xff\xff")
    await require_refused(cast(Call, call), decode)


AUTHORITY = Authority.make()
ROUTER = AUTHORITY.issue("router", "127.0.0.1")
ANOTHER = Authority.make().issue("router", "127.0.0.1")
STRANGERS = {
    "plain": (SECRET, None),
    "of another cluster": (SECRET, ANOTHER),
    "of another cluster, with this one's authority": (SECRET, replace(ANOTHER, authority_pem=ROUTER.authority_pem)),
    "without the token": ("another's", ROUTER),
    "a worker": (SECRET, AUTHORITY.issue("prefill-0", "127.0.0.1")),
}


@asynccontextmanager
async def tls_port(decode: Worker, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The port of a worker with a certificate for that host."""
    server = WorkerServer(decode.service, ServerSettings(SECRET, identity=AUTHORITY.issue("decode-0", host)))
    yield await server.start()
    await server.stop()


async def require_unavailable(line: Line) -> None:
    with pytest.raises(Unavailable):
        await line.questions.info(TIMEOUT_S)
    await line.close(Unavailable("the test is over"))


async def test_a_line_over_tls_carries_requests(decode: Worker) -> None:
    async with tls_port(decode) as address:
        line = Line(GrpcTransport(address, SECRET, ROUTER))
        assert tokens_of(await Attempt(line, begin_of()).end()) == ORACLE.oracle(PROMPT, 40)
        await line.close(Unavailable("the test is over"))


@pytest.mark.parametrize(("token", "identity"), STRANGERS.values(), ids=STRANGERS)
async def test_a_tls_port_takes_no_line_of_a_stranger(decode: Worker, token: str, identity: Identity | None) -> None:
    async with tls_port(decode) as address:
        await require_unavailable(Line(GrpcTransport(address, token, identity)))
        assert decode.service.check() == []


async def test_a_tls_port_takes_no_client_without_a_certificate(decode: Worker) -> None:
    credentials = grpc.ssl_channel_credentials(ROUTER.authority_pem.encode())
    async with tls_port(decode) as address, grpc.aio.secure_channel(address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health(channel)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_speaks_to_no_worker_that_is_not_the_addressed_one(decode: Worker, address: str) -> None:
    async with tls_port(decode, host="127.0.0.2") as elsewhere:
        await require_unavailable(Line(GrpcTransport(elsewhere, SECRET, ROUTER)))
    await require_unavailable(Line(GrpcTransport(address, SECRET, ROUTER)))


async def test_lines_speak_tls_1_3(decode: Worker) -> None:
    def version(address: str) -> str | None:
        host, port = address.split(":")
        context = ROUTER.client_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection((host, int(port)), TIMEOUT_S)
        with context.wrap_socket(plain, server_hostname=host) as connection:
            return connection.version()

    async with tls_port(decode) as address:
        assert await asyncio.to_thread(version, address) == "TLSv1.3"


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
    call = await connect(channel)
    await call.write(worker_pb2.ConnectRequest(begins=[begin_of(sampling=greedy(3000), request_id="lost")]))
    await call.read()
    kept = Attempt(line, begin_of())
    call.cancel()
    assert tokens_of(await kept.end()) == ORACLE.oracle(PROMPT, 40)
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_a_router_that_has_no_more_orders_has_ended_its_line(channel: grpc.aio.Channel, decode: Worker) -> None:
    call = await connect(channel)
    await call.write(worker_pb2.ConnectRequest(begins=[begin_of(sampling=greedy(3000))]))
    await call.read()
    await call.done_writing()
    await read_to_the_end(call)
    assert (await decode.at_rest()).generated_tokens < 3000


async def test_a_message_that_is_none_ends_the_line_and_aborts_its_attempts(
    channel: grpc.aio.Channel, decode: Worker
) -> None:
    call = channel.stream_stream(CONNECT, bytes, worker_pb2.ConnectResponse.FromString)(
        metadata=((NONCE_METADATA, NONCE),), timeout=TIMEOUT_S
    )
    await call.write((await first_of_line(call, SECRET, NONCE)).SerializeToString())
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
    call = await connect(channel)
    await call.write(worker_pb2.ConnectRequest(renewals=["r/1"]))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert tokens_of(await kept.end()) == ORACLE.oracle(PROMPT, 40)


async def test_a_router_that_does_not_read_holds_up_no_step(channel: grpc.aio.Channel, decode: Worker) -> None:
    """What the connection does not take joins, so that a router that goes on finds few messages."""
    num_tokens = 1000
    call = await connect(channel)
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
    await decode.service.attempts.drain(0.0)
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
    line.release(AttemptId("r/1"))
    line.renew([AttemptId("r/1")])
    assert (await line.questions.status(check=True, timeout_s=TIMEOUT_S)).state == "ready"


async def test_a_port_that_is_taken_is_a_configuration_error(address: str, decode: Worker) -> None:
    port = int(address.rsplit(":", 1)[1])
    second = WorkerServer(decode.service, ServerSettings(token="t", port=port))
    with pytest.raises(ConfigError):
        await second.start()
