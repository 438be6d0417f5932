"""Completions and chats, whole and streamed, beside what the router itself answers."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from baton import Completion
from baton.client import AsyncStream
from baton.request import Message, Options
from gateway import app, completions, exchange, generation
from gateway.completions import CompletionsDialect
from gateway.generation import Generation
from tests.gateway.local_gateway import Answer, LocalGateway
from tests.harness.cluster import WAIT_S, until
from wire.ids import AttemptId, RequestId, request_of
from wire.load.limit import Limit, Share

PROMPT = "hello, world"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = {"messages": [{"role": "user", "content": PROMPT}]}
RENDERED = f"user: {PROMPT}\nassistant:"


async def text_of(gateway: LocalGateway, prompt: str, **options: Any) -> str:
    answer: Completion = await gateway.client.generate(prompt, **options)
    return answer.text


async def test_a_completion(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, {"model": "fake", "prompt": PROMPT, "max_tokens": 5, "seed": 1})
    text = await text_of(gateway, PROMPT, max_tokens=5, seed=1)
    assert answer.status == 200
    assert answer.json == {
        "id": f"cmpl-{answer.headers['x-request-id']}",
        "object": "text_completion",
        "created": answer.json["created"],
        "model": "fake",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 5,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]},
        },
    }


async def test_prompts_of_every_kind(gateway: LocalGateway) -> None:
    ids = list(PROMPT.encode())
    expected_text = await text_of(gateway, PROMPT, max_tokens=5, seed=1)
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        answer = await gateway.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 5, "seed": 1})
        assert [choice["text"] for choice in answer.json["choices"]] == [expected_text]
        assert answer.json["model"] == "fake"


async def test_several_prompts_and_choices_are_numbered_in_order(gateway: LocalGateway) -> None:
    body = {"prompt": [PROMPT, "xyz"], "n": 2, "max_tokens": 3, "seed": 1}
    answer = await gateway.post(COMPLETIONS, body)
    first = await gateway.client.generate(PROMPT, n=2, max_tokens=3, seed=1)
    second = await gateway.client.generate("xyz", n=2, max_tokens=3, seed=1)
    texts = [choice.text for completion in (first, second) for choice in completion.choices]
    assert [(one["index"], one["text"]) for one in answer.json["choices"]] == list(enumerate(texts))
    assert answer.json["usage"]["completion_tokens"] == 12
    streamed = await gateway.post(COMPLETIONS, body | {"stream": True})
    assert [texts_of(streamed, number) for number in range(4)] == texts


def texts_of(answer: Answer, number: int = 0) -> str:
    chosen = [one for event in answer.events[:-1] for one in event["choices"] if one["index"] == number]
    return "".join(one.get("text", one.get("delta", {}).get("content", "")) for one in chosen)


async def test_a_completion_streamed(gateway: LocalGateway) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    answer = await gateway.post(COMPLETIONS, body)
    assert (answer.status, answer.is_whole) == (200, True)
    *chunks, last, usage, done = answer.events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert [one["usage"] for one in [*chunks, last]] == [None] * (len(chunks) + 1)
    assert all(one["choices"][0]["finish_reason"] is None for one in chunks)
    assert texts_of(answer) == await text_of(gateway, PROMPT, max_tokens=5, seed=1)
    assert {one["id"] for one in answer.events[:-1]} == {f"cmpl-{answer.headers['x-request-id']}"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_event_has_the_usage_so_far_where_a_body_asks_for_it(gateway: LocalGateway, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": [PROMPT, "xyz"]} if path == COMPLETIONS else SAID
    body = {**prompt, "max_tokens": 5, "n": 2, "stream": True, "return_token_ids": True}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    *events, end, done = (await gateway.post(path, {**body, "stream_options": asked})).events
    num_new = 0
    for event in events:
        num_new += len(event["choices"][0].get("token_ids", ()))
        num_prompt = end["usage"]["prompt_tokens"]
        assert event["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
    assert (num_new, done, end["choices"]) == (end["usage"]["completion_tokens"], "[DONE]", [])
    for options in ({"include_usage": True, "continuous_usage_stats": False}, {"continuous_usage_stats": True}):
        events = (await gateway.post(path, {**body, "stream_options": options})).events[:-1]
        assert [one for one in events if one["choices"] and one.get("usage")] == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_usage_has_the_timeline_that_a_body_asks_for(gateway: LocalGateway, path: str, is_streamed: bool) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else SAID
    answer = await gateway.post(path, {**prompt, "max_tokens": 3, "stream": is_streamed, "timeline": True})
    [timeline] = (answer.events[-2] if is_streamed else answer.json)["usage"]["timelines"]
    parts = {span["name"].split(".")[0] for span in timeline["spans"]}
    assert {"router", "prefill", "decode"} <= parts
    assert timeline["prefill_worker"]
    assert timeline["decode_worker"]
    assert timeline["prefill_reason"] == "always"
    assert all(
        span.keys() == {"name", "worker", "start_ms", "duration_ms", "counts", "error"} for span in timeline["spans"]
    )
    assert sum(span["duration_ms"] for span in timeline["spans"]) >= timeline["total_ms"] * 0.99 > 0


async def test_each_prompt_has_a_timeline_of_its_own(gateway: LocalGateway) -> None:
    body = {"prompt": [PROMPT, "xyz"], "max_tokens": 2, "timeline": True}
    answer = await gateway.post(COMPLETIONS, body)
    assert len(answer.json["usage"]["timelines"]) == 2
    refused = await gateway.post(COMPLETIONS, {**body, "timeline": "yes"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "timeline")


async def test_a_chat(gateway: LocalGateway) -> None:
    answer = await gateway.post(CHAT, {**SAID, "max_completion_tokens": 5, "seed": 1})
    text = await text_of(gateway, RENDERED, max_tokens=5, seed=1)
    [choice] = answer.json["choices"]
    assert answer.json["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    messages: list[Message] = [{"role": "user", "content": PROMPT}]
    assert (await gateway.client.generate(messages, max_tokens=5, seed=1)).text == text


async def test_a_chat_streamed_has_content_in_its_first_event(gateway: LocalGateway) -> None:
    # This seed's answer begins with a letter: a space is held back, for it may stand before a channel.
    answer = await gateway.post(CHAT, {**SAID, "max_tokens": 5, "seed": 14, "stream": True})
    first, *others, last, done = answer.events
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"] != ""
    assert all(list(one["choices"][0]["delta"]) == ["content"] for one in others)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert "usage" not in first
    assert texts_of(answer) == await text_of(gateway, RENDERED, max_tokens=5, seed=14)


async def test_a_chat_in_parts(gateway: LocalGateway) -> None:
    parts = [{"type": "text", "text": PROMPT[:5]}, {"type": "text", "text": PROMPT[5:]}]
    body = {"max_tokens": 3, "seed": 1}
    whole, split = [
        await gateway.post(CHAT, {"messages": [{"role": "user", "content": content}], **body})
        for content in (PROMPT, parts)
    ]
    assert whole.json["choices"] == split.json["choices"]


async def test_a_stop_string_ends_an_answer(gateway: LocalGateway) -> None:
    text = await text_of(gateway, PROMPT, max_tokens=30, seed=1)
    for stop in (text[3:5], [text[3:5], "no such text"]):
        answer = await gateway.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "stop": stop})
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert answer.json["choices"][0]["text"] == text[: text.index(text[3:5])]


async def test_logprobs(gateway: LocalGateway) -> None:
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = 2
    body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 2}
    logprobs = (await gateway.post(COMPLETIONS, body)).json["choices"][0]["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, 4)
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    tokens = logprobs["tokens"]
    assert logprobs["text_offset"] == [len("".join(tokens[:index])) for index in range(4)]
    streamed = (await gateway.post(COMPLETIONS, body | {"stream": True})).events[:-2]
    pieces = [event["choices"][0]["logprobs"] for event in streamed]
    assert {name: [one for piece in pieces for one in piece[name]] for name in logprobs} == logprobs
    body = {**SAID, "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 2}
    content = (await gateway.post(CHAT, body)).json["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * 4
    assert all(bytes(one["bytes"]).decode(errors="replace") == one["token"] for one in content)


@pytest.mark.parametrize("prompt", [[list(PROMPT.encode()), list(b"xyz")], [PROMPT, "xyz"]])
async def test_an_echo_has_the_prompt_and_its_logprobs(gateway: LocalGateway, prompt: list[Any]) -> None:
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = 1
    body = {"prompt": prompt, "max_tokens": 3, "seed": 1, "echo": True, "logprobs": 1, "n": 2}
    choices = (await gateway.post(COMPLETIONS, body)).json["choices"]
    plain = (await gateway.post(COMPLETIONS, {**body, "echo": False})).json["choices"]
    for choice, answered, given in zip(choices, plain, [PROMPT, PROMPT, "xyz", "xyz"], strict=True):
        assert choice["text"] == given + answered["text"]
        logprobs, length = choice["logprobs"], len(given)
        assert "".join(logprobs["tokens"][:length]) == given
        assert logprobs["token_logprobs"][:length] == [None, *(-float(place) for place in range(1, length))]
        assert logprobs["top_logprobs"][:2] == [None, {given[1]: -1.0, "\0": -1.0}]
        assert logprobs["text_offset"][: length + 1] == list(range(length + 1))
        assert {name: values[length:] for name, values in logprobs.items() if name != "text_offset"} == {
            name: values for name, values in answered["logprobs"].items() if name != "text_offset"
        }
    streamed = (await gateway.post(COMPLETIONS, {**body, "stream": True})).events[:-1]
    for choice in choices:
        of_choice = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in of_choice) == choice["text"]
        pieces = [one["logprobs"] for one in of_choice if one["logprobs"]]
        assert {name: [one for piece in pieces for one in piece[name]] for name in pieces[0]} == choice["logprobs"]


async def test_an_echo_without_logprobs_is_text(gateway: LocalGateway) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "echo": True}
    [choice] = (await gateway.post(COMPLETIONS, body)).json["choices"]
    assert choice["text"] == PROMPT + await text_of(gateway, PROMPT, max_tokens=3, seed=1)
    assert choice["logprobs"] is None
    assert texts_of(await gateway.post(COMPLETIONS, {**body, "stream": True})) == choice["text"]


WITH_IDS = {"max_tokens": 3, "seed": 1, "n": 2, "return_token_ids": True}


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"echo": True}, {"echo": True, "logprobs": 1}])
async def test_a_completion_with_its_token_ids(gateway: LocalGateway, more: dict[str, Any]) -> None:
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = more.get("logprobs", 0)
    prompts = [PROMPT, "x" * 1000]
    body = {**WITH_IDS, **more, "prompt": prompts}
    plain = (await gateway.post(COMPLETIONS, {**body, "return_token_ids": False})).json["choices"]
    whole = (await gateway.post(COMPLETIONS, body)).json["choices"]
    streamed = (await gateway.post(COMPLETIONS, {**body, "stream": True})).events[:-1]
    made = [await gateway.client.generate(prompt, max_tokens=3, seed=1, n=2) for prompt in prompts]
    expected = [list(choice.token_ids) for one in made for choice in one.choices]
    for number, choice in enumerate(whole):
        prompt_ids = list(prompts[number // 2].encode())
        assert (choice.pop("prompt_token_ids"), choice.pop("token_ids")) == (prompt_ids, expected[number])
        events = [one["choices"][0] for one in streamed if one["choices"][0]["index"] == number]
        assert [one["prompt_token_ids"] for one in events if "prompt_token_ids" in one] == [prompt_ids]
        assert [token_id for one in events for token_id in one.get("token_ids", ())] == expected[number]
        assert "".join(one["text"] for one in events) == choice["text"]
    assert whole == plain


async def test_a_chat_with_its_token_ids(gateway: LocalGateway) -> None:
    body = {**WITH_IDS, **SAID}
    whole = (await gateway.post(CHAT, body)).json
    streamed = (await gateway.post(CHAT, {**body, "stream": True})).events[:-1]
    made = await gateway.client.generate(RENDERED, max_tokens=3, seed=1, n=2)
    prompt_ids = list(RENDERED.encode())
    assert whole["prompt_token_ids"] == prompt_ids
    for number, choice in enumerate(whole["choices"]):
        assert choice["token_ids"] == list(made.choices[number].token_ids)
        assert "prompt_token_ids" not in choice
        events = [one for one in streamed if one["choices"][0]["index"] == number]
        assert [one["prompt_token_ids"] for one in events if "prompt_token_ids" in one] == [prompt_ids]
        told = [token_id for one in events for token_id in one["choices"][0].get("token_ids", ())]
        assert told == choice["token_ids"]
    for path in ("/v1/responses", "/v1/messages"):
        assert (await gateway.post(path, {"return_token_ids": True})).error["param"] == "return_token_ids"


async def test_an_echo_has_bounds(gateway: LocalGateway) -> None:
    body = {"prompt": PROMPT, "echo": True}
    assert (await gateway.post(COMPLETIONS, {**body, "logprobs": 6})).error["param"] == "logprobs"
    assert (await gateway.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0})).error["param"] == "max_tokens"
    assert (await gateway.post(COMPLETIONS, {**body, "max_tokens": -1})).error["param"] == "max_tokens"


@pytest.mark.parametrize("more", [{"logprobs": 1}, {"logprobs": 0, "n": 2}, {}])
async def test_an_echo_without_an_answer_is_the_prompt_alone(gateway: LocalGateway, more: dict[str, int]) -> None:
    body = {"prompt": [PROMPT, "a"], "echo": True, "seed": 1, **more}
    none = (await gateway.post(COMPLETIONS, {**body, "max_tokens": 0})).json
    one = (await gateway.post(COMPLETIONS, {**body, "max_tokens": 1})).json
    for choice, longer in zip(none["choices"], one["choices"], strict=True):
        prompt = (PROMPT, "a")[choice["index"] // more.get("n", 1)]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert longer["text"].startswith(prompt)
        if more:
            cut = {name: items[: len(prompt)] for name, items in longer["logprobs"].items()}
            assert (choice["logprobs"], choice["logprobs"]["token_logprobs"][0]) == (cut, None)
    num_tokens = len(PROMPT) + 1
    assert [none["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [
        num_tokens,
        0,
        num_tokens,
    ]
    *events, last, done = (await gateway.post(COMPLETIONS, {**body, "max_tokens": 0, "stream": True})).events
    texts = dict.fromkeys(range(len(none["choices"])), "")
    for event in (*events, last):
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == [choice["text"] for choice in none["choices"]]
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


ECHO = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 0}


async def test_a_long_answer_takes_no_room_before_its_tokens_come(gateway: LocalGateway) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {**ECHO, "max_tokens": 900}))
    await until(lambda: worker.decodes)
    await until(lambda: gateway.app.answering.num_used)
    assert gateway.app.answering.num_used < 200 * len(PROMPT)
    worker.may_go.set()
    assert (await asking).status == 200
    assert gateway.app.answering.num_used == 0


async def test_a_large_answer_under_way_leaves_room_for_others(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Limit(40_000, "bytes may be held")
    monkeypatch.setattr(gateway.app, "answering", limit)
    with Share(limit) as large:
        large.take(20_000)
        for other in (ECHO, {**ECHO, "n": 3}, {**ECHO, "logprobs": None}, {**ECHO, "stream": True}):
            assert (await gateway.post(COMPLETIONS, other)).status == 200
        assert limit.num_used == 20_000


async def test_an_answer_that_grows_out_of_its_room_is_refused_and_told_the_limit(gateway: LocalGateway) -> None:
    held = app.MAX_ANSWER_BYTES - 30_000
    gateway.app.answering.take(held)
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = 1
    body = {**ECHO, "max_tokens": 900, "logprobs": 1}
    refused = await gateway.post(COMPLETIONS, body)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.error["message"] == "536,870,912 bytes may be in answers that are not streamed, the limit (fixed)"
    assert gateway.app.answering.num_used == held
    await until(lambda: not gateway.cluster.router.dispatcher.num_running)
    assert (await gateway.post(COMPLETIONS, {**body, "stream": True})).status == 200


async def test_a_slow_reader_holds_its_answer_for_a_bounded_time(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "GRACE_S", 0.05)
    monkeypatch.setattr(exchange, "SENT_BYTES", 100)
    gateway.pause_s = 0.02
    slow = await gateway.post(COMPLETIONS, {**ECHO, "n": 16})
    assert (slow.status, slow.is_whole) == (200, False)
    assert 0 < len(slow.body) < int(slow.headers["content-length"])
    assert gateway.app.answering.num_used == 0
    monkeypatch.setattr(exchange, "MIN_SENT_BYTES_PER_S", 1000)
    assert (await gateway.post(COMPLETIONS, ECHO)).is_whole


async def test_parts_of_a_prompt_are_streamed_as_they_come(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, ask, streams, kept = gateway.cluster.workers["p0"], gateway.client.stream, list[AsyncStream](), list[int]()
    worker.may_go.clear()

    def noted(prompt: Any, **options: Any) -> AsyncStream:
        streams.append(ask(prompt, **options))
        return streams[-1]

    monkeypatch.setattr(gateway.client, "stream", noted)
    options: Options = {"max_tokens": 2, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    asked = Generation(request_id="a", model="fake", prompts=[PROMPT], options=options, usage={})
    async with (
        asyncio.timeout(WAIT_S),
        aclosing(generation.events(asked, CompletionsDialect(), gateway.client).events) as told,
    ):
        first = json.loads((await anext(told))[6:])
        assert first["choices"][0]["text"] == PROMPT
        worker.may_go.set()
        async for _ in told:
            kept.append(len(streams[0].prompt))
    assert len(kept) > 3
    assert max(kept) == 0


async def test_a_stop_string_may_be_part_of_the_text(gateway: LocalGateway) -> None:
    text = await text_of(gateway, PROMPT, max_tokens=12, seed=1)
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 1, "stop": text[3:5], "include_stop_str_in_output": True}
    [choice] = (await gateway.post(COMPLETIONS, body)).json["choices"]
    assert choice["text"] == text[: text.index(text[3:5]) + 2]


async def test_offsets_of_tokens_are_counted_once(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lens: list[int] = []

    class Counted(str):
        def __len__(self) -> int:
            lens.append(super().__len__())
            return lens[-1]

    monkeypatch.setattr(completions, "_spell", lambda token: Counted(token.decode("latin-1")))
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = 1
    await gateway.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "logprobs": 1})
    assert len(lens) == 30


async def test_the_id_of_a_request_is_the_clients(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}, x_request_id="mine.1")
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("mine.1", "cmpl-mine.1")


async def test_ids_of_further_prompts_meet_no_id_of_a_client(gateway: LocalGateway) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    body = {"prompt": [PROMPT, "b"], "max_tokens": 2}
    given = ["multi-1", "multi", "a" * 64]
    asking = [asyncio.create_task(gateway.post(COMPLETIONS, body, x_request_id=one)) for one in given]
    await until(lambda: len(worker.decodes) == 6)
    ids = {request_of(AttemptId(begin.id)) for begin in worker.decodes}
    assert len(ids) == 6
    assert ids > set(given)
    assert {one[:8] for one in ids - set(given)} == {"multi-1-", "aaaaaaaa"}
    worker.may_go.set()
    assert {answer.status for answer in await asyncio.gather(*asking)} == {200}


async def test_a_client_that_goes_ends_its_request(gateway: LocalGateway) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    for path, body in (
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 50}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 50, "stream": True}),
        (COMPLETIONS, {"prompt": [PROMPT, "b"], "max_tokens": 50, "stream": True}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/responses", {"input": PROMPT, "stream": True}),
        ("/v1/messages", SAID),
        ("/v1/messages", {**SAID, "stream": True}),
    ):
        gateway.gone.clear()
        asking = asyncio.create_task(gateway.post(path, body))
        await until(lambda: worker.open_calls)
        gateway.gone.set()
        await asking
        await until(lambda: not gateway.cluster.router.dispatcher.num_running and not worker.open_calls)
    worker.may_go.set()


async def test_a_request_that_fails_amid_its_stream_ends_without_done(gateway: LocalGateway) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
    asking = asyncio.create_task(gateway.post(COMPLETIONS, body, x_request_id="mine"))
    await until(lambda: worker.open_calls)
    await gateway.cluster.router.dispatcher.abort(RequestId("mine"))
    answer = await asking
    assert (answer.status, answer.is_whole) == (200, False)
    assert answer.events[-1]["error"]["code"] == "cancelled"
    worker.may_go.set()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_request_that_fails_has_the_timeline_that_its_body_asks_for(
    gateway: LocalGateway, path: str, is_streamed: bool
) -> None:
    worker, prompt = gateway.cluster.workers["d0"], {"prompt": PROMPT} if path == COMPLETIONS else SAID
    errors = {}
    for wants in (True, False):
        worker.may_go.clear()
        body = {**prompt, "max_tokens": 50, "stream": is_streamed, "timeline": wants}
        asking = asyncio.create_task(gateway.post(path, body, x_request_id="mine"))
        await until(lambda: worker.open_calls)
        await gateway.cluster.router.dispatcher.abort(RequestId("mine"))
        answer = await asking
        errors[wants] = answer.events[-1]["error"] if is_streamed else answer.error
        worker.may_go.set()
    timeline = errors[True].pop("timeline")
    assert errors[True] == errors[False], "and without the field nothing is added"
    assert "decode.call" in [span["name"] for span in timeline["spans"]]
    assert sum(span["duration_ms"] for span in timeline["spans"]) == pytest.approx(timeline["total_ms"])
    assert PROMPT not in json.dumps(timeline)


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "xyz"]], ids=["a prompt", "the first of two prompts"])
async def test_a_request_that_another_client_aborts_has_an_answer(gateway: LocalGateway, prompts: list[str]) -> None:
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    asking = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": prompts, "max_tokens": 50}, x_request_id="mine"))
    await until(lambda: gateway.cluster.router.dispatcher.num_running == len(prompts) and worker.open_calls)
    await gateway.cluster.router.dispatcher.abort(RequestId("mine"))
    assert (await asking).error["code"] == "cancelled"
    worker.may_go.set()


async def test_what_the_router_refuses_before_a_stream_has_a_status(gateway: LocalGateway) -> None:
    answer = await gateway.post(COMPLETIONS, {"prompt": "a" * 3000, "stream": True})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    answer = await gateway.post(CHAT, {**SAID, "temperature": 3, "stream": True})
    assert (answer.status, answer.error["param"]) == (400, "temperature")


def longest_turn(turns: list[int], entries: list[int]) -> int:
    """Returns the most entries that were made in one turn of the event loop."""
    by_turn = Counter[int]()
    for turn, made in zip(turns, entries, strict=True):
        by_turn[turn] += made
    return max(by_turn.values())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a" * 700, "b" * 700], "n": 16, "max_tokens": 1, "echo": True, "logprobs": 5},
        {"prompt": [PROMPT, "xyz"], "n": 2, "max_tokens": 700, "logprobs": 20},
    ],
)
async def test_entries_are_made_some_at_a_time(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], streamed: bool
) -> None:
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = body["logprobs"]
    num_turns, turns, entries, dumps = 0, list[int](), list[int](), json.dumps

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    def counted(value: Any) -> str:
        turns.append(num_turns)
        text = dumps(value)
        entries.append(text.count("-"))  # each number is below zero, and the prompt's letters are not
        return text

    turning = asyncio.create_task(count_turns())
    monkeypatch.setattr(json, "dumps", counted)
    answer = await gateway.post(COMPLETIONS, body | {"stream": streamed, "seed": 1})
    turning.cancel()
    assert answer.status == 200
    assert longest_turn(turns, entries) <= 2 * generation.MAX_SLICE_ENTRIES


async def test_a_large_answer_is_written_in_pieces_with_its_length(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "SENT_BYTES", 1000)
    body = {"prompt": "a" * 700, "n": 4, "max_tokens": 1, "echo": True, "logprobs": 5}
    sizes: list[int] = []
    joined = exchange.joined

    def noted(pieces: list[bytes]) -> Iterator[bytes]:
        for piece in joined(pieces):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(exchange, "joined", noted)
    answer = await gateway.post(COMPLETIONS, body)
    assert len(sizes) > 4
    assert sum(sizes) == len(answer.body) == int(answer.headers["content-length"])
    assert len(answer.json["choices"]) == 4


ALIKE = [
    (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}, 104),
    (COMPLETIONS, {"prompt": PROMPT, "n": 2, "max_tokens": 1, "echo": True}, 24),
    (COMPLETIONS, {"prompt": [PROMPT, "xyz"], "n": 3, "max_tokens": 7, "logprobs": 2}, 126),
    (CHAT, {**SAID, "n": 3, "max_tokens": 7, "logprobs": True, "top_logprobs": 2}, 63),
    (CHAT, {**SAID, "logprobs": True}, 256),
]


@pytest.mark.parametrize(("path", "body", "num_entries"), ALIKE)
async def test_entries_of_an_answer_are_bounded_for_all_fields_alike(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], num_entries: int
) -> None:
    monkeypatch.setattr(generation, "MAX_ENTRIES", num_entries)
    for streamed in (False, True):
        assert (await gateway.post(path, body | {"stream": streamed})).status == 200
    monkeypatch.setattr(generation, "MAX_ENTRIES", num_entries - 1)
    for streamed in (False, True):
        refused = await gateway.post(path, body | {"stream": streamed})
        assert refused.status == 400
        assert f"may have {num_entries} entries" in refused.error["message"]
        assert refused.error["message"].endswith(f"at most {num_entries - 1}")


async def test_an_answer_has_its_place_until_it_is_sent(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, held = exchange.joined, list[int]()

    def noted(pieces: list[bytes]) -> Iterator[bytes]:
        for piece in joined(pieces):
            held.append(gateway.app.answering.num_used)
            yield piece

    monkeypatch.setattr(exchange, "joined", noted)
    for worker in gateway.cluster.workers.values():
        worker.num_logprobs = 1
    answer = await gateway.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1})
    assert (answer.status, len(held)) == (200, 1)
    assert held[0] > len(json.dumps(answer.json["choices"][0]["logprobs"])) / 2
    assert gateway.app.answering.num_used == 0


async def test_an_echo_is_whole_where_a_stop_string_leaves_nothing_of_its_answer(gateway: LocalGateway) -> None:
    text = await text_of(gateway, PROMPT, max_tokens=12, seed=1)
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 1, "stop": text[:4], "echo": True}
    [choice] = (await gateway.post(COMPLETIONS, body)).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    streamed = await gateway.post(COMPLETIONS, {**body, "prompt": [PROMPT, PROMPT], "stream": True})
    assert [texts_of(streamed, number) for number in range(2)] == [PROMPT, PROMPT]
