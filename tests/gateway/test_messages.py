"""/v1/messages: Anthropic's blocks in, blocks and events out, and its errors."""

import json
from typing import Any

import pytest

from tests.gateway.local_gateway import LocalGateway
from tests.gateway.test_responses import ALL_PARTS, aborted, prompt_of
from tests.gateway.test_tool_calls import QWEN_F, say

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
SAID: dict[str, Any] = {"messages": [HI], "tools": [TOOL], "max_tokens": 400}


async def test_an_answer_has_blocks(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    answer = (await gateway.post(MESSAGES, {**SAID, "system": system}, x_request_id="a")).json
    tool = json.dumps({"type": "function", "function": FUNCTION})
    assert prompt_of(gateway) == f"tool: {tool}\nsystem: be\nuser: hi\nassistant:"
    thinking, text, call, other = answer.pop("content")
    assert thinking == {"type": "thinking", "thinking": "One.", "signature": ""}
    assert text == {"type": "text", "text": "Now. "}
    assert call == {"type": "tool_use", "id": call["id"], "name": "f", "input": {"a": 1}}
    assert call["id"] != other["id"]
    usage = answer.pop("usage")
    assert answer == {
        "id": "msg_a",
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }
    counted = (await gateway.post(COUNT, {"messages": [HI], "tools": [TOOL], "system": system})).json
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert counted["input_tokens"] == len(prompt_of(gateway))
    assert usage["output_tokens_details"] == {"thinking_tokens": len("<think>\nOne.\n</think>")}
    for single in (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"parallel_tool_calls": False, "tool_choice": {"type": "auto"}},
    ):
        assert len((await gateway.post(MESSAGES, {**SAID, **single})).json["content"]) == 3


async def test_names_of_tools_have_128_letters_and_stops_are_eight(gateway: LocalGateway) -> None:
    name = "f" * 128
    say(gateway, QWEN_F.replace('"f"', json.dumps(name)))
    tool, stops = {**TOOL, "name": name}, [f"stop {number}" for number in range(8)]
    answer = await gateway.post(MESSAGES, {**SAID, "tools": [tool], "stop_sequences": stops})
    assert [(block["type"], block["name"]) for block in answer.json["content"]] == [("tool_use", name)]
    for changed, param in (
        ({"tools": [{**TOOL, "name": name + "f"}]}, "tools[0].name"),
        ({"stop_sequences": [*stops, "a"]}, "stop_sequences"),
    ):
        answer = await gateway.post(MESSAGES, {**SAID, **changed})
        assert (answer.status, answer.error["param"]) == (400, param)
    function = {"type": "function", "function": {"name": "f" * 65}}
    answer = await gateway.post("/v1/chat/completions", {"messages": [HI], "tools": [function]})
    assert answer.error["param"] == "tools[0].function.name"


