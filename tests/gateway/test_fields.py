"""Every field of a body: read, ignored, or refused by name."""

import json
from typing import Any

import pytest

from gateway import fields
from gateway.chat import ChatDialect
from gateway.completions import CompletionsDialect
from wire.errors import InvalidRequest
from wire.typed_reader import Misfit

SAID = [{"role": "user", "content": "a"}]


def refusal(body: object, known: Any = CompletionsDialect.fields) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as refused:
        fields.take(fields.parse(data), known)
    assert len(refused.value.message) < 160
    return refused.value.ids["param"]


NO_JSON = {
    "1 no JSON": b"{",
    "1 cut": b'{"prompt": "a',
    "2 empty": b"",
    "4 not UTF-8": b'{"prompt": "\xff"}',
    "10 UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "11 nested 100,000 deep": b"[" * 100_000,
    "11 nested in a field": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "12 5,000 digits": b'{"n": ' + b"1" * 5000 + b"}",
    "13 a key twice": b'{"n": 1, "n": 2}',
    "13 a key twice, within": b'{"prompt": "a", "metadata": {"a": 1, "a": 2}}',
    "44 NaN": b'{"temperature": NaN}',
    "44 infinity": b'{"temperature": -Infinity}',
    "a list": b"[]",
    "a number": b"1",
}


@pytest.mark.parametrize("what", NO_JSON)
def test_bodies_that_are_no_object(what: str) -> None:
    assert refusal(NO_JSON[what]) == "body"


def test_a_mark_before_the_body_is_passed_over() -> None:
    assert fields.parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


WRONG: list[tuple[str, object]] = [
    ("kv_policy", 25),
    ("session", 25),
    ("session", "\ud800"),
    ("keep_s", "60"),
    ("keep_s", True),
    ("keep_s", 1e10),
    ("prompt", 1),
    ("prompt", []),
    ("prompt", {"a": 1}),
    ("prompt", ["a"] * 17),
    ("prompt", ["a"] * 10_000),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", ["a", [1]]),
    ("prompt", [[1], "a"]),
    ("prompt", "\ud800"),
    ("prompt", ["a", "\udfff"]),
    ("stop", ["a", "\ud800"]),
    ("model", "\ud800"),
    ("kv_policy", "\ud800"),
    ("prompt", [-1]),
    ("prompt", [1 << 32]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("n", "3"),
    ("n", True),
    ("n", 1.0),
    ("n", 1 << 31),
    ("max_tokens", 1 << 63),
    ("max_tokens", 10**4000),
    ("top_k", 1.5),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**300),
    ("stream", "yes"),
    ("stream", 1),
    ("stop", 1),
    ("stop", [1]),
    ("stop", {"a": "b"}),
    ("stop_token_ids", "1"),
    ("model", 1),
    ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", {"1" * 20: 1}),
    ("stream_options", True),
    ("suffix", "b"),
    ("echo", 1),
    ("best_of", 2),
    ("store", True),
    ("service_tier", "fast"),
    ("response_format", "json"),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("prompt_logprobs", 1),
    ("skip_special_tokens", "no"),
    ("include_stop_str_in_output", 1),
    ("return_token_ids", 1),
    ("cache_salt", "a"),
    ("kv_transfer_params", {"a": 1}),
    ("structured_outputs", 1),
    ("chat_template", "a"),
    ("messages", SAID),
    ("max_token", 1),
    ("n", {}),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:24])
def test_fields_that_are_refused(name: str, value: object) -> None:
    assert refusal({name: value} if value != 10**4000 else f'{{"{name}": 1{"0" * 4000}}}'.encode()) == name


def test_the_name_of_a_field_is_told_on_one_line_and_in_part() -> None:
    assert refusal({"max\ntokens": 1}) == "max\\ntokens"
    with pytest.raises(Misfit) as refused:
        raise Misfit("").within("a\n" + "b" * 100)
    assert refused.value.under("") == "a\\n" + "b" * 62


MESSAGES: dict[str, tuple[object, str]] = {
    "none": ([], "messages"),
    "more than may be": (SAID * 4097, "messages"),
    "a text": ("a", "messages"),
    "no object": (["a"], "messages[0]"),
    "no role": ([{"content": "a"}], "messages[0].role"),
    "a role of another kind": ([{"role": 1, "content": "a"}], "messages[0].role"),
    "no content": ([*SAID, {"role": "user"}], "messages[1].content"),
    "content null": ([{"role": "user", "content": None}], "messages[0].content"),
    "content of another kind": ([{"role": "user", "content": 1}], "messages[0].content"),
    "no parts": ([{"role": "user", "content": []}], "messages[0].content"),
    "a part that is a text": ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    "a part without its text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "41 an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a"}}]}],
        "messages[0].content[0].type",
    ),
    "41 audio": ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    "61 tool calls": (
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
        "messages[0].tool_calls[0].function",
    ),
    "a refusal": ([{"role": "user", "content": "a", "refusal": "b"}], "messages[0].refusal"),
    "half a surrogate pair": ([*SAID, {"role": "user", "content": "\ud800"}], "messages[1].content"),
    "half a surrogate pair in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
        "messages[0].content[0].text",
    ),
    "half a surrogate pair in a call": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\ud800"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_messages_that_are_refused(what: str) -> None:
    given, param = MESSAGES[what]
    assert refusal({"messages": given}, ChatDialect.fields) == param


