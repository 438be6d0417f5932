"""The litellm package against a base URL; prints its answers, typed ones and calls too, as JSON."""

import json
import sys

import litellm
from pets import Answer, Look

said = [{"role": "user", "content": "hello"}]
settings = {"api_base": sys.argv[1], "api_key": "none", "model": "openai/smollm2", "max_tokens": 6, "seed": 1}
whole = litellm.completion(messages=said, **settings)
chunks = list(litellm.completion(messages=said, stream=True, stream_options={"include_usage": True}, **settings))
longer = {**settings, "max_tokens": 200}
typed = litellm.completion(messages=said, response_format=Answer, **longer).choices[0].message.content
tool = {"type": "function", "function": {"name": "look", "parameters": Look.model_json_schema()}}
called = litellm.completion(messages=said, tools=[tool], tool_choice="required", **longer)
address = sys.argv[1].removesuffix("/v1")
messages = {"api_base": address, "api_key": "none", "model": "anthropic/smollm2", "max_tokens": 6}
refused = None
try:
    litellm.completion(messages=said, **{**settings, "temperature": 3})
except litellm.BadRequestError as error:
    refused = error.status_code
long = [{"role": "user", "content": "a dog and a cat " * 4000}]
too_long = []
for dialect in (settings, messages):
    for name, sent, max_tokens in (("prompt", long, 6), ("max_tokens", said, 8192)):
        try:
            litellm.completion(messages=sent, **{**dialect, "max_tokens": max_tokens})
        except litellm.ContextWindowExceededError:
            too_long.append(name)
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "chat_streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
            "cached_tokens": whole.usage.prompt_tokens_details.cached_tokens,
            "refused": refused,
            "too_long": too_long,
            "typed": json.loads(typed),
            "call": json.loads(called.choices[0].message.tool_calls[0].function.arguments),
            "messages": litellm.completion(messages=said, **messages).usage.completion_tokens,
        }
    )
)
