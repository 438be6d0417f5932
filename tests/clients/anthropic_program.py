"""The anthropic package against a base URL: messages whole and streamed, forced tools, counts; prints what it read."""

import json
import sys
from typing import Literal

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0)
said = [{"role": "user", "content": "hello"}]
plain = {"model": "smollm2", "messages": said, "max_tokens": 6, "extra_body": {"seed": 1}}
whole = client.messages.create(**plain)
with client.messages.stream(**plain) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
schema = {
    "type": "object",
    "properties": {"pet": {"enum": ["dog", "cat", "parrot"]}, "times": {"enum": [1, 2, 3]}},
    "required": ["pet", "times"],
    "additionalProperties": False,
}
tools = [{"name": "look", "description": "Looks.", "input_schema": schema}]
choice = {"type": "any", "disable_parallel_tool_use": True}
forced = {**plain, "max_tokens": 200, "tools": tools, "tool_choice": choice}
called = client.messages.create(**forced)
with client.messages.stream(**forced) as stream:
    deltas = [event.partial_json for event in stream if event.type == "input_json"]
    streamed = stream.get_final_message()
typed = client.messages.create(
    **{**plain, "max_tokens": 200, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
)
[call] = called.content
turns = [
    *said,
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}]},
]
after = client.messages.create(**{**plain, "messages": turns, "tools": tools, "max_tokens": 4})
counted = client.messages.count_tokens(model="smollm2", messages=turns, tools=tools)
refused = {}
for name, value in (("model", "other"), ("tools", [{"type": "bash_20250124", "name": "bash"}])):
    try:
        client.messages.create(**{**plain, name: value})
    except anthropic.APIStatusError as error:
        refused[name] = [error.status_code, error.body["error"]["type"], bool(error.request_id)]


def count(pet: Literal["dog", "cat"]) -> str:
    """Counts pets.

    Args:
        pet: which
    """
    counted_pets.append(pet)
    return "2"


counted_pets: list[str] = []
run = {**plain, "max_tokens": 200, "tools": [anthropic.beta_tool(count)], "tool_choice": choice, "max_iterations": 2}
ran = list(client.beta.messages.tool_runner(**run, thread=False))
try:
    list(client.beta.messages.tool_runner(**run))
except anthropic.BadRequestError as error:
    refused["thread"] = [error.status_code, error.body["error"]["type"], "thread=False" in error.message]
print(
    json.dumps(
        {
            "text": [whole.content[0].text, text, final.content[0].text],
            "reasons": [one.stop_reason for one in (whole, final, called, streamed)],
            "usage": [one.usage.model_dump(exclude_none=True) for one in (whole, final)],
            "calls": [call.input, streamed.content[0].input, json.loads("".join(deltas))],
            "num_deltas": len(deltas),
            "typed": json.loads(typed.content[0].text),
            "after": after.usage.input_tokens + after.usage.cache_read_input_tokens,
            "counted": counted.input_tokens,
            "refused": refused,
            "ran": [[block.type for block in one.content] for one in ran],
            "num_counted": len(counted_pets),
        }
    )
)
