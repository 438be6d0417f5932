"""Fields that no path reads: left out and told, or refused with a reason; and errors in the words of their client."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from baton import Chunk
from baton.client import AsyncStream
from baton.results import Model
from gateway import app, fields, unread
from gateway.chat import ChatDialect
from gateway.messages import MessagesDialect
from tests.gateway.local_gateway import Answer, LocalGateway
from wire.errors import InvalidRequest, Overloaded

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = {"role": "user", "content": "hi"}
SAID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 3},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 3},
    RESPONSES: {"input": "hi", "max_output_tokens": 3},
    MESSAGES: {"messages": [HI], "max_tokens": 3},
}
SHAPE = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FORMAT = {"type": "json_schema", "schema": SHAPE}
MARK = {"cache_control": {"type": "ephemeral"}}
PROGRAMS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Claude Code": (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}],
            "system": [{"type": "text", "text": "You are an agent.", **MARK}],
            "tools": [{"name": "Read", "description": "Reads.", "input_schema": SHAPE, "defer_loading": False}],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        },
        {"cache_control", "context_management", "defer_loading", "metadata", "output_config.effort"},
    ),
    "the beta SDK": (
        MESSAGES,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "betas": ["a"]},
        {"context_management", "betas"},
    ),
    "Qwen Code": (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_tokens": 32000}, "temperature": 1, "stream": True},
        {"thinking.budget_tokens"},
    ),
    "Codex": (
        RESPONSES,
        {
            "tools": [{"type": "function", "name": "run", "strict": False, "parameters": SHAPE}],
            "reasoning": {"effort": "low", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "client_metadata": {"session_id": "k"},
            "stream": True,
        },
        {"summary", "prompt_cache_key", "client_metadata", "reasoning.effort"},
    ),
    "openai-agents": (
        RESPONSES,
        {
            "include": [],
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "tools": [],
            "truncation": "auto",
        },
        {"metadata", "reasoning.effort", "summary", "verbosity", "truncation"},
    ),
    "Cline": (CHAT, {"reasoning_effort": "medium", "stream": True}, {"reasoning_effort"}),
    "a front end": (
        CHAT,
        {"files": [], "features": {"web_search": False}, "chat_id": "c", "metadata": {"chat_id": "c"}, "stream": True},
        {"features", "chat_id", "metadata"},
    ),
    "llama.cpp's": (
        CHAT,
        {"cache_prompt": True, "id_slot": -1, "mirostat": 0, "typical_p": 1.0, "keep_alive": "5m", "num_gpu": 1},
        {"cache_prompt", "id_slot", "keep_alive", "num_gpu"},
    ),
    "a history of litellm": (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": "a", "annotations": [{"a": 1}], "provider_specific_fields": {"a": 1}},
                {"role": "user", "content": [{"type": "text", "text": "b", **MARK}], "of_its_own": 1},
            ]
        },
        {"annotations", "provider_specific_fields", "cache_control", "other"},
    ),
    "an evaluation": (COMPLETIONS, {"verbosity": "low", "reasoning_effort": "low"}, {"verbosity", "reasoning_effort"}),
    "defaults alone": (CHAT, {"truncation": "disabled", "n": 1, "store": False, "tools": []}, set()),
}


async def without_a_channel(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves a model whose template knows no channel of reasoning."""
    [model] = await gateway.client.list_models()

    async def list_models() -> list[Model]:
        return [replace(model, reasoning_format="")]

    monkeypatch.setattr(gateway.client, "list_models", list_models)


