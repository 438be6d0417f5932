"""The openai package with forced tools and typed answers, whole and streamed; prints what its helpers parsed."""

import json
import sys

import openai
from pets import Answer, Look

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
[model] = client.models.list()
tools = [openai.pydantic_function_tool(Look, name="look")]
said = [{"role": "user", "content": "hello"}]
settings = {"model": model.id, "messages": said, "max_tokens": 200, "seed": 1}
forced = {**settings, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
whole = client.chat.completions.create(**forced).choices[0]
events = []
with client.chat.completions.stream(**forced) as stream:
    for event in stream:
        if event.type == "tool_calls.function.arguments.delta":
            events.append(event.arguments_delta)
    final = stream.get_final_completion().choices[0]
named = {"type": "function", "function": {"name": "look"}}
parsed = client.chat.completions.parse(**{**forced, "tool_choice": named}).choices[0]
typed = client.chat.completions.parse(**settings, response_format=Answer).choices[0]
[call], [streamed], [chosen] = whole.message.tool_calls, final.message.tool_calls, parsed.message.tool_calls
turns = [
    *said,
    whole.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "2"},
]
after = client.chat.completions.create(**{**settings, "messages": turns, "tools": tools, "max_tokens": 4})
try:
    client.chat.completions.create(**{**forced, "tools": tools * 2})
    refused = None
except openai.BadRequestError as error:
    refused = error.param
print(
    json.dumps(
        {
            "arguments": [one.function.arguments for one in (call, streamed, chosen)],
            "parsed": [one.function.parsed_arguments.model_dump() for one in (streamed, chosen)],
            "deltas": events,
            "reasons": [one.finish_reason for one in (whole, final, parsed, typed)],
            "typed": typed.message.parsed.model_dump(),
            "after": after.usage.completion_tokens,
            "refused": refused,
        }
    )
)