async def test_a_stream_has_the_events_of_each_block(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    answer = await gateway.post(MESSAGES, {**SAID, "stream": True}, x_request_id="a")
    start, ping, *events, delta, stop = answer.named_events
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    whole = (await gateway.post(MESSAGES, SAID, x_request_id="a")).json
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"].keys() == whole["usage"].keys()
    assert sum(one["type"] == "content_block_delta" for one in events if one["index"] == 2) > 4
    for place, block in enumerate(whole["content"]):
        first, *deltas, last = [one for one in events if one["index"] == place]
        assert (first["type"], last["type"]) == ("content_block_start", "content_block_stop")
        begun, joined = first["content_block"], ""
        for one in deltas:
            kind, joined = one["delta"].pop("type"), joined + "".join(one["delta"].values())
            assert [*one["delta"]] == [{"input_json_delta": "partial_json"}.get(kind, begun["type"])]
        name, value = ("input", json.loads(joined)) if begun["type"] == "tool_use" else (begun["type"], joined)
        assert {**begun, name: value, "id": ""} == {**block, "id": ""}
    assert [one["index"] for one in events] == sorted(one["index"] for one in events)


@pytest.mark.parametrize(
    ("says", "changed", "reason", "sequence"),
    [
        ("one two", {}, "end_turn", None),
        ("one two", {"stop_sequences": ["two", "z"]}, "stop_sequence", "two"),
        ("one two", {"max_tokens": 3}, "max_tokens", None),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', {"max_tokens": 45}, "max_tokens", None),
    ],
)
async def test_reasons_of_the_end(
    gateway: LocalGateway, says: str, changed: dict[str, Any], reason: str, sequence: str | None
) -> None:
    say(gateway, says)
    answer = (await gateway.post(MESSAGES, {**SAID, **changed})).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert all(block.get("input", {}) == {} for block in answer["content"])  # of a call that was cut


async def test_blocks_become_turns(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    content = (await gateway.post(MESSAGES, SAID)).json["content"]
    say(gateway, "ok")
    results = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": given, "is_error": False}
        for one, given in zip(content[2:], ("5", []), strict=True)
    ]
    answered = {"role": "user", "content": [*results, {"type": "text", "text": "a"}, {"type": "text", "text": "nd"}]}
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    body = {"messages": [HI, {"role": "assistant", "content": content}, answered, hidden]}
    assert (await gateway.post(MESSAGES, body)).json["content"] == [{"type": "text", "text": "ok"}]
    called = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    made = "".join(f"<tool_call>{json.dumps({'id': one['id'], **called})}</tool_call>" for one in content[2:])
    assert prompt_of(gateway) == f"user: hi\nassistant: Now. {made}\ntool: 5\ntool: \nuser: and\nassistant:"


async def test_thinking_reaches_the_template(gateway: LocalGateway) -> None:
    say(gateway, "ok")
    sent = []
    stream = gateway.client.stream

    def noted(prompt: Any, **options: Any) -> Any:
        sent.append((prompt, json.loads(options.get("chat_template_kwargs", "{}")), options))
        return stream(prompt, **options)

    gateway.client.stream = noted  # type: ignore[method-assign]
    for given in (
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [HI, {"role": "assistant", "content": "Now"}]},
    ):
        assert (await gateway.post(MESSAGES, {**SAID, **given})).status == 200
    off, low, both, begun = [variables for _, variables, _ in sent]
    assert (off, both, begun) == ({"enable_thinking": False}, {"enable_thinking": True}, {})
    assert low == {"reasoning_effort": "low", "enable_thinking": True}
    assert [options.get("continue_final_message", False) for _, _, options in sent] == [False, False, False, True]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "none": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    "a call without input": (
        {"messages": [HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
        "messages[1].content[0].input",
    ),
    "surrogates": ({"system": "\ud800"}, "system"),
    "a tool of theirs": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a choice of a tool that was left out": (
        {"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice",
    ),
    "a schema behind a tool that was left out": (
        {"tools": [SEARCH, {"name": "g", "input_schema": {"type": "array"}, "strict": True}]},
        "tools[1].input_schema",
    ),
    "a choice without a name": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice of no tool": ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    "thinking without a budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    "hidden thinking": ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    "a container": ({"container": "c"}, "container"),
    "a tier": ({"service_tier": "flex"}, "service_tier"),
    "several": ({"n": 2}, "n"),
    "what the router refuses": ({"temperature": 3}, "temperature"),
    "stops that the router refuses": ({"stop_sequences": ["a"] * 9}, "stop_sequences"),
    "a thread": ({"thread": {"type": "create"}}, "thread"),
}


@pytest.mark.parametrize(("changed", "param"), REFUSED.values(), ids=REFUSED)
async def test_refusals_begin_with_the_field(gateway: LocalGateway, changed: dict[str, Any], param: str) -> None:
    answer = await gateway.post(MESSAGES, {**SAID, **changed})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_errors_have_anthropics_names(gateway: LocalGateway) -> None:
    for path, body, more, status, kind in (
        (MESSAGES, {**SAID, "model": "b"}, {}, 404, "not_found_error"),
        (COUNT, {"messages": [HI], "model": "b"}, {}, 404, "not_found_error"),
        (MESSAGES, b" " * (5 << 20), {}, 413, "request_too_large"),
        (MESSAGES, SAID, {"content_type": "text/plain"}, 415, "invalid_request_error"),
    ):
        answer = await gateway.post(path, body, **more)
        assert (answer.status, answer.error["type"]) == (status, kind)
    assert (await gateway.send("GET", MESSAGES, b"", {})).error["type"] == "invalid_request_error"


async def test_a_failure_amid_a_stream_is_its_last_event(gateway: LocalGateway) -> None:
    assert (await aborted(gateway, MESSAGES, SAID)).error["type"] == "invalid_request_error"
    answer = await aborted(gateway, MESSAGES, {**SAID, "stream": True})
    assert (answer.status, answer.is_whole) == (200, False)
    first, *_, last = answer.named_events
    assert (first["type"], last["type"], last["error"]["type"]) == ("message_start", "error", "invalid_request_error")