def test_stream_options_have_fields_of_their_own() -> None:
    assert refusal({"stream_options": {"include_usage": 1}}) == "stream_options.include_usage"
    assert refusal({"stream_options": {"include_usag": True}}) == "stream_options.include_usag"
    assert fields.take({"stream_options": {"include_usage": True}}, fields.COMMON) == {
        "stream_options": {"include_usage": True}
    }


NAMED = {"type": "function", "function": {"name": "f"}}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields_of_chat", "named"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [NAMED, {"function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f" * 1000}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameter": 1}}]}, "tools[0].function.parameter"),
        ({"tools": [1]}, "tools[0]"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_tools_that_are_refused(fields_of_chat: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fields.take(fields_of_chat, ChatDialect.fields)
    assert refused.value.ids["param"] == named


@pytest.mark.parametrize("arguments", ["[]", "{", "1", "null", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' * 2000, "go"])
def test_arguments_that_are_no_object_are_taken_as_a_text(arguments: str) -> None:
    """As what was written before max_tokens: an object, for many templates list the items of one."""
    call = {**CALLED, "function": {"name": "f", "arguments": arguments}}
    [turn] = fields.take({"messages": [{"role": "assistant", "tool_calls": [call]}]}, ChatDialect.fields)["messages"]
    assert json.loads(turn["tool_calls"][0])["function"]["arguments"] == {"arguments": arguments}


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    call = {**CALLED, "function": {"name": "f", "arguments": arguments}}
    [turn] = fields.take({"messages": [{"role": "assistant", "tool_calls": [call]}]}, ChatDialect.fields)["messages"]
    assert json.loads(turn["tool_calls"][0])["function"]["arguments"] == {}


def test_arguments_are_a_text() -> None:
    call = {**CALLED, "function": {"name": "f", "arguments": {"a": 1}}}
    said = [{"role": "assistant", "tool_calls": [call]}]
    assert refusal({"messages": said}, ChatDialect.fields) == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_turn_of_reasoning_needs_no_content(content: dict[str, Any]) -> None:
    [turn] = fields.take(
        {"messages": [{"role": "assistant", "reasoning_content": "a", **content}]}, ChatDialect.fields
    )["messages"]
    assert turn == {"role": "assistant", "content": "", "reasoning_content": "a"}


def test_a_history_with_calls_is_read() -> None:
    call = {**CALLED, "index": 0, "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    [assistant, tool] = fields.take({"messages": said}, ChatDialect.fields)["messages"]
    [written] = assistant["tool_calls"]
    assert json.loads(written) == {**CALLED, "function": {"name": "f", "arguments": {"a": 1}}}
    assert assistant["content"] == ""
    assert tool == said[1]


IDLE: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "best_of": 1,
    "suffix": "",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "priority": 0,
    "logprobs": None,
    "max_tokens": None,
    "cache_salt": None,
}


def test_fields_that_ask_for_nothing_are_taken() -> None:
    assert fields.take(IDLE, fields.COMMON) == {"service_tier": "auto", "priority": 0}


def test_fields_that_are_read() -> None:
    given = {"temperature": 1, "stop": "a", "logit_bias": {"7": -1}, "prompt": [1, 2], "n": 2}
    taken = fields.take(given, CompletionsDialect.fields)
    assert taken == {"temperature": 1.0, "stop": ["a"], "logit_bias": {7: -1.0}, "prompt": [[1, 2]], "n": 2}


def test_any_seed_of_64_bits_is_read_and_a_drawn_one_is_none() -> None:
    for given, seed in (
        (0, 0),
        (7, 7),
        ((1 << 63) - 1, (1 << 63) - 1),
        (-1, None),
        (-2, (1 << 63) - 2),
        (-(1 << 63), 0),
    ):
        assert fields.take({"seed": given}, fields.COMMON) == {"seed": seed}


def test_logprobs_of_chats_are_counted_apart() -> None:
    for given, logprobs in (
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"top_logprobs": 0}, {}),
    ):
        taken = fields.take({"messages": SAID, **given}, ChatDialect.fields)
        assert ChatDialect().take_prompts(taken) == [SAID]
        assert taken == logprobs
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        ChatDialect().take_prompts({"messages": SAID, "top_logprobs": 3})


@pytest.mark.parametrize(
    ("sent", "priority", "served"),
    [
        ({}, None, ""),
        ({"service_tier": "auto"}, None, "default"),
        ({"service_tier": "flex"}, 65536, "flex"),
        ({"service_tier": "priority"}, -65536, "priority"),
        ({"service_tier": "flex", "priority": 3}, 3, "default"),
        ({"service_tier": "default", "priority": 3}, 3, "default"),
        ({"priority": 3}, 3, ""),
    ],
)
def test_a_service_tier_is_a_priority(sent: dict[str, Any], priority: int | None, served: str) -> None:
    taken = fields.take(dict(sent), ChatDialect.fields)
    assert fields.place_by_tier(taken) == served
    assert taken.get("priority") == priority
    assert "service_tier" not in taken
