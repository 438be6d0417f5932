"""Pages of other origins: who may ask, who may read, and who never."""

from typing import Any

import pytest

from gateway.app import Gateway
from gateway.exchange import ANY_ORIGIN as ANY
from gateway.observe.metrics import Metrics
from tests.gateway.local_gateway import Answer, LocalGateway
from wire.trust.key_ring import NO_KEYS, Allowance, KeyList, KeyRing, Scope, make_key

ORIGIN = "https://chat.example.org"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
KEY, KEY_TEXT = make_key("default", [Scope.GENERATE, Scope.METRICS, Scope.OPERATE], Allowance())
OPEN_PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/models/fake", "/tokenize"]
CLOSED_PATHS = ["/ui", "/ui/", "/ui/page.js", "/ui/status", "/ui/events", "/ui/requests/a", "/metrics"]


def allow(gateway: LocalGateway, *origins: str, keys: KeyList = NO_KEYS) -> KeyRing:
    ring = KeyRing(keys)
    gateway.app = Gateway([gateway.client], ring, Metrics(), gateway.watch, origins)
    return ring


async def preflight(gateway: LocalGateway, path: str = CHAT, origin: str = ORIGIN) -> Answer:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    return await gateway.send("OPTIONS", path, b"", {"origin": origin, **asked})


async def call(gateway: LocalGateway, origin: str = ORIGIN, **headers: str) -> Answer:
    return await gateway.post(CHAT, BODY, origin=origin, **headers)


def cors_headers(answer: Answer) -> dict[str, str]:
    return {
        name: value for name, value in answer.headers.items() if name.startswith("access-control") or name == "vary"
    }


def is_let_in(answer: Answer) -> bool:
    return "access-control-allow-origin" in answer.headers


async def test_without_origins_nothing_is_let_in_and_a_preflight_names_the_setting(gateway: LocalGateway) -> None:
    assert cors_headers(await call(gateway)) == {}
    refused = await preflight(gateway)
    assert (refused.status, refused.headers["allow"], cors_headers(refused)) == (405, "POST", {})
    assert "http.cors_origins" in refused.error["message"]


@pytest.mark.parametrize("path", OPEN_PATHS)
async def test_a_page_of_a_listed_origin_may_ask_and_read(gateway: LocalGateway, path: str) -> None:
    allow(gateway, "http://localhost:3000", ORIGIN)
    asked = await preflight(gateway, path)
    assert asked.status == 200
    methods = "GET, HEAD" if path.startswith("/v1/models") else "POST"
    read = {
        "vary": "origin",
        "access-control-allow-origin": ORIGIN,
        "access-control-expose-headers": "*",
    }
    assert cors_headers(asked) == {
        **read,
        "access-control-allow-methods": methods,
        "access-control-allow-headers": "authorization, *",
        "access-control-max-age": "600",
    }
    answered = await gateway.send("GET" if methods != "POST" else "POST", path, b"", {"origin": ORIGIN})
    assert answered.status in (200, 415)
    assert cors_headers(answered) == read
    streamed = await gateway.post(CHAT, {**BODY, "stream": True}, origin=ORIGIN)
    assert (streamed.is_whole, cors_headers(streamed)) == (True, read)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "https://chat.example.org.evil.example",
        "https://evil.example/https://chat.example.org",
        "https://CHAT.example.org",
        "http://chat.example.org",
        "https://chat.example.org:8443",
        "https://chat.example.org/",
        "*",
    ],
)
async def test_another_origin_is_answered_without_leave_to_read(gateway: LocalGateway, origin: str) -> None:
    allow(gateway, ORIGIN)
    answered = await call(gateway, origin)
    assert (answered.status, is_let_in(answered), answered.headers["vary"]) == (200, False, "origin")
    refused = await preflight(gateway, origin=origin)
    assert (refused.status, is_let_in(refused)) == (405, False)
    assert "http.cors_origins" in refused.error["message"]


async def test_any_origin_counts_while_calls_need_a_key(gateway: LocalGateway) -> None:
    ring = allow(gateway, ANY)
    assert not is_let_in(await call(gateway))
    assert "`*` counts where calls need a key" in (await preflight(gateway)).error["message"]
    ring.replace(KeyList((KEY,)))
    assert (await preflight(gateway)).headers["access-control-allow-origin"] == ANY
    assert is_let_in(await call(gateway, authorization=f"Bearer {KEY_TEXT}"))
    ring.replace(NO_KEYS)
    assert not is_let_in(await call(gateway))
    assert (await preflight(gateway)).status == 405


async def test_a_preflight_shows_no_key_and_its_call_does(gateway: LocalGateway) -> None:
    allow(gateway, ORIGIN, keys=KeyList((KEY,)))
    assert (await preflight(gateway)).status == 200
    assert "http.cors_origins" in (await preflight(gateway, origin="null")).error["message"]
    assert (await preflight(gateway, "/v1/none")).status == 404
    refused = await call(gateway)
    assert (refused.status, is_let_in(refused)) == (401, True)
    assert (await gateway.send("OPTIONS", CHAT, b"", {"origin": ORIGIN})).status == 401
    assert (await call(gateway, authorization=f"Bearer {KEY_TEXT}")).status == 200


@pytest.mark.parametrize("path", CLOSED_PATHS)
async def test_no_page_reads_the_operators_paths(gateway: LocalGateway, path: str) -> None:
    allow(gateway, ORIGIN, ANY, keys=KeyList((KEY,)))
    asked = await preflight(gateway, path)
    assert (asked.status, cors_headers(asked)) == (401 if path == "/metrics" else 405, {})
    shown: dict[str, Any] = {"origin": ORIGIN, "authorization": f"Bearer {KEY_TEXT}"}
    if path != "/ui/events":  # which goes on for a minute
        assert cors_headers(await gateway.send("GET", path, b"", shown)) == {}
