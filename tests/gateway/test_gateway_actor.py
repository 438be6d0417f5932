"""The gateway as an actor, over real gRPC and real sockets."""

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from gateway import exchange
from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from router.ports.server import RouterServer
from tests.harness.cluster import WAIT_S
from tests.harness.fake_cluster import CONFIG, FakeCluster
from wire.errors import ConfigError
from wire.typed_reader import to_json

HI = {"role": "user", "content": "hi"}


async def test_from_start_to_stop() -> None:
    cluster = FakeCluster(replace(CONFIG, settings=replace(CONFIG.settings, metrics_port=0)))
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    actor = GatewayActor(to_json(GatewayConfig(address=addresses.public, metrics_address=addresses.metrics)))
    address = json.loads(await actor.start())["http"]
    status, answer = await ask(address, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    status, answer = await ask(address, "/v1/completions", {"prompt": "hello", "top_p": 2})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "top_p", "invalid_value")
    status, answer = await ask(address, "/v1/completions", {"prompt": "a" * 5000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    known = (
        "This model's maximum context length is 2000 tokens. However, your messages resulted in 5000 tokens. prompt: "
    )
    assert answer["error"]["message"].startswith(known)  # the numbers come over gRPC
    status, answer = await ask(address, "/v1/messages", {"messages": [HI], "max_tokens": 2000})
    known = (
        "input length and `max_tokens` exceed context limit: 19 + 2000 > 2000, decrease input length or `max_tokens` "
    )
    assert (status, answer["error"]["message"].partition("and try again: ")[0]) == (400, known)
    status, answer = await ask(address, "/v1/completions", {"prompt": "a", "model": "b"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"].endswith("is served, but fake")
    status, answer = await ask(address, "/health", None, host="evil.example")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read())
    assert b"baton_http_requests_total" in metrics
    assert b"baton_generation_tokens_total" in metrics
    await router.stop()
    status, answer = await ask(address, "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert "this gateway answers, but its router does not" in answer["error"]["message"]
    await actor.stop()
    with pytest.raises(urllib.error.URLError):
        await ask(address, "/health", None)


async def test_a_stream_begins_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BEGIN_AFTER_S", 0.01)
    monkeypatch.setattr(exchange, "COMMENT_EVERY_S", 0.01)
    cluster = FakeCluster(CONFIG)
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    cluster.workers["p0"].may_go.clear()
    actor = GatewayActor(to_json(GatewayConfig(address=addresses.public)))
    connection = http.client.HTTPConnection(json.loads(await actor.start())["http"], timeout=WAIT_S)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
    connection.request("POST", "/v1/messages", json.dumps(body), {"content-type": "application/json"})
    answer = await asyncio.to_thread(connection.getresponse)
    begun = [await asyncio.to_thread(answer.readline) for _ in range(10)]
    assert (answer.status, begun[0], begun[6::2]) == (200, b"event: message_start\n", [b": ping\n"] * 2)
    assert json.loads(begun[1][6:])["message"]["usage"]["input_tokens"] == len("user: a\nassistant:")
    cluster.workers["p0"].may_go.set()
    assert (await asyncio.to_thread(answer.read)).endswith(b'data: {"type": "message_stop"}\n\n')
    connection.close()
    await actor.stop()
    await router.stop()


async def test_a_host_is_checked_before_an_origin() -> None:
    origin = "https://chat.example.org"
    actor = GatewayActor(to_json(GatewayConfig(address="127.0.0.1:1", cors_origins=(origin,))))
    connection = http.client.HTTPConnection(json.loads(await actor.start())["http"], timeout=WAIT_S)
    asked = {"origin": origin, "access-control-request-method": "POST"}
    for host, status, allowed in (("localhost", 200, origin), ("chat.example.org", 400, None)):
        connection.request("OPTIONS", "/v1/messages", headers={"host": host, **asked})
        answer = await asyncio.to_thread(connection.getresponse)
        answer.read()
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, allowed)
    connection.close()
    await actor.stop()


async def ask(address: str, path: str, body: object, host: str = "localhost") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{address}{path}", data, {"content-type": "application/json", "host": host}
    )

    def send() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)

    return await asyncio.to_thread(send)


def test_a_configuration_that_is_wrong() -> None:
    with pytest.raises(ConfigError):
        GatewayActor('{"port": "a"}')
