"""What bounds connections, and what the ports tell of themselves; each on a cluster that is set up for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from router.ports.server import RouterServer
from tests.bad_input.raw_http2 import END_STREAM, PREFACE, RawHttp2, raw_http2
from tests.bad_input.refusal import refused
from tests.harness.fake_cluster import CONFIG, FakeCluster, expected, request
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, TOKEN_METADATA

REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONNECTIONS = 4
OUR_WAIT_MS = 200
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[str, str]]:
    """The public and the operator's address of a router before fake workers."""
    cluster = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, **settings)))
    server = RouterServer(cluster.router)
    addresses = await server.start()
    await cluster.resize(1, 1)
    try:
        yield addresses.public, addresses.operator
        await cluster.come_to_rest()
    finally:
        await server.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers wait but a moment for a connection to say something."""
    shorten(monkeypatch, *(name for name, _ in SERVER_OPTIONS if name.endswith("_ms")))


@pytest.fixture
def often_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers may be pinged after but a moment."""
    shorten(monkeypatch, *(name for name, _ in SERVER_OPTIONS if "ping_interval" in name))


def shorten(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    shorter = dict.fromkeys(options, OUR_WAIT_MS)
    monkeypatch.setattr("router.ports.server.SERVER_OPTIONS", tuple((dict(SERVER_OPTIONS) | shorter).items()))


async def require_good(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        call = InferenceStub(channel).Generate(request(max_tokens=3), timeout=20, wait_for_ready=True)
        assert [token async for one in call for token in one.chunk.token_ids] == expected(3)


async def test_more_connections_than_may_be_are_hung_up_on() -> None:
    async with listening(max_connections=MAX_CONNECTIONS) as (public, _), AsyncExitStack() as stack:
        taken = [await stack.enter_async_context(raw_http2(public)) for _ in range(MAX_CONNECTIONS)]
        for connection in taken:
            connection.begin_http2()
            connection.ping()
        for _ in range(20):
            async with raw_http2(public) as connection:
                connection.begin_http2()
                assert await connection.answer() == "closed"
        await stack.aclose()
        await require_good(public)


def begin_headers(connection: RawHttp2) -> None:
    connection.begin_http2()
    connection.begin_call("/baton.v1.Inference/Generate", flags=END_STREAM)


SAID_AND_NO_MORE: dict[str, Callable[[RawHttp2], None]] = {
    "nothing": lambda connection: None,
    "half a greeting": lambda connection: connection.write(PREFACE[:8]),
    "a greeting": lambda connection: connection.begin_http2(),
    "headers without end": begin_headers,
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", SAID_AND_NO_MORE)
async def test_a_connection_on_which_no_more_is_said_is_hung_up_on(what: str) -> None:
    async with listening(max_connections=1) as (public, _), raw_http2(public) as connection:
        SAID_AND_NO_MORE[what](connection)
        await connection.closed()
        await require_good(public)


@pytest.mark.usefixtures("often_pinged")
async def test_pings_as_often_as_may_be_are_answered() -> None:
    async with listening() as (public, _), raw_http2(public) as connection:
        connection.begin_http2()
        connection.begin_call("/baton.v1.Inference/Generate")
        for _ in range(6):
            connection.ping()
            assert await connection.answer() == "pong"
            await asyncio.sleep(OUR_WAIT_MS * 1.5 / 1000)


async def test_clients_of_ours_ping_less_often_than_servers_allow() -> None:
    """Else every connection that carries no data for half a minute would be lost, with all calls on it."""
    server, client = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_can_be_switched_off(reflection: bool) -> None:
    metadata = ((TOKEN_METADATA, CONFIG.cluster.token),)
    async with listening(reflection=reflection) as addresses:
        for address in addresses:
            async with grpc.aio.insecure_channel(address) as channel:
                call = channel.unary_stream(REFLECT, bytes, bytes)(b"", metadata=metadata, timeout=20)
                if reflection:
                    assert len([one async for one in call]) == 1
                else:
                    assert (await refused(call)).code == "UNIMPLEMENTED"
        await require_good(addresses[0])
