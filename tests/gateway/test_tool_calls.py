"""Calls of tools: found in any text however it is split, told as OpenAI does, whole and streamed."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calls import FORMATS, CallParser, ToolCall
from tests.gateway.local_gateway import LocalGateway

CHAT = "/v1/chat/completions"
F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")
QWEN_F, QWEN_G = (
    f'<tool_call>\n{{"name": "{one.name}", "arguments": {one.arguments}}}\n</tool_call>' for one in (F, G)
)
LLAMA_F, LLAMA_G = (f'{{"name": "{one.name}", "parameters": {one.arguments}}}' for one in (F, G))
MISTRAL = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
HEADED = '[TOOL_CALLS]f[ARGS]{"a": 1}\n[TOOL_CALLS]g[CALL_ID]Ab1[ARGS] {}'
BRACKETS = '{"name": "f", "arguments": {"a": "}\\"] </tool_call> {"}}'
CASES: list[tuple[str, str, list[str | ToolCall] | None]] = [
    ("qwen", QWEN_F, [F]),
    ("qwen", f"{QWEN_F}\n{QWEN_G}\n", [F, G]),
    ("qwen", f"Let me see.\n{QWEN_F}", ["Let me see.\n", F]),
    ("qwen", f"{QWEN_F} done", [F, " done"]),
    ("qwen", f"<tool_call>{BRACKETS}</tool_call>", [ToolCall("f", json.dumps({"a": '}"] </tool_call> {'}))]),
    ("qwen", "a < b <tool", ["a < b <tool"]),
    ("qwen", "<tool_call>not JSON</tool_call>", ["<tool_call>not JSON</tool_call>"]),
    ("qwen", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("qwen", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
    ("qwen", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None),
    ("qwen", '<tool_call>{"a": ]}</tool_call>', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None),
    ("qwen", LLAMA_F, [LLAMA_F]),
    ("llama", LLAMA_F, [F]),
    ("llama", f"<|python_tag|>{LLAMA_F}; {LLAMA_G}", [F, G]),
    ("llama", f"\n{LLAMA_F}\n", [F]),
    ("llama", f"Like this: {LLAMA_F}", [f"Like this: {LLAMA_F}"]),
    ("llama", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("llama", '{"answer": 42} is what I found', ['{"answer": 42} is what I found']),
    ("mistral", MISTRAL, [F, G]),
    ("mistral", f"Well. {MISTRAL}", ["Well. ", F, G]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]', None),
    ("mistral", "[TOOL_CALLS] {}", ["[TOOL_CALLS] {}"]),
    ("mistral", HEADED, [F, G]),
    ("mistral", f"Well. {HEADED} [TOOL_CALLS]done", ["Well. ", F, G, " [TOOL_CALLS]done"]),
    ("mistral", "[TOOL_CALLS]h[ARGS]{}", None),
    ("mistral", "[TOOL_CALLS]f[ARGS][]", None),
    ("mistral", "[TOOL_CALLS]f[ARGS]{", None),
    ("mistral", f"[TOOL_CALLS]f [ARGS]{MISTRAL}", ["[TOOL_CALLS]f [ARGS]", F, G]),
    ("qwen", "<tool_call>f[ARGS]{}", None),
]
"""A format, a text, and what is found in it; None is the text itself."""
TEXTS = [(name, text, expected or [text]) for name, text, expected in CASES]
PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]"),
    *("{", "}", "[", "]", '"', "\\", ";", "a", " "),
)
VALID = ('"name": "f"', '"arguments": {}', '"parameters": {}', ", ", QWEN_F, LLAMA_F, MISTRAL, HEADED)


def parsed(tool_format: str, pieces: list[str]) -> list[str | ToolCall]:
    """The calls, and the texts between them."""
    parser = CallParser(FORMATS[tool_format], {"f", "g"})
    found = [one for piece in pieces for one in parser.feed(piece)]
    joined: list[str | ToolCall] = []
    for one in [*found, parser.flush()]:
        if isinstance(one, str) and joined and isinstance(joined[-1], str):
            joined[-1] += one
        elif one:
            joined.append(one)
    return joined


@pytest.mark.parametrize(("tool_format", "text", "expected"), TEXTS)
def test_texts_and_calls(tool_format: str, text: str, expected: list[str | ToolCall]) -> None:
    assert parsed(tool_format, [text]) == expected
    assert parsed(tool_format, list(text)) == expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*FORMATS]), st.lists(st.sampled_from((*PIECES, *VALID)), max_size=20), st.data())
def test_any_text_in_any_pieces(tool_format: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parsed(tool_format, [text])
    size = data.draw(st.integers(1, 9))
    assert parsed(tool_format, [text[start : start + size] for start in range(0, len(text), size)]) == whole
    if not any(isinstance(one, ToolCall) for one in whole):
        assert whole == [text] * bool(text)


def test_arguments_of_any_depth_are_a_call_or_text() -> None:
    for depth in range(sys.getrecursionlimit()):
        arguments = f'{{"a": {"[" * depth}{"]" * depth}}}'
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}'
        assert parsed("qwen", [text]) in ([ToolCall("f", arguments)], [text])


def test_text_is_told_as_soon_as_it_is_no_call() -> None:
    parser = CallParser(FORMATS["qwen"], {"f"})
    assert [parser.feed(piece) for piece in ("hello ", "<tool", "s> ", "<")] == [["hello "], [], ["<tools> "], []]
    assert parser.flush() == "<"


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
    assert [(one["index"], one["function"]) for one in streamed] == list(enumerate(call["function"] for call in calls))
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
    assert (await gateway.post(CHAT, {**SAID, "tools": [nested]})).error["param"] == "tools"
