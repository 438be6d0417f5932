"""/v1/responses: items in, items and typed events out, and nothing kept."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.local_gateway import Answer, LocalGateway
from tests.gateway.test_tool_calls import QWEN_F, say
from tests.harness.cluster import until
from wire.ids import RequestId

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
SAID: dict[str, Any] = {"input": "hi", "tools": [TOOL], "max_output_tokens": 400}
ALL_PARTS = f"<think>\nOne.\n</think>\n\nNow. {QWEN_F}\n{QWEN_F}"


def prompt_of(gateway: LocalGateway) -> str:
    """The prompt that the prefill worker was sent last."""
    return bytes(gateway.cluster.workers["p0"].prefills[-1].prompt.ids).decode()


async def test_an_answer_has_items(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    answer = (await gateway.post(RESPONSES, {**SAID, "instructions": "be"}, x_request_id="a")).json
    assert prompt_of(gateway).endswith("system: be\nuser: hi\nassistant:")
    reasoning, message, call, other = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "One."}]
    assert message == {
        "id": "text_a_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Now. ", "annotations": [], "logprobs": []}],
    }
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert call["call_id"] != other["call_id"]
    assert (answer["id"], answer["object"], answer["status"], answer["store"]) == (
        "resp_a",
        "response",
        "completed",
        False,
    )
    assert (answer["tools"], answer["tool_choice"], answer["instructions"]) == ([TOOL], "auto", "be")
    usage = answer["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>\nOne.\n</think>")}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    one = (await gateway.post(RESPONSES, {**SAID, "parallel_tool_calls": False})).json
    assert [item["type"] for item in one["output"]] == ["reasoning", "message", "function_call"]


async def test_a_stream_has_typed_events(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    streamed = await gateway.post(RESPONSES, {**SAID, "stream": True}, x_request_id="a")
    events = streamed.named_events
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    kinds = [one["type"].removeprefix("response.") for one in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert list(dict.fromkeys(kinds[4:])) == [
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    final = events[-1]["response"]
    whole = (await gateway.post(RESPONSES, SAID, x_request_id="a")).json
    for response in (final, whole):
        response.pop("created_at")
        response.pop("usage")
        assert [item.pop("call_id") for item in response["output"] if item["type"] == "function_call"]
    assert final == whole
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [{**one, "call_id": ""} for one in done] == [{**one, "call_id": ""} for one in final["output"]]
    for place, item in enumerate(done):
        deltas = [one["delta"] for one in events if one["type"].endswith(".delta") and one["output_index"] == place]
        assert "".join(deltas) == item.get("arguments", item.get("content", [{}])[0].get("text"))
    assert sum(one["type"] == "response.function_call_arguments.delta" for one in events) > 4


async def test_an_answer_is_the_chats(gateway: LocalGateway) -> None:
    body = {"seed": 14, "temperature": 1, "stop": "z"}
    chat = await gateway.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    )
    answer = (await gateway.post(RESPONSES, {**body, "input": "hi", "max_output_tokens": 9})).json
    [item] = answer["output"]
    assert item["content"][0]["text"] == chat.json["choices"][0]["message"]["content"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert item["status"] == "incomplete"
    streamed = await gateway.post(RESPONSES, {**body, "input": "hi", "max_output_tokens": 9, "stream": True})
    *_, done, last = streamed.named_events
    assert (done["item"]["status"], last["type"]) == ("incomplete", "response.incomplete")


async def test_items_of_the_assistant_are_one_turn(gateway: LocalGateway) -> None:
    say(gateway, ALL_PARTS)
    output = (await gateway.post(RESPONSES, SAID)).json["output"]
    say(gateway, "ok")
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "5"} for one in output if "call_id" in one
    ]
    hidden: dict[str, Any] = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x", "content": None}
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *output, *results, hidden]
    answer = await gateway.post(RESPONSES, {**SAID, "input": turns, "include": ["reasoning.encrypted_content"]})
    assert answer.json["output"][0]["content"][0]["text"] == "ok"
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [
        json.dumps({"id": one["call_id"], "type": "function", "function": function})
        for one in output
        if "call_id" in one
    ]
    made = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    assert prompt_of(gateway).endswith(f"user: hi\nassistant: Now. {made}\ntool: 5\ntool: 5\nassistant:")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "state": ({"store": True}, "store"),
    "an answer of before": ({"previous_response_id": "resp_a"}, "previous_response_id"),
    "a conversation": ({"conversation": "c"}, "conversation"),
    "the background": ({"background": True}, "background"),
    "no input": ({"input": None}, "input"),
    "no items": ({"input": []}, "input"),
    "a reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    "a type that is no text": ({"input": [{"type": []}]}, "input[0].type"),
    "an item that is a text": ({"input": ["a"]}, "input[0]"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    "a role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    "a call without an id": (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
    ),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]},
        "input[0].arguments",
    ),
    "surrogates": ({"instructions": "\ud800"}, "instructions"),
    "a tool of no kind": ({"tools": [{"type": "web"}]}, "tools[0].type"),
    "a tool of a namespace that is no function": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}]},
        "tools[0].tools[0].type",
    ),
    "a choice of a tool that was left out": (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
    ),
    "a choice of any tool, of none": ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    "the parameters of a tool behind one that was left out": (
        {"tools": [{"type": "mcp"}, {**TOOL, "strict": True, "parameters": {"type": "array"}}]},
        "tools[1].parameters",
    ),
    "the parameters of a tool of a namespace": (
        {
            "tools": [
                TOOL,
                {
                    "type": "namespace",
                    "name": "a",
                    "tools": [TOOL, {**TOOL, "name": "g", "strict": True, "parameters": {"type": "array"}}],
                },
            ]
        },
        "tools[1].tools[1].parameters",
    ),
    "a nested function": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    "allowed tools": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    "a format": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "what the router refuses": ({"max_output_tokens": 0}, "max_output_tokens"),
    "several": ({"n": 2}, "n"),
    "an effort without a channel": ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    "options without a stream": ({"stream_options": {}}, "stream_options"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include"),
}


@pytest.mark.parametrize(("changed", "param"), REFUSED.values(), ids=REFUSED)
async def test_refusals_name_the_field_and_the_reason(
    gateway: LocalGateway, changed: dict[str, Any], param: str
) -> None:
    answer = await gateway.post(RESPONSES, {**SAID, **changed})
    assert (answer.status, answer.error["param"]) == (400, param)
    if {*changed} & {"store", "previous_response_id", "conversation", "background"}:
        assert "gateways are several and keep nothing" in answer.error["message"]


async def aborted(gateway: LocalGateway, path: str, body: dict[str, Any]) -> Answer:
    """The answer to a request that is aborted once a worker decodes."""
    worker = gateway.cluster.workers["d0"]
    worker.may_go.clear()
    asking = asyncio.create_task(gateway.post(path, body, x_request_id="mine"))
    await until(lambda: worker.open_calls)
    await gateway.cluster.router.dispatcher.abort(RequestId("mine"))
    answer = await asking
    worker.may_go.set()
    return answer


async def test_a_failure_amid_a_stream_is_its_last_event(gateway: LocalGateway) -> None:
    assert (await aborted(gateway, RESPONSES, SAID)).error["code"] == "cancelled"
    answer = await aborted(gateway, RESPONSES, {**SAID, "stream": True})
    assert (answer.status, answer.is_whole) == (200, False)
    *others, last = answer.named_events
    assert (last["type"], last["code"], last["sequence_number"]) == ("error", "cancelled", len(others))
    assert last["error"]["message"] == last["message"]