def ignored(answer: Answer) -> set[str]:
    told = answer.headers.get("x-baton-ignored", "")
    assert len(told) <= 256
    return set(told.split(", ")) - {""}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_bodies_of_programs_are_answered_and_told_of_what_was_left_out(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    path, changed, names = PROGRAMS[program]
    await without_a_channel(gateway, monkeypatch)
    answer = await gateway.post(path, {**SAID[path], **changed})
    assert (answer.status, ignored(answer)) == (200, names)


async def test_fields_that_are_left_out_are_counted_by_a_bounded_set_of_names(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await without_a_channel(gateway, monkeypatch)
    for number in range(3):
        given = {**SAID[CHAT], f"of_its_own_{number}": 1, "chat_id": "c", "reasoning_effort": "low"}
        assert (await gateway.post(CHAT, given)).status == 200
    assert (await gateway.post(CHAT, {**given, "temperature": 3})).status == 400
    page = (await gateway.get("/metrics")).body.decode()
    counted = {
        name: f'baton_http_ignored_fields_total{{field="{name}",gateway="gateway-0"}} 4.0'
        for name in ("other", "chat_id", "reasoning_effort")
    }
    assert [name for name, line in counted.items() if line not in page] == []
    assert "of_its_own" not in page


async def test_the_header_names_at_most_sixteen_in_256_bytes(gateway: LocalGateway) -> None:
    names = sorted(unread.IGNORED - {*app.PATH_TO_FIELDS[CHAT]}, key=len)
    answer = await gateway.post(CHAT, {**SAID[CHAT], **dict.fromkeys(names[:20], 1)})
    assert (answer.status, len(ignored(answer))) == (200, 16)
    answer = await gateway.post(CHAT, {**SAID[CHAT], **dict.fromkeys(names[-20:], 1)})
    assert (answer.status, 8 <= len(ignored(answer)) < 16, ignored(answer) <= {*names}) == (200, True, True)


async def test_more_unknown_fields_than_are_compared_are_refused(gateway: LocalGateway) -> None:
    for num, status in ((unread.MAX_UNKNOWN, 200), (unread.MAX_UNKNOWN + 1, 400)):
        answer = await gateway.post(CHAT, {**SAID[CHAT], **{f"of_its_own_{one}": 1 for one in range(num)}})
        assert answer.status == status
    assert answer.error["param"] == f"of_its_own_{unread.MAX_UNKNOWN}"


@pytest.mark.parametrize("path", SAID)
async def test_what_would_change_the_answer_is_refused_with_the_reason(gateway: LocalGateway, path: str) -> None:
    for name in sorted({*unread.REFUSED} - {*app.PATH_TO_FIELDS[path]}):
        answer = await gateway.post(path, {**SAID[path], name: "of no worth"})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert answer.error["message"].endswith(unread.REFUSED[name])
        for idle in (*unread.ONLY.get(name, ()), [], {}, ""):
            assert fields.take({**SAID[path], name: idle}, app.PATH_TO_FIELDS[path]).keys() == SAID[path].keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("temprature", "temperature"),
        ("stopp", "stop"),
        ("topp", "top_p"),
        ("mesages", "messages"),
        ("reponse_format", "response_format"),
    ],
)
async def test_a_name_within_two_letters_of_a_field_is_refused(gateway: LocalGateway, name: str, meant: str) -> None:
    answer = await gateway.post(CHAT, {**SAID[CHAT], name: 1})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert answer.error["message"] == f"{name}: is no field of this request: did you mean {meant}?"


async def test_other_names_are_other_ones(gateway: LocalGateway) -> None:
    for name in ("", "id2", "x", "topic", "temp", "toString", "a" * 10_000, "\n"):
        answer = await gateway.post(CHAT, {**SAID[CHAT], name: 1})
        assert (answer.status, ignored(answer)) == (200, {"other"})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_a_turn_has_two_names(name: str) -> None:
    [turn] = fields.take({"messages": [{"role": "assistant", "content": "a", name: "b"}]}, ChatDialect.fields)[
        "messages"
    ]
    assert turn == {"role": "assistant", "content": "a", "reasoning_content": "b"}


async def test_a_body_of_messages_is_counted_as_it_is(gateway: LocalGateway) -> None:
    for changed, names in (({"stream": True, "max_tokens": 32000}, set()), ({"betas": ["a"]}, {"betas"})):
        answer = await gateway.post(f"{MESSAGES}/count_tokens", {**SAID[MESSAGES], **changed})
        assert (answer.status, ignored(answer)) == (200, names)


async def test_state_on_the_server_is_refused_with_the_switch_that_leaves_it_out(gateway: LocalGateway) -> None:
    answer = await gateway.post(MESSAGES, {**SAID[MESSAGES], "thread": {"type": "create"}})
    assert (answer.status, "thread=False" in answer.error["message"]) == (400, True)


def test_each_field_of_one_path_has_a_ruling_on_all_others() -> None:
    known = {name for read in app.PATH_TO_FIELDS.values() for name in read}
    for path, read in app.PATH_TO_FIELDS.items():
        assert known - {*read} - {*unread.REFUSED} - unread.IGNORED == set(), path


def test_what_another_path_reads_is_left_out_where_the_answer_has_no_use_for_it() -> None:
    known = {name for path in SAID for name in app.PATH_TO_FIELDS[path]}
    left_out = {path: (known - {*app.PATH_TO_FIELDS[path]}) & unread.IGNORED for path in SAID}
    assert left_out == {
        COMPLETIONS: {"parallel_tool_calls", "reasoning_effort"},  # no calls, no template
        CHAT: set(),
        RESPONSES: set(),
        MESSAGES: {"stream_options"},  # its streams have usage
    }


async def test_one_value_under_two_names_is_refused_unless_both_are_equal(gateway: LocalGateway) -> None:
    assert (await gateway.post(CHAT, {**SAID[CHAT], "max_completion_tokens": 3})).status == 200
    answer = await gateway.post(CHAT, {**SAID[CHAT], "max_completion_tokens": 4})
    assert (answer.status, answer.error["param"]) == (400, "max_completion_tokens")
    assert answer.error["message"] == "max_completion_tokens: is given beside max_tokens, and the two differ"


@pytest.mark.parametrize("named", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}], ids=str)
def test_a_format_of_messages_has_two_names(named: dict[str, Any]) -> None:
    dialect = MessagesDialect()
    taken = fields.take({**SAID[MESSAGES], **named}, dialect.fields)
    dialect.take_prompts(taken)
    assert taken["response_format"] == {"json_schema": json.dumps(SHAPE)}


