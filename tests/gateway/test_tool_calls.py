"""Calls of tools and reasoning, told as OpenAI does, whole and streamed."""

import json
from typing import Any

import pytest

from tests.gateway.local_gateway import LocalGateway

CHAT = "/v1/chat/completions"
QWEN_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": 400}


def say(gateway: LocalGateway, text: str) -> None:
    for worker in gateway.cluster.workers.values():
        worker.says = text


async def test_an_answer_with_calls(gateway: LocalGateway) -> None:
    say(gateway, f"Now. {QWEN_F}\n{QWEN_F}")
    [choice] = (await gateway.post(CHAT, SAID)).json["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Now. ")
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert all(list(call) == ["id", "type", "function"] and len(call["id"]) == 9 for call in calls)
    assert len({call["id"] for call in calls}) == 2
    *events, last, _ = (await gateway.post(CHAT, {**SAID, "stream": True})).events
    deltas = [event["choices"][0]["delta"] for event in events]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    first = streamed[0]
    assert [*first] == ["index", "id", "type", "function"]
    assert (first["index"], first["function"]) == (0, {"name": "f", "arguments": "{"})
    assert len(streamed) > 4  # arguments as they come
    for index, call in enumerate(calls):
        written = [one["function"]["arguments"] for one in streamed if one["index"] == index]
        assert "".join(written) == call["function"]["arguments"]
    assert "".join(delta.get("content", "") for delta in deltas) == "Now. "
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")


async def test_an_answer_of_a_call_alone_has_no_content(gateway: LocalGateway) -> None:
    say(gateway, QWEN_F)
    [choice] = (await gateway.post(CHAT, SAID)).json["choices"]
    assert choice["message"]["content"] is None
    say(gateway, QWEN_F + QWEN_F)
    [choice] = (await gateway.post(CHAT, {**SAID, "parallel_tool_calls": False})).json["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("changed", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_without_tools_calls_are_text(gateway: LocalGateway, changed: dict[str, Any]) -> None:
    say(gateway, QWEN_F)
    [choice] = (await gateway.post(CHAT, {**SAID, **changed})).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (QWEN_F, "stop")
    assert "tool_calls" not in choice["message"]


async def test_a_malformed_call_is_text_in_the_last_event(gateway: LocalGateway) -> None:
    say(gateway, "<tool_call>{")
    *events, last, _ = (await gateway.post(CHAT, {**SAID, "stream": True})).events
    assert last["choices"][0]["delta"] == {"content": "<tool_call>{"}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {event["choices"][0]["delta"]["content"] for event in events} == {""}


async def test_tools_and_calls_are_rendered(gateway: LocalGateway) -> None:
    say(gateway, "ok")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "abcdefghi"},
    ]
    answer = await gateway.post(CHAT, {**SAID, "messages": [*SAID["messages"], *turns]})
    assert answer.json["choices"][0]["message"]["content"] == "ok"
    prompt = bytes(gateway.cluster.workers["p0"].prefills[-1].prompt.ids).decode()
    made = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    rendered = f"assistant: <tool_call>{json.dumps(made)}</tool_call>\n"
    assert prompt == f"tool: {json.dumps(TOOL)}\nuser: hi\n{rendered}tool: 5\nassistant:"


async def test_tools_are_bounded(gateway: LocalGateway) -> None:
    assert (await gateway.post(CHAT, {**SAID, "tools": [TOOL] * 129})).error["param"] == "tools"
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"a": deep}
    nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert (await gateway.post(CHAT, {**SAID, "tools": [nested]})).error["param"] == "tools[0]"


async def test_reasoning_is_told_beside_the_content(gateway: LocalGateway) -> None:
    say(gateway, f"<think>\nOne.\n</think>\n\nNow. {QWEN_F}")
    answer = (await gateway.post(CHAT, SAID)).json
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("One.", "Now. ", 1)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nOne.\n</think>")}
    *events, _, _ = (await gateway.post(CHAT, {**SAID, "stream": True})).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "One."
    assert "".join(delta["content"] for delta in deltas) == "Now. "


async def test_an_answer_without_reasoning_tells_none(gateway: LocalGateway) -> None:
    say(gateway, "No. <think>so</think>")
    answer = (await gateway.post(CHAT, SAID)).json
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert "completion_tokens_details" not in answer["usage"]
