"""Chats whose answers are held to calls and formats: a whole cluster behind the application, on a model of hashes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from engine.model.hash_model import HashModel
from gateway import fields
from gateway.chat import ChatDialect
from tests.gateway import local_gateway
from tests.gateway.local_gateway import LocalDoor
from tests.harness.local_cluster import LocalCluster
from text.answer.formats import NO_FORMATS
from wire.layout import KVLayout
from wire.trust.key_ring import NO_KEYS

CHAT = "/v1/chat/completions"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 300, eos_token_ids=(256,))
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
CLOSED = {"opened": "<think></think>"}
"""The template's twin closes the channel: a model of hashes would never."""
SAID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi", "name": "ann"}],
    "tools": TOOLS,
    "max_tokens": 1500,
    "temperature": 1,
    "chat_template_kwargs": CLOSED,
}
REQUIRED = {**SAID, "tool_choice": "required", "seed": 2}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cluster starts processes for grammars: seconds, on a busy machine."""
    monkeypatch.setattr(local_gateway, "WAIT_S", 60.0)


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster.running(MODEL, 1, 2) as running:
        yield running


def calls_of(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a whole answer, each checked against its schema."""
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    made = [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in choice["message"]["tool_calls"]
    ]
    for name, arguments in made:
        jsonschema.validate(arguments, SCHEMAS[name])
    return made


def streamed_calls(events: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    names: dict[int, str] = {}
    written: dict[int, str] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in call:
                names[call["index"]] = call["function"]["name"]
            written[call["index"]] = written.get(call["index"], "") + call["function"]["arguments"]
    return [(name, json.loads(written[index])) for index, name in names.items()]


async def test_required_and_named_calls(cluster: LocalCluster) -> None:
    door = LocalDoor(cluster.router, NO_KEYS)
    made = calls_of((await door.post(CHAT, REQUIRED)).json)
    assert made
    *events, last, _ = (await door.post(CHAT, {**REQUIRED, "stream": True})).events
    assert streamed_calls(events) == made
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "clock"}}
    only = calls_of((await door.post(CHAT, {**REQUIRED, "tool_choice": named})).json)
    assert {name for name, _ in only} == {"clock"}
    for seed in range(4):
        one = await door.post(CHAT, {**REQUIRED, "parallel_tool_calls": False, "seed": seed})
        assert len(calls_of(one.json)) == 1


async def test_responses_are_held_to_calls_and_formats(cluster: LocalCluster) -> None:
    door = LocalDoor(cluster.router, NO_KEYS)
    tools = [{"type": "function", "name": name, "parameters": one} for name, one in SCHEMAS.items()]
    body = {"input": "hi", "temperature": 1, "max_output_tokens": 1500, "chat_template_kwargs": CLOSED, "seed": 2}
    for choice, names in (("required", {*SCHEMAS}), ({"type": "function", "name": "clock"}, {"clock"})):
        made = (await door.post("/v1/responses", {**body, "tools": tools, "tool_choice": choice})).json["output"]
        assert made
        for call in made:
            assert (call["type"], call["name"] in names) == ("function_call", True)
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    typed = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    [message] = (await door.post("/v1/responses", {**body, "text": typed})).json["output"]
    jsonschema.validate(json.loads(message["content"][0]["text"]), WEATHER)


async def test_messages_are_held_to_calls_and_formats(cluster: LocalCluster) -> None:
    door = LocalDoor(cluster.router, NO_KEYS)
    tools = [{"name": name, "input_schema": one} for name, one in SCHEMAS.items()]
    said = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": CLOSED, "seed": 2}
    body = {**said, "temperature": 1, "max_tokens": 1500}
    for choice, names in (({"type": "any"}, {*SCHEMAS}), ({"type": "tool", "name": "clock"}, {"clock"})):
        answer = (await door.post("/v1/messages", {**body, "tools": tools, "tool_choice": choice})).json
        assert (answer["stop_reason"], {one["name"] for one in answer["content"]} <= names) == ("tool_use", True)
        for call in answer["content"]:
            jsonschema.validate(call["input"], SCHEMAS[call["name"]])
    typed = {"format": {"type": "json_schema", "schema": WEATHER}}
    [text] = (await door.post("/v1/messages", {**body, "output_config": typed})).json["content"]
    jsonschema.validate(json.loads(text["text"]), WEATHER)


async def test_another_worker_goes_on_amid_a_call(cluster: LocalCluster) -> None:
    door = LocalDoor(cluster.router, NO_KEYS)
    made = calls_of((await door.post(CHAT, REQUIRED)).json)
    tokens = 0
    prompt = [{"role": "user", "content": "hi", "name": "ann"}]
    options = {"tools": [json.dumps(one) for one in TOOLS], "tool_choice": {"required": True}}
    options |= {"chat_template_kwargs": json.dumps(CLOSED)}
    text = ""
    stream = door.client.stream(prompt, max_tokens=1500, temperature=1.0, seed=2, **options)  # type: ignore[arg-type]
    async for chunk in stream:
        tokens += len(chunk.token_ids)
        text += chunk.text
        if 40 < tokens < 1000:
            tokens = 1000
            # At once: a status asked for on a busy machine comes when the answer is over.
            decode = {name: one for name, one in cluster.workers.items() if name.startswith("d")}
            busy = [name for name, one in decode.items() if len(one.service.attempts)]
            for worker in busy:
                cluster.transports[worker].kill()
            assert busy
    written = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>' for name, given in made
    )
    assert text == written


