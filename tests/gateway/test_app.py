"""Routes, heads and bodies: what each is answered."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient, Chunk
from baton.client import AsyncStream
from gateway import app as app_module
from gateway import exchange
from gateway.app import Gateway
from gateway.observe.metrics import Metrics
from tests.gateway.local_gateway import LocalClient, LocalGateway, serving
from tests.harness.cluster import until
from tests.harness.fake_cluster import CONFIG
from wire.errors import Overloaded, Unavailable, Unreachable
from wire.rpc import MAX_MESSAGE_BYTES
from wire.trust.key_ring import KeyRing

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "hello", "max_tokens": 1}
POSTS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize")


async def test_models(gateway: LocalGateway) -> None:
    listed = (await gateway.get("/v1/models")).json
    [model] = listed["data"]
    assert (listed["object"], model["id"], model["object"], model["max_model_len"]) == ("list", "fake", "model", 2000)
    assert {"created", "owned_by", "root", "parent"} <= model.keys()
    assert (await gateway.get("/v1/models/fake")).json == model
    assert (await gateway.get("/v1/models/f%61ke")).json == model


async def test_names_of_one_model() -> None:
    async with serving(config=replace(CONFIG, model=replace(CONFIG.model, aliases=("b",)))) as gateway:
        assert [one["id"] for one in (await gateway.get("/v1/models")).json["data"]] == ["fake", "b"]
        assert (await gateway.get("/v1/models/b")).json["id"] == "b"
        answers = [(await gateway.post(COMPLETIONS, {**BODY, **named})).json for named in ({}, {"model": "b"})]
        assert [one["model"] for one in answers] == ["fake", "b"]


async def test_the_served_model_is_asked_for_once(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked, list_models = 0, gateway.client.list_models

    async def count(_: object) -> Any:
        nonlocal num_asked
        num_asked += 1
        return await list_models()

    monkeypatch.setattr(LocalClient, "list_models", count)
    answers = [await gateway.post(COMPLETIONS, BODY) for _ in range(3)]
    assert [one.json["model"] for one in answers] == ["fake"] * 3
    assert num_asked == 1


@pytest.mark.parametrize("name", ["other", "..%2f..%2fetc%2fpasswd", "", "m" * 10_240, "fake ", "FAKE", "fake%00"])
async def test_unknown_models(gateway: LocalGateway, name: str) -> None:
    answer = await gateway.get(f"/v1/models/{name}")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    asked = await gateway.post(COMPLETIONS, {**BODY, "model": name})
    assert (asked.status, asked.error["code"]) == (404, "model_not_found")
    assert answer.error["message"] == asked.error["message"] == "model: no model of that name is served, but fake"
    assert len(asked.body) < 300


PATHS = [
    "/",
    "/v1",
    "/v1/",
    "/v1//completions",
    "/v1/completions/",
    "/v1/completions.",
    "/v1/%63ompletions",
    "/v1/x/../completions",
    "/v1/x/%2e%2e/completions",
    "//v1/completions",
    "/V1/completions",
    "/v1/models/../completions",
    "/v1/completions;a",
]


@pytest.mark.parametrize("path", PATHS)
async def test_other_paths_are_not_found(gateway: LocalGateway, path: str) -> None:
    answer = await gateway.post(path, BODY)
    assert answer.status in (404, 405)
    assert (answer.error["type"], answer.headers["connection"]) == ("not_found_error", "close") or answer.status == 405


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
async def test_other_methods(gateway: LocalGateway, path: str, method: str) -> None:
    answer = await gateway.send(method, path, b"", {})
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonp", "application/x-www-form-urlencoded", "json"])
@pytest.mark.parametrize("path", POSTS)
async def test_bodies_of_another_type(gateway: LocalGateway, path: str, kind: str) -> None:
    answer = await gateway.post(path, BODY, content_type=kind)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON;a=b"])
async def test_bodies_of_the_right_type(gateway: LocalGateway, kind: str) -> None:
    assert (await gateway.post(COMPLETIONS, BODY, content_type=kind)).status == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "gzip, identity", "zstd"])
async def test_compressed_bodies_are_not_unpacked(gateway: LocalGateway, coding: str) -> None:
    assert (await gateway.post(COMPLETIONS, b"\x1f\x8b" + bytes(100), content_encoding=coding)).status == 415


async def test_a_body_that_is_too_long(gateway: LocalGateway) -> None:
    said = await gateway.post(COMPLETIONS, b"{}", content_length=str(MAX_MESSAGE_BYTES + 1))
    sent = await gateway.post(COMPLETIONS, b" " * (MAX_MESSAGE_BYTES + 1), transfer_encoding="chunked")
    for answer in (said, sent):
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert answer.error["code"] == "request_entity_too_large"


@pytest.mark.parametrize("body", ['{"prompt": [%s1]}', '{"prompt": "a", "stop": "%s"}'])
async def test_a_body_of_more_values_than_contexts_have(gateway: LocalGateway, body: str) -> None:
    answer = await gateway.post(COMPLETIONS, (body % ("1," * (exchange.MAX_COMMAS + 1))).encode())
    assert (answer.status, answer.error["code"]) == (413, "request_entity_too_large")


async def test_large_bodies_take_turns(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[float] = []
    parse, loop = exchange.Request.parse, asyncio.get_running_loop()

    def note(request: exchange.Request) -> None:
        parsed.append(loop.time())
        parse(request)

    monkeypatch.setattr(exchange.Request, "parse", note)
    body = json.dumps(BODY).encode() + b" " * app_module.SMALL_BYTES
    start_s = loop.time()
    large = [asyncio.create_task(gateway.post(COMPLETIONS, body)) for _ in range(3)]
    assert {(await one).status for one in large} == {200}
    turn_s = len(body) / app_module.PARSED_BYTES_PER_S
    assert [at_s - start_s >= num_turns * turn_s for num_turns, at_s in enumerate(parsed)] == [True] * 3


async def test_a_body_that_does_not_come(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY_S", 0.01)
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": COMPLETIONS.encode(),
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"10")],
    }
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await gateway.app(scope, receive, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


async def test_bodies_on_their_way_are_bounded(gateway: LocalGateway) -> None:
    num_bytes = len(json.dumps(BODY))
    gateway.app.reading.take(app_module.MAX_READING_BYTES - num_bytes)
    answer = await gateway.post(COMPLETIONS, json.dumps(BODY).encode() + b" ")
    assert (answer.status, answer.error["type"], answer.headers["retry-after"]) == (429, "rate_limit_error", "1")
    assert answer.error["message"] == "268,435,456 bytes of bodies may be on their way, the limit (fixed)"
    for _ in range(2):  # what was refused and what was read are given back
        assert (await gateway.post(COMPLETIONS, BODY)).status == 200


@pytest.mark.parametrize("body", [b"[" * 100_000, b" " * (MAX_MESSAGE_BYTES + 1), b'{"prompt": "a", "top_p": 2}'])
async def test_a_refused_request_leaves_no_garbage(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    requests = weakref.WeakSet[exchange.Request]()

    class Noted(exchange.Request):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            requests.add(self)

    monkeypatch.setattr(app_module, "Request", Noted)
    gc.disable()
    try:
        assert (await gateway.post(COMPLETIONS, body)).status in (400, 413)
        assert not len(requests)
    finally:
        gc.enable()


async def test_bodies_that_have_not_come_take_no_place(gateway: LocalGateway) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": COMPLETIONS.encode(),
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"4000000")],
    }
    num_waiting = 0

    async def receive() -> Any:
        nonlocal num_waiting
        num_waiting += 1
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        raise AssertionError

    slow = [asyncio.create_task(gateway.app(scope, receive, send)) for _ in range(100)]
    await until(lambda: num_waiting == 100)
    assert (await gateway.post(COMPLETIONS, BODY)).status == 200
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


@pytest.mark.parametrize("given", ["", "a" * 65, "a b", "a:b", "\x1b[31m", "é", "../a"])
async def test_ids_of_requests_that_are_refused(gateway: LocalGateway, given: str) -> None:
    answer = await gateway.post(COMPLETIONS, BODY, x_request_id=given)
    if given == "":  # as good as none
        assert answer.status == 200
        return
    assert (answer.status, answer.error["param"]) == (400, "x-request-id")
    assert answer.headers["x-request-id"] != given
    answer = await gateway.send("GET", "/health", b"", {"x-request-id": given})
    assert answer.headers["x-request-id"] != given


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_fields_that_are_missing(gateway: LocalGateway, path: str) -> None:
    answer = await gateway.post(path, {"max_tokens": 1})
    assert (answer.status, answer.error["param"]) == (400, "prompt" if path == COMPLETIONS else "messages")
    assert answer.error["type"] == "invalid_request_error"


async def test_options_of_a_stream_want_a_stream(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, {**BODY, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.error["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [300]),
        ("prompt", "\ud800"),
        ("model", "\ud800"),
        ("stop", ["a", "\ud800"]),
        ("temperature", 2.1),
        ("temperature", 1e39),
        ("top_p", -0.1),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("n", 17),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", 2000),
        ("logprobs", 21),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"1": 101}),
        ("stop", ""),
        ("stop", ["a"] * 9),
        ("stop_token_ids", [300]),
        ("session", ""),
        ("session", "s" * 129),
        ("keep_s", -1),
    ],
)
async def test_values_that_the_router_refuses(gateway: LocalGateway, field: str, value: object) -> None:
    answer = await gateway.post(COMPLETIONS, {**BODY, field: value})
    assert (answer.status, answer.error["param"]) == (400, field)
    assert not [word for word in ("Traceback", "Exception", ".py", "codec") if word in answer.error["message"]]


async def test_tokens_of_texts_and_chats(gateway: LocalGateway) -> None:
    answer = await gateway.post("/tokenize", {"prompt": "h€", "return_token_strs": True})
    ids = list("h€".encode())
    assert answer.json == {"count": 4, "max_model_len": 2000, "tokens": ids, "token_strs": ["h", "�", "�", "�"]}
    assert (await gateway.post("/detokenize", {"tokens": ids})).json == {"prompt": "h€"}
    chat = await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert bytes(chat.json["tokens"]) == b"user: a\nassistant:"
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        assert (await gateway.post(path, body)).error["param"] == param


@pytest.mark.parametrize("is_installed", [True, False])
async def test_signs_of_life(gateway: LocalGateway, is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_installed:
        monkeypatch.setattr(Distribution, "from_name", Mock(side_effect=PackageNotFoundError("baton-serve")))
    assert (await gateway.get("/health")).json == {}
    assert (await gateway.get("/ready")).json == {}
    assert (await gateway.get("/version")).json == {"version": "1.0.0"}
    assert (await gateway.get("/openapi.json")).json["info"]["version"] == "1.0.0"
    metrics = await gateway.get("/metrics")
    assert b'baton_http_requests_total{gateway="gateway-0",path="/health",status="200"} 1.0' in metrics.body
    assert metrics.headers["content-type"].startswith("text/plain")


async def metrics_before(gateway: LocalGateway, answer: bytes) -> bytes:
    """The gateway's metrics when the router's port answers that."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        gateway.app = Gateway([gateway.client], KeyRing(), Metrics(router_address=f"{host}:{port}"))
        return (await gateway.get("/metrics")).body


