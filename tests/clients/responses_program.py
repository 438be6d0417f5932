"""The openai package's responses, whole, streamed and parsed, with forced tools; prints what its helpers read."""

import json
import sys

import openai
from pets import Answer, Look

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
[model] = client.models.list()
plain = {"model": model.id, "input": "hello", "max_output_tokens": 6, "extra_body": {"seed": 1}}
whole = client.responses.create(**plain)
with client.responses.create(stream=True, **plain) as stream:
    events = list(stream)
settings = {**plain, "max_output_tokens": 200}
tools = [openai.pydantic_function_tool(Look, name="look")["function"] | {"type": "function"}]
forced = {**settings, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "store": False}
called = client.responses.create(**forced)
with client.responses.stream(**forced) as stream:
    deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    final = stream.get_final_response()
typed = client.responses.parse(**settings, text_format=Answer)
[call], [streamed] = called.output, final.output
turns = [
    {"role": "user", "content": "hello"},
    call,
    {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
]
after = client.responses.create(**{**settings, "input": turns, "tools": tools, "max_output_tokens": 4})
search = {"type": "web_search"}
without = client.responses.with_raw_response.create(**plain, tools=[search])
refused = {}
for name, value in (("store", True), ("previous_response_id", whole.id), ("tool_choice", search)):
    try:
        client.responses.create(**{**plain, "tools": [search], name: value})
    except openai.BadRequestError as error:
        refused[name] = error.param
print(
    json.dumps(
        {
            "text": [
                whole.output_text,
                "".join(one.delta for one in events if one.type == "response.output_text.delta"),
                without.parse().output_text,
            ],
            "statuses": [one.status for one in (whole, events[-1].response, called, final, typed)],
            "usage": whole.usage.model_dump(),
            "last": events[-1].type,
            "arguments": [call.arguments, streamed.arguments, "".join(deltas)],
            "num_deltas": len(deltas),
            "typed": typed.output_parsed.model_dump(),
            "after": after.usage.output_tokens,
            "left_out": without.headers["x-baton-ignored"],
            "refused": refused,
        }
    )
)