async def test_a_format_beside_tools(cluster: LocalCluster) -> None:
    door = LocalDoor(cluster.router, NO_KEYS)
    tools = [tool(name=name, parameters=one, strict=True) for name, one in SCHEMAS.items()]
    body = {**SAID, "tools": tools, "guided_choice": ["yes", "no"]}
    for seed in range(4):
        [choice] = (await door.post(CHAT, {**body, "seed": seed})).json["choices"]
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["tool_calls"]
        else:
            assert choice["message"]["content"] in ("yes", "no")


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


FIRST = "tools[0].function.parameters"
GOOD = tool(name="f", parameters=CLOCK, strict=True)
REMOTE = {"properties": {"a": {"$ref": "https://example.com/a"}}}
FORMAT = {"guided_choice": ["yes", "no"]}


def strict(schema: object) -> dict[str, Any]:
    return {"tools": [tool(parameters=schema, strict=True)]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two of a name": ({"tools": [tool(), tool()]}, "tools"),
    "a cycle": (strict({"$ref": "#"}), FIRST),
    "a remote reference": (strict({"properties": {"a": {"$ref": "https://example.com/a"}}}), FIRST),
    "no object": (strict({"type": "array"}), FIRST),
    "a contradiction": (
        strict({"properties": {"a": False}, "required": ["a"], "additionalProperties": False}),
        FIRST,
    ),
    "schemas that are too long": (strict({"enum": ["a" * 70_000]}), FIRST),
    "schemas that are too long together": (
        {"tools": [tool(name=name, parameters={"enum": ["a" * 40_000]}, strict=True) for name in "fg"]},
        "tools",
    ),
    "the third of three, beside a good format": (
        {"tools": [GOOD, tool(name="h"), tool(name="g", parameters=REMOTE, strict=True)], **FORMAT},
        "tools[2].function.parameters",
    ),
    "a third that is too long": (
        {"tools": [GOOD, tool(name="h"), tool(name="g", parameters={"enum": ["a" * 70_000]}, strict=True)], **FORMAT},
        "tools[2].function.parameters",
    ),
    "a format beside good tools": ({"tools": [GOOD], "guided_json": REMOTE}, "guided_json"),
    "a function that is no tool": ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    "no tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "beside ignore_eos": ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    "a template of the client's": ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs"),
    "a token of the template": ({"chat_template_kwargs": {"bos_token": "a"}}, "chat_template_kwargs"),
    "a budget of none": ({"thinking_token_budget": 0}, "thinking_token_budget"),
    "a budget without a token": ({"thinking_token_budget": 9, "chat_template_kwargs": None}, "thinking_token_budget"),
    "not the assistant's": ({"continue_final_message": True}, "continue_final_message"),
    "both ends": ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
}


@pytest.mark.parametrize(("changed", "param"), BAD.values(), ids=BAD)
async def test_bad_tools_and_settings_of_chats(cluster: LocalCluster, changed: dict[str, Any], param: str) -> None:
    answer = await LocalDoor(cluster.router, NO_KEYS).post(CHAT, {**SAID, **changed})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_effort_and_a_budget_without_a_channel_say_nothing() -> None:
    for effort, variables in (("none", {"reasoning_effort": "none", "enable_thinking": False}), ("low", None)):
        dialect = ChatDialect(NO_FORMATS)
        given = {"messages": SAID["messages"], "reasoning_effort": effort, "thinking_token_budget": 9}
        taken = fields.take(given, dialect.fields)
        dialect.take_prompts(taken)
        assert taken == ({"chat_template_kwargs": json.dumps(variables)} if variables else {})


async def test_variables_reach_the_template_and_its_opener_the_answer(cluster: LocalCluster) -> None:
    body = {**SAID, "chat_template_kwargs": {"opened": "<think>"}, "max_tokens": 20, "seed": 2}
    [choice] = (await LocalDoor(cluster.router, NO_KEYS).post(CHAT, body)).json["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"] == ""


async def test_one_call_at_most_is_a_grammar_of_any_answer(cluster: LocalCluster) -> None:
    with_end = {**SAID, "parallel_tool_calls": False, "ignore_eos": True}
    door = LocalDoor(cluster.router, NO_KEYS)
    assert (await door.post(CHAT, with_end)).status == 400
    assert (await door.post(CHAT, {**with_end, "tools": [], "max_tokens": 4})).status == 200
