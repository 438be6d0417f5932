"""Keys at the HTTP door: every path but health wants one, before anything is read or run."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from router.ports.server import RouterServer
from tests.gateway.local_gateway import Answer, LocalGateway, serving
from tests.gateway.test_app import BODY, COMPLETIONS, PATHS
from tests.harness.fake_cluster import CONFIG, FakeCluster
from tests.router.test_keys import ACME, ACME_TEXT, BETA_TEXT, LISTED, WATCHER_TEXT
from tests.wire.test_key_ring import WRONG
from wire.trust.key_ring import KeyList
from wire.typed_reader import to_json

HEALTH = {"/health", "/ready"}


@pytest.fixture
async def gateway() -> AsyncIterator[LocalGateway]:
    async with serving(LISTED) as gateway:
        yield gateway


def shows(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def require_refused(answer: Answer) -> None:
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.error["type"] == "authentication_error"
    assert answer.error.get("code", "invalid_api_key") == "invalid_api_key"


async def test_every_route_but_health_wants_a_key(gateway: LocalGateway) -> None:
    assert len(gateway.app.routes) == 13
    for path, method in {**gateway.app.routes, "/v1/models/fake": "GET"}.items():
        answer = await gateway.send(method, path, b"", {})
        if path in HEALTH:
            assert answer.status == 200, path
        else:
            require_refused(answer)
    assert not any(one.prefills for one in gateway.cluster.workers.values())


@pytest.mark.parametrize("shown", [name for name, values in WRONG.items() if len(values) == 1])
async def test_a_wrong_key_is_refused_before_the_body_is_read(gateway: LocalGateway, shown: str) -> None:
    [value] = WRONG[shown]
    answer = await gateway.post(COMPLETIONS, b"\xff" * 10_000, authorization=value)
    require_refused(answer)
    assert (answer.headers["connection"], len(answer.body) < 300) == ("close", True)
    assert value == "" or value not in str(answer.headers)


@pytest.mark.parametrize("path", PATHS)
async def test_no_trick_of_a_path_comes_past_the_keys(gateway: LocalGateway, path: str) -> None:
    require_refused(await gateway.post(path, BODY))
    assert (await gateway.post(path, BODY, **shows(ACME_TEXT))).status in (404, 405)


@pytest.mark.parametrize("host", ["x/?", "x/#", "", "127.0.0.1/health", "health"])
async def test_no_trick_of_a_host_comes_past_the_keys(gateway: LocalGateway, host: str) -> None:
    require_refused(await gateway.post(COMPLETIONS, BODY, host=host))
    require_refused(await gateway.send("GET", "/metrics", b"", {"host": host}))


@pytest.mark.parametrize("path", ["/health/", "/health?x", "/HEALTH", "/health/../v1/models", "/ready/x"])
async def test_what_only_looks_like_health_wants_a_key(gateway: LocalGateway, path: str) -> None:
    require_refused(await gateway.get(path))


async def test_a_key_opens_what_its_scope_says(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, BODY, **shows(ACME_TEXT))
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 1)
    for path, text in (("/metrics", ACME_TEXT), ("/v1/models", WATCHER_TEXT)):
        refused = await gateway.send("GET", path, b"", shows(text))
        assert (refused.status, refused.error["type"]) == (403, "permission_error")
        assert refused.error["code"] == "permission_denied"
    assert b"baton_http" in (await gateway.send("GET", "/metrics", b"", shows(WATCHER_TEXT))).body


async def test_a_key_may_be_shown_as_anthropics_clients_do(gateway: LocalGateway) -> None:
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = said if path == "/v1/messages" else {"messages": said["messages"]}
        assert (await gateway.post(path, body, x_api_key=ACME_TEXT)).status == 200
        require_refused(await gateway.post(path, body, x_api_key=ACME_TEXT + "x"))
        require_refused(await gateway.post(path, body, x_api_key=ACME_TEXT, **shows(ACME_TEXT)))
        assert (await gateway.post(path, body, x_api_key=WATCHER_TEXT)).error["type"] == "permission_error"


async def test_the_key_goes_on_to_the_router_which_looks_again(gateway: LocalGateway) -> None:
    gateway.cluster.router.keys.replace(KeyList((replace(ACME, is_revoked=True),)))
    require_refused(await gateway.post(COMPLETIONS, BODY, **shows(ACME_TEXT)))


async def test_a_request_id_is_its_tenants_own(gateway: LocalGateway) -> None:
    for worker in gateway.cluster.workers.values():
        worker.may_go.clear()
    asked = [
        asyncio.create_task(gateway.post(COMPLETIONS, BODY, x_request_id="same", **shows(text)))
        for text in (ACME_TEXT, BETA_TEXT)
    ]
    await asyncio.sleep(0)
    for worker in gateway.cluster.workers.values():
        worker.may_go.set()
    assert [(await one).status for one in asked] == [200, 200]


async def test_over_real_sockets_a_revoked_key_is_refused_at_once() -> None:
    cluster = FakeCluster(replace(CONFIG, keys=LISTED, settings=replace(CONFIG.settings, metrics_port=0)))
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    actor = GatewayActor(
        to_json(GatewayConfig(address=addresses.public, metrics_address=addresses.metrics, keys=LISTED))
    )
    address = json.loads(await actor.start())["http"]
    try:
        body = b'{"prompt": "hello", "max_tokens": 1}'
        assert await status_of(address, "POST /v1/completions", body, ACME_TEXT) == 200
        assert await status_of(address, "GET /ready", b"", "") == 200
        assert await status_of(address, "GET /metrics", b"", WATCHER_TEXT) == 200
        assert await status_of(address, "POST /v1/completions", body, "x" * (17 << 10)) == 431
        assert await status_of(address, "POST /v1/completions", body, "x\r\nauthorization: Bearer y") == 401
        assert await status_of(address, "POST /v1/completions", body, "x\ry") == 400
        assert await status_of(address, "POST /v1/completions", body, "é") == 401
        await actor.set_keys(to_json(KeyList((replace(ACME, is_revoked=True), *LISTED.keys[1:]))))
        assert await status_of(address, "POST /v1/completions", body, ACME_TEXT) == 401
        assert await status_of(address, "POST /v1/completions", body, BETA_TEXT) == 200
        await router.stop()
        assert await status_of(address, "GET /ready", b"", "") == 503
    finally:
        await actor.stop()
        await router.stop()


async def status_of(address: str, line: str, body: bytes, text: str) -> int:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"{line} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {text}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    async with asyncio.timeout(10):
        answered = await reader.read()
    writer.close()
    assert text == "" or text.encode() not in answered
    return int(answered.split()[1])