async def test_the_routers_metrics_come_past_any_proxy(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    metrics = await metrics_before(gateway, b"HTTP/1.0 200 OK\r\n\r\nof_the_router 1.0\n")
    assert metrics.startswith(b"# HELP baton_http")
    assert metrics.endswith(b"of_the_router 1.0\n")


async def test_metrics_of_a_router_that_answers_no_http(gateway: LocalGateway) -> None:
    assert b'baton_http_open_requests{gateway="gateway-0"} 1.0' in await metrics_before(gateway, b"junk\r\n\r\n")


async def test_a_router_that_is_away(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: float) -> None:
        raise Unavailable("the router is away")

    monkeypatch.setattr(gateway.client, "require_ready", away)
    answer = await gateway.get("/ready")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.error["type"] == "server_error"
    assert (await gateway.get("/health")).status == 200


async def test_a_router_that_is_down_is_told_without_its_address(gateway: LocalGateway) -> None:
    async with AsyncClient("127.0.0.1:1", timeout_s=5.0) as client:
        gateway.app = Gateway([client], KeyRing(), Metrics())
        body = {**BODY, "model": "fake"}
        for asking in (
            gateway.post(COMPLETIONS, body),
            gateway.post(COMPLETIONS, {**body, "stream": True}),
            gateway.post("/tokenize", {"prompt": "a"}),
            gateway.get("/v1/models"),
            gateway.get("/ready"),
        ):
            answer = await asking
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error["message"] == app_module.NO_ROUTER
            assert answer.error["message"].startswith("this gateway answers, but its router does not")
            assert answer.error["code"] == "unavailable"


@asynccontextmanager
async def health_after(delay_s: float) -> AsyncIterator[str]:
    """The address of a server that says after a delay that it serves."""

    async def check(_: object, __: object) -> health_pb2.HealthCheckResponse:
        await asyncio.sleep(delay_s)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Mock(Check=check), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield address
    await server.stop(0)


async def test_a_router_that_hangs_leaves_time_for_the_next_one(gateway: LocalGateway) -> None:
    async with health_after(60.0) as one, health_after(0.0) as other:
        for addresses in ((one, other), (other, one)):
            async with AsyncClient(",".join(addresses)) as client:
                gateway.app = Gateway([client], KeyRing(), Metrics())
                assert (await gateway.get("/ready")).status == 200


async def test_a_router_that_goes_amid_a_stream_is_told_as_its_last_event(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = AsyncStream.pieces

    async def broken(stream: AsyncStream) -> AsyncIterator[Chunk]:
        async for piece in pieces(stream):
            yield piece
            raise Unreachable("the server cannot be reached, or its connection broke")

    monkeypatch.setattr(AsyncStream, "pieces", broken)
    answer = await gateway.post(COMPLETIONS, {**BODY, "max_tokens": 9, "stream": True})
    assert (answer.status, answer.is_whole, len(answer.events)) == (200, False, 2)
    assert answer.events[-1]["error"]["message"] == app_module.NO_ROUTER


async def test_a_router_that_is_full(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise Overloaded("the queue is full", 2.0)

    monkeypatch.setattr(gateway.cluster.router.dispatcher, "open", full)
    answer = await gateway.post(COMPLETIONS, BODY)
    assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "2", "overloaded")


async def test_headers_that_a_handler_adds_are_on_the_answer_and_on_the_error(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(_: Gateway, request: exchange.Request) -> bytes:
        request.told.append((b"x-told", b"a"))
        if not request.body["prompt"]:
            raise Unavailable("none")
        return b"{}"

    monkeypatch.setattr(Gateway, "_tokenize", answers)
    app = Gateway([gateway.client], KeyRing(), Metrics())
    monkeypatch.setattr(gateway, "app", app)
    for prompt, status in (("a", 200), ("", 503)):
        answer = await gateway.post("/tokenize", {"prompt": prompt})
        assert (answer.status, answer.headers["x-told"]) == (status, "a")


async def test_a_bug_tells_nothing_of_itself(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(gateway.client, "stream", broken)
    answer = await gateway.post(COMPLETIONS, {**BODY, "model": "fake"})
    assert answer.status == 500
    assert answer.error["message"].startswith("internal error, incident ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "model": "fake"}),
    ],
)
async def test_sessions_reach_the_workers_from_every_dialect(gateway: LocalGateway, path: str, body: Any) -> None:
    answer = await gateway.post(path, {**body, "session": "agent é", "keep_s": 2.5})
    assert answer.status == 200
    [begin] = gateway.cluster.workers["p0"].prefills
    assert (begin.session, begin.keep_s) == ("agent é", 2.5)
    assert (await gateway.post(path, {**body, "session": None})).status == 200
    assert not gateway.cluster.workers["p0"].prefills[1].HasField("keep_s")


async def test_a_session_has_one_prompt_at_a_time(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, {**BODY, "prompt": ["a", "b"], "session": "agent"})
    assert (answer.status, answer.error["param"]) == (400, "session")
