"""Proxies of the environment: which gRPC asks, and which channels go past it."""

import asyncio

import grpc.aio
import pytest

from wire.rpc import LINE_OPTIONS, PROXIES, listen, open_channel, proxy_to

NOWHERE = "http://127.0.0.1:9"
FAR = "192.0.2.7:50051"


@pytest.fixture(autouse=True)
def _no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "address", "named"),
    [
        ({}, FAR, ""),
        ({"http_proxy": NOWHERE}, FAR, "http_proxy"),
        ({"http_proxy": NOWHERE, "https_proxy": NOWHERE}, FAR, "https_proxy"),
        ({"http_proxy": NOWHERE, "https_proxy": NOWHERE, "grpc_proxy": NOWHERE}, FAR, "grpc_proxy"),
        ({"http_proxy": ""}, FAR, ""),
        ({"HTTP_PROXY": NOWHERE}, FAR, ""),
        ({"http_proxy": NOWHERE, "no_proxy": "example.org, 192.0.2.7"}, FAR, ""),
        ({"http_proxy": NOWHERE, "no_proxy": ".example.org,"}, "llm.example.org:1", ""),
        ({"http_proxy": NOWHERE, "no_proxy": ".example.org,"}, "llm.example.com:1", "http_proxy"),
        ({"http_proxy": NOWHERE, "no_grpc_proxy": "b.org", "no_proxy": "a.org"}, "a.org:1", "http_proxy"),
        ({"http_proxy": NOWHERE}, "dns:///llm.example.org:1", "http_proxy"),
        ({"http_proxy": NOWHERE}, "dns:///localhost:1", ""),
        ({"http_proxy": NOWHERE}, "localhost:1", ""),
        ({"http_proxy": NOWHERE}, "127.0.0.1:1", ""),
        ({"http_proxy": NOWHERE}, "0.0.0.0:1", ""),
        ({"http_proxy": NOWHERE}, "[::1]:1", ""),
        ({"http_proxy": NOWHERE}, "[2001:db8::1]:1", "http_proxy"),
    ],
)
def test_the_proxy_to_an_address(
    given: dict[str, str], address: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert proxy_to(address) == named


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that names a proxy which is not there."""
    monkeypatch.setenv(request.param, NOWHERE)
    return str(request.param)


async def test_lines_within_a_cluster_go_past_it(proxy: str) -> None:
    server = grpc.aio.server()
    address = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(10), open_channel(address, LINE_OPTIONS, None) as channel:
            await channel.channel_ready()
    finally:
        await server.stop(0)
