"""Both clients over real gRPC, before a server that answers by a script."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from pydantic import BaseModel

from baton import AsyncClient, BatonError, Client
from baton.results import TokenLogprobs
from tests.baton.scripted_service import WAIT_S, ScriptedService, served
from tests.baton.threaded import ThreadedAsyncClient
from wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestNotFound,
    Unavailable,
    Unreachable,
    WireError,
)
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_MESSAGE_BYTES, PROXIES
from wire.sampling import FinishReason

Connect = Callable[[ScriptedService], Any]


CLIENTS: list[Callable[..., Any]] = [Client, ThreadedAsyncClient]


@pytest.fixture(params=CLIENTS, ids=["client", "async client"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Serves a script; returns a client of it."""
    with ExitStack() as stack:

        def open_client(service: ScriptedService) -> Any:
            client = request.param(stack.enter_context(served(service)), timeout_s=WAIT_S)
            stack.callback(client.close)
            return client

        yield open_client


@pytest.mark.parametrize("name", PROXIES)
def test_this_machine_is_reached_past_a_proxy(connect: Connect, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert connect(ScriptedService()).list_models()[0].name == "small"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_that_leads_nowhere_is_named(
    client: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    far = client("192.0.2.7:50051", timeout_s=WAIT_S)
    for ask in (far.list_models, lambda: far.generate("x")):
        with pytest.raises(Unreachable, match=f"gRPC asks the proxy of {name}, unless no_proxy names the host$"):
            ask()
    far.close()


def chunk(text: str, index: int = 0, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r1", chunk=pb.Chunk(index=index, text=text, **fields))


def complete(*choices: pb.Choice) -> pb.GenerateResponse:
    timeline = pb.Timeline(
        decode_worker="decode-0",
        spans=[
            pb.Span(name="decode.fetch", worker="decode-0", start_ms=1.5, duration_ms=2.5, counts={"tokens_host": 4})
        ],
        total_ms=7.5,
    )
    usage = pb.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=[pb.TierTokens(tier="host", tokens=4)])
    event = pb.Complete(choices=choices or [pb.Choice()], usage=usage, seed=11, timeline=timeline)
    return pb.GenerateResponse(request_id="r1", complete=event)


def test_sends_settings_that_are_given_and_no_others(connect: Connect) -> None:
    service = ScriptedService([complete()])
    settings = {"temperature": 0, "max_tokens": 3, "stop": ["."]}
    connect(service).generate(
        "hello", **settings, request_id="r1", model="small", session="agent", keep_s=0, priority=-3
    )
    sampling = pb.SamplingParams(temperature=0, max_tokens=3, stop=["."])
    assert service.requests == [
        pb.GenerateRequest(
            request_id="r1",
            model="small",
            session="agent",
            keep_s=0.0,
            text="hello",
            priority=-3,
            sampling_params=sampling,
        )
    ]


class Pet(BaseModel):
    """An answer's type."""

    name: str
    legs: int


def test_a_schema_makes_an_object_of_the_answer(connect: Connect) -> None:
    whole = complete(pb.Choice(finish_reason=pb.FINISH_REASON_STOP))
    service = ScriptedService([chunk('{"name": "Tom", '), chunk('"legs": 4}'), whole])
    client = connect(service)
    assert client.generate("hello", schema=Pet, max_tokens=9) == Pet(name="Tom", legs=4)
    sent = service.requests[0].sampling_params
    assert json.loads(sent.response_format.json_schema) == Pet.model_json_schema()
    for options in ({"n": 2}, {"response_format": {"regex": "a"}}):
        with pytest.raises(InvalidRequest, match="schema"):
            client.generate("hello", schema=Pet, **options)


def test_an_object_that_is_not_whole_is_an_error(connect: Connect) -> None:
    cut = complete(pb.Choice(finish_reason=pb.FINISH_REASON_LENGTH))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        connect(ScriptedService([chunk('{"name": "T'), cut])).generate("hello", schema=Pet)


def test_sends_token_ids(connect: Connect) -> None:
    service = ScriptedService([complete()])
    connect(service).generate([1, 2, 3])
    assert service.requests == [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling_params=pb.SamplingParams())
    ]


@pytest.mark.parametrize("param", ["request_id", "model"])
def test_names_that_are_no_text(connect: Connect, param: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        connect(ScriptedService([complete()])).generate("hello", **{param: "\ud800"})
    assert raised.value.ids == {"param": param}


def test_gathers_the_whole_answer(connect: Connect) -> None:
    service = ScriptedService(
        [
            chunk("a", token_ids=[1], logprobs=[pb.TokenLogprobs(token_id=1, logprob=-0.5)]),
            chunk("x", index=1, token_ids=[7]),
            chunk(
                "b",
                token_ids=[2],
                logprobs=[
                    pb.TokenLogprobs(
                        token_id=2, logprob=-0.25, top=[pb.TopLogprob(token_id=9, logprob=-1.5, token=b"c")], token=b"b"
                    ),
                ],
            ),
            complete(
                pb.Choice(index=0, finish_reason=pb.FINISH_REASON_LENGTH),
                pb.Choice(index=1, finish_reason=pb.FINISH_REASON_STOP, stop_string="."),
            ),
        ]
    )
    answer = connect(service).generate("hello", n=2)
    first, second = answer.choices
    assert (answer.request_id, answer.text, answer.seed) == ("r1", "ab", 11)
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", (1, 2), FinishReason.LENGTH)
    assert first.logprobs == (TokenLogprobs(-0.5, ()), TokenLogprobs(-0.25, ((9, -1.5),), b"b", (b"c",)))
    assert (second.index, second.text, second.matched_stop) == (1, "x", ".")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert dict(answer.usage.cached_tokens) == {"host": 4}
    assert (answer.timeline.prefill_worker, answer.timeline.decode_worker) == (None, "decode-0")
    assert (answer.timeline.total_ms, dict(answer.timeline.spans[0].counts)) == (7.5, {"tokens_host": 4})


def test_streams_each_chunk_as_it_comes(connect: Connect) -> None:
    may_go = threading.Event()
    with connect(ScriptedService([chunk("a"), may_go, chunk("b"), complete()])).stream("hello") as stream:
        texts = [next(iter(stream)).text]
        may_go.set()
        texts += [one.text for one in stream]
    assert texts == ["a", "b"]
    assert stream.completion.text == "ab"


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("n", "too many"),
        ModelNotFound("none"),
        BatonError("a bug"),
        Overloaded("full", retry_after_s=1.5, queued="9"),
        Overloaded("the client has stopped reading"),
    ],
    ids=str,
)
def test_raises_the_error_of_the_server(connect: Connect, error: BatonError) -> None:
    with pytest.raises(type(error)) as raised:
        connect(ScriptedService([error])).generate("hello")
    assert (type(raised.value), vars(raised.value)) == (type(error), vars(error))


