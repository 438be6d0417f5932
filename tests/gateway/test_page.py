"""The page: its files, what it reads, and with which keys."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.observe import watch
from gateway.observe.watch import FILES, MAX_READERS
from tests.gateway.local_gateway import LocalGateway, serving
from tests.harness.cluster import until
from tests.harness.fake_cluster import CONFIG, request
from wire.errors import BatonError, Overloaded, PermissionDenied, Unavailable
from wire.trust.key_ring import Allowance, KeyList, Scope, make_key, page_key

USER, USER_TEXT = make_key("acme", [Scope.GENERATE, Scope.METRICS], Allowance())
OPERATOR, OPERATOR_TEXT = make_key("ops", [Scope.OPERATE], Allowance())
PAGE_KEY = page_key(CONFIG.cluster.token)
STREAM = "/ui/events"
READ = ("/ui/status", "/ui/requests", "/ui/requests/r", STREAM)


@pytest.fixture
async def keyed() -> AsyncIterator[LocalGateway]:
    async with serving(KeyList((USER, OPERATOR))) as gateway:
        yield gateway


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MIN_AGE_S", 0.005)


def parsed(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    told: dict[str, Any] = json.loads(event[6:])
    return told


async def read_on(stream: AsyncIterator[bytes]) -> None:
    async for _ in stream:
        pass


async def test_files_of_the_page_want_no_key_and_let_nothing_else_in(keyed: LocalGateway) -> None:
    for path in FILES:
        assert (await keyed.get(path)).status == 200
    page = await keyed.get("/ui")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "set-cookie" not in page.headers
    script, style = await keyed.get("/ui/page.js"), await keyed.get("/ui/page.css")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    for body in (page.body, script.body, style.body):
        assert b"//" not in body.replace(b"// ", b"").replace(b"://", b"//") or b"http" not in body
        assert b"innerHTML" not in body
    assert (await keyed.post("/ui", {})).status == 405


@pytest.mark.parametrize("path", READ)
async def test_a_key_that_does_not_operate_reads_nothing(keyed: LocalGateway, path: str) -> None:
    for key, status in (("", 401), (OPERATOR_TEXT[:-1] + "g", 401), (USER_TEXT, 403)):
        answer = await keyed.get(path, key)
        assert (answer.status, "parts" in answer.body.decode()) == (status, False)


async def test_without_keys_the_key_of_the_cluster_opens_the_page(gateway: LocalGateway) -> None:
    assert (await gateway.get("/ui/status")).status == 401
    status = await gateway.get("/ui/status", PAGE_KEY)
    assert status.json["parts"]["cluster"]["model"] == "fake"
    assert {"worker/p0", "worker/d0", "pool/decode", "tier/redis"} <= status.json["parts"].keys()


async def test_a_request_is_found_by_its_id(keyed: LocalGateway) -> None:
    asked = request(max_tokens=2)
    asked.request_id = "r-1"
    opened = keyed.cluster.router.dispatcher.open(asked, 9.0, USER)
    async for _ in opened.outbox:
        pass
    [found] = (await keyed.get("/ui/requests/acme%2Fr-1", OPERATOR_TEXT)).json["requests"]
    assert (found["request_id"], found["tenant"], found["outcome"]) == ("acme/r-1", "acme", "OK")
    assert found["spans"][0][:2] == ["router.check", "router"]
    assert [one["request_id"] for one in (await keyed.get("/ui/requests", OPERATOR_TEXT)).json["requests"]] == [
        "acme/r-1"
    ]
    assert (await keyed.get("/ui/requests/r-1", OPERATOR_TEXT)).status == 404
    assert "hello" not in json.dumps(found)


async def test_one_snapshot_serves_all_readers(gateway: LocalGateway) -> None:
    client = gateway.operator.with_key(PAGE_KEY)
    streams = [gateway.watch.events(client) for _ in range(8)]
    first = [parsed(await anext(stream)) for stream in streams]
    assert all(one["is_whole"] and "cluster" in one["parts"] for one in first)
    assert gateway.operator.num_calls["GetStatus"] == 1
    assert gateway.watch.readers.num_used == 8
    for stream in streams:
        await stream.aclose()
    assert gateway.watch.readers.num_used == 0


@pytest.mark.usefixtures("hurried")
async def test_only_what_has_changed_is_sent(gateway: LocalGateway) -> None:
    stream = gateway.watch.events(gateway.operator.with_key(PAGE_KEY))
    whole = parsed(await anext(stream))
    assert whole["requests"] == []
    await gateway.cluster.generate(request(max_tokens=2))
    await gateway.cluster.resize(1, 0)
    changes: dict[str, Any] = {}
    ended: list[Any] = []
    while "worker/d0" not in changes or not ended:
        event = parsed(await anext(stream))
        assert "is_whole" not in event
        changes |= event["parts"]
        ended += event["requests"]
    assert changes["worker/d0"] is None
    assert "worker/p0" not in changes
    assert "link" not in changes
    assert len(ended) == 1
    await stream.aclose()


@pytest.mark.usefixtures("hurried")
async def test_a_router_that_is_away_is_a_part_of_the_state(gateway: LocalGateway) -> None:
    stream = gateway.watch.events(gateway.operator.with_key(PAGE_KEY))
    await anext(stream)
    gateway.operator.failure.append(Unavailable("gone"))
    while parsed(await anext(stream))["parts"].get("link") != {"error": "gone"}:
        pass
    gateway.operator.failure.clear()
    while parsed(await anext(stream))["parts"].get("link") != {"error": ""}:
        pass
    gateway.operator.failure.append(PermissionDenied("revoked"))
    with pytest.raises(PermissionDenied):
        await read_on(stream)


async def test_more_pages_than_there_may_be_are_refused(gateway: LocalGateway) -> None:
    client = gateway.operator.with_key(PAGE_KEY)
    streams = [gateway.watch.events(client) for _ in range(MAX_READERS)]
    for stream in streams:
        await anext(stream)
    answer = await gateway.get(STREAM, PAGE_KEY)
    assert (answer.status, answer.error["message"]) == (
        429,
        f"{MAX_READERS} pages read the state of the cluster from this gateway, the limit (fixed)",
    )
    with pytest.raises(Overloaded):
        await anext(gateway.watch.events(client))
    for stream in streams:
        await stream.aclose()


@pytest.mark.usefixtures("hurried")
async def test_a_stream_ends_in_time_and_when_its_reader_goes(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_STREAM_S", 0.05)
    answer = await gateway.get(STREAM, PAGE_KEY)
    assert answer.is_whole
    assert answer.headers["content-type"] == "text/event-stream"
    monkeypatch.setattr(watch, "MAX_STREAM_S", 60.0)
    reading = asyncio.create_task(gateway.get(STREAM, PAGE_KEY))
    await until(lambda: gateway.watch.readers.num_used)
    gateway.gone.set()
    assert not (await reading).is_whole
    assert gateway.watch.readers.num_used == 0


async def test_a_failure_of_ours_is_no_part_of_the_page(gateway: LocalGateway) -> None:
    gateway.operator.failure.append(BatonError("internal error, incident 1"))
    assert (await gateway.get("/ui/status", PAGE_KEY)).status == 500


def test_the_key_of_a_page_is_of_one_cluster() -> None:
    assert page_key("a") != page_key("b")