def test_the_tables_agree() -> None:
    assert {*unread.ONLY} - {*unread.REFUSED} - unread.IGNORED == set()
    assert {*unread.REFUSED} & unread.IGNORED == set()
    assert all(len(name) <= 27 and name.isascii() for name in unread.TOLD)


NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a length of chats": (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    "the older length": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "log-probabilities": (CHAT, {"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    "a prompt of chats": (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
    "a role": (CHAT, {"messages": [{"role": "a", "content": "b"}]}, "messages"),
    "a format of vLLM's": (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "a schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}, "if": 1}}}},
        "response_format",
    ),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, "prompt"),
    "token ids": (COMPLETIONS, {"prompt": [300]}, "prompt"),
    "a prompt that is too long": (COMPLETIONS, {"prompt": "a" * 5000}, "prompt"),
    "the prompt's log-probabilities": (COMPLETIONS, {"echo": True, "logprobs": 6}, "logprobs"),
    "a length of responses": (RESPONSES, {"max_output_tokens": 5000}, "max_output_tokens"),
    "an input": (RESPONSES, {"input": "a" * 5000}, "input"),
    "a text format": (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"if": {}, "then": {}}}}},
        "text.format",
    ),
    "parameters": (
        RESPONSES,
        {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]},
        "tools",
    ),
    "stops": (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    "a prompt of messages": (MESSAGES, {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
    "an output format": (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": {"if": {}, "then": {}}}}},
        "output_config.format",
    ),
    "an input schema": (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": {"type": "array"}, "strict": True}]},
        "tools[0].input_schema",
    ),
}


@pytest.mark.parametrize("case", NAMED)
async def test_refusals_of_the_router_name_the_field_that_was_sent(gateway: LocalGateway, case: str) -> None:
    path, changed, param = NAMED[case]
    answer = await gateway.post(path, {**SAID[path], **changed})
    known = r"(This model's maximum context length is .*\. |prompt is too long: .* maximum: )?"  # of the dialect
    assert re.match(rf"{known}{re.escape(param)}: ", answer.error["message"])
    assert (answer.status, answer.error["param"]) in ((400, param), (400, "prompt is too long"))


async def test_other_fields_in_a_refusal_have_their_clients_names_too(gateway: LocalGateway) -> None:
    answer = await gateway.post(RESPONSES, {**SAID[RESPONSES], "min_tokens": 9})
    assert answer.error["message"] == "min_tokens: must not be more than max_output_tokens"


async def test_a_refusal_amid_a_stream_names_the_field_that_was_sent(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = AsyncStream.pieces

    async def fails(stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
        async for piece in pieces(stream):
            yield piece
            raise InvalidRequest("max_tokens", "is too much")

    monkeypatch.setattr(AsyncStream, "pieces", fails)
    answer = await gateway.post(RESPONSES, {**SAID[RESPONSES], "stream": True})
    assert (answer.status, answer.is_whole) == (200, False)
    last = answer.named_events[-1]
    assert (last["type"], last["param"]) == ("error", "max_output_tokens")
    assert last["message"] == "max_output_tokens: is too much"


def test_an_error_keeps_its_kind_and_the_indices_of_its_field() -> None:
    sent = {"tools[].function.parameters": "tools[].input_schema", "tools[].function": "tools[]", "stop": "stops"}
    for param, name in (
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("tools[2].function.parameters.a[1]", "tools[2].input_schema.a[1]"),
        ("tools[10].function.name", "tools[10].name"),
        ("tools", "tools"),
        ("stop", "stops"),
        ("stop_token_ids", "stop_token_ids"),
    ):
        told = fields.in_words(InvalidRequest(param, f"{param} is wrong"), sent)
        assert (type(told), told.ids, told.message) == (InvalidRequest, {"param": name}, f"{name}: {param} is wrong")
    full = fields.in_words(Overloaded("the queue is full", 2.0), sent)
    assert (type(full), full.message, full.ids, vars(full)["retry_after_s"]) == (Overloaded, "the queue is full", {}, 2)


async def test_a_key_that_stands_twice_is_told(gateway: LocalGateway) -> None:
    answer = await gateway.post(CHAT, b'{"messages": [{"role": "user", "role": "system"}]}')
    assert (answer.status, answer.error["message"]) == (400, "body: has the key role twice in one object")


async def test_an_empty_list_is_said_to_be_empty(gateway: LocalGateway) -> None:
    answer = await gateway.post(CHAT, {"messages": []})
    assert answer.error["message"] == "messages: must be a list of 1 to 4096 messages, not an empty list"


async def test_fields_left_out_of_one_request_are_not_told_to_another(gateway: LocalGateway) -> None:
    bodies = [{**SAID[CHAT], name: 1} for name in ("chat_id", "betas", "temperature")]
    answers = await asyncio.gather(*(gateway.post(CHAT, body) for body in bodies))
    assert [ignored(answer) for answer in answers] == [{"chat_id"}, {"betas"}, set()]