def test_raises_an_error_amid_the_stream(connect: Connect) -> None:
    with connect(ScriptedService([chunk("a"), Overloaded("full")])).stream("hello") as stream:
        assert next(iter(stream)).text == "a"
        with pytest.raises(Overloaded):
            list(stream)
        with pytest.raises(WireError):
            _ = stream.completion


def test_a_stream_without_its_last_message_is_an_error(connect: Connect) -> None:
    with pytest.raises(WireError):
        connect(ScriptedService([chunk("a")])).generate("hello")


def test_a_call_ends_at_its_timeout(connect: Connect) -> None:
    may_go = threading.Event()
    with pytest.raises(DeadlineExceeded) as raised:
        connect(ScriptedService([may_go])).generate("hello", timeout_s=0.1)
    late = "no whole answer within the timeout of 0.1 s"
    assert raised.value.message == f"{late}: give a longer one, or see `baton status`"
    may_go.set()


def test_without_a_server_calls_are_unavailable(connect: Connect) -> None:
    client = connect(ScriptedService())
    other = type(client)("127.0.0.1:1", timeout_s=WAIT_S)
    with pytest.raises(Unavailable):
        other.generate("hello")
    with pytest.raises(Unavailable):
        other.list_models()
    other.close()


def test_leaving_a_stream_early_cancels_the_request(connect: Connect) -> None:
    may_go = threading.Event()
    service = ScriptedService([chunk("a"), may_go])
    with connect(service).stream("hello") as stream:
        assert next(iter(stream)).text == "a"
    assert service.is_over.wait(WAIT_S / 2), "before the call's deadline would end it"
    may_go.set()


async def test_a_cancelled_task_cancels_its_request() -> None:
    may_go = threading.Event()
    service = ScriptedService([chunk("a"), may_go])
    with served(service) as address:
        async with AsyncClient(address, timeout_s=6 * WAIT_S) as client:
            reading = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream("hello"):
                    reading.set()

            task = asyncio.create_task(read())
            async with asyncio.timeout(WAIT_S):
                await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.is_over.wait, WAIT_S)
        may_go.set()


def test_a_client_closes_its_connection() -> None:
    with served(ScriptedService()) as address:
        with Client(address) as client:
            client.list_models()
        with pytest.raises(ValueError, match="closed"):
            client.list_models()


async def test_an_async_client_closes_its_connection() -> None:
    with served(ScriptedService()) as address:
        async with AsyncClient(address) as client:
            await client.list_models()
        with pytest.raises(grpc.aio.UsageError, match="closed"):
            await client.list_models()


def test_aborts_by_request_id(connect: Connect) -> None:
    service = ScriptedService()
    connect(service).abort("r1")
    assert service.aborted == ["r1"]


def test_aborting_a_request_that_does_not_run_is_an_error(connect: Connect) -> None:
    with pytest.raises(RequestNotFound):
        connect(ScriptedService([RequestNotFound("none")])).abort("r1")


def test_lists_models(connect: Connect) -> None:
    (model,) = connect(ScriptedService()).list_models()
    assert (model.name, model.max_context_len, model.dtype, model.fingerprint) == ("small", 2048, "float32", "ab12")


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ([{"role": "user", "content": "\ud800"}], {}, "prompt"),
        ([{"role": "user"}, {"content": b"\xff"}], {}, "prompt"),
        ("a" * (MAX_MESSAGE_BYTES + 1), {}, "prompt"),
        ("hello", {"top_k": 1 << 40}, "top_k"),
        ("hello", {"temperature": "warm"}, "temperature"),
        ("hello", {"heat": 1.0}, "heat"),
        ("hello", {"keep_s": "long"}, "keep_s"),
        ("hello", {"session": 7}, "session"),
        ("hello", {"stop": ["a", "\ud800"], "top_k": 3}, "stop"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_before_sending(
    connect: Connect, prompt: Any, sampling: Any, param: str
) -> None:
    service = ScriptedService([complete()])
    with pytest.raises(InvalidRequest) as raised:
        connect(service).generate(prompt, **sampling)
    assert raised.value.ids == {"param": param}
    assert not re.search("codec|expected|argument|field|Error", raised.value.message)
    assert service.requests == []
